"""Every master and optimizer state of a checkpoint by name, cut out of its files by torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

States = dict[str, torch.Tensor]
"""By name and kind, as in ``embed.weight|exp_avg``; flat, whole, without padding."""


def raw_states(tag_dir: Path, order: Sequence[Sequence[str]] = ()) -> States:
    """The states; ``order`` has the names by group, for ZeRO-0, whose files have none."""
    models = [_load(path) for path in by_rank(tag_dir, "model_states")]
    files = [_load(path)["optimizer_state_dict"] for path in by_rank(tag_dir, "optim_states")]
    if not files:
        return _zero0(models[0], order)
    return (_zero3 if "fp32_flat_groups" in files[0] else _zero12)(models[0], files)


def universal_states(tag_dir: Path) -> States:
    """The states of a universal checkpoint, each out of a file of its own."""
    found: States = {}
    for path in tag_dir.glob("zero/*/*.pt"):
        value = _load(path)
        value = value["param"] if isinstance(value, dict) else value
        is_step = path.stem == "step"
        state = torch.as_tensor(value, dtype=torch.float64) if is_step else value.reshape(-1)
        found[f"{path.parent.name}|{path.stem}"] = state
    return found


def plain(value: Any) -> Any:
    """A value with tensors as what they hold, so that two can be compared."""
    if torch.is_tensor(value):
        return value.dtype, list(value.shape), value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def _zero3(model: Any, files: list[Any]) -> States:
    states: States = {}
    for index, shapes in enumerate(model["param_shapes"]):
        sizes = {name: shape.numel() for name, shape in shapes.items()}
        shares = {name: math.ceil(size / len(files)) for name, size in sizes.items()}
        inner = [file["optimizer_state_dict"]["state"].get(index, {}) for file in files]
        kinds = {"fp32": [file["fp32_flat_groups"][index].detach() for file in files]}
        kinds |= {kind: [one[kind] for one in inner] for kind in inner[0]}
        for kind, parts in kinds.items():
            offset = 0
            for name, size in sizes.items():
                if not _is_flat(parts[0], sum(shares.values())):
                    states[f"{name}|{kind}"] = torch.as_tensor(parts[0], dtype=torch.float64)
                    continue
                share = shares[name]
                whole = torch.cat([part.reshape(-1)[offset : offset + share] for part in parts])
                states[f"{name}|{kind}"] = whole[:size]
                offset += share
    return states


def _zero12(model: Any, files: list[Any]) -> States:
    states: States = {}
    for index, shapes in enumerate(model["param_shapes"]):
        sizes = [(name, shape.numel()) for name, shape in shapes.items()]
        gaps = files[0].get("param_alignment_paddings", {index: [0] * len(sizes)})[index]
        base = [file["base_optimizer_state"] for file in files]
        inner = [
            one["state"].get(index, {}) if isinstance(one, dict) else one[index] for one in base
        ]
        kinds = {
            "fp32": [file["single_partition_of_fp32_groups"][index].detach() for file in files]
        }
        kinds |= {kind: [one[kind] for one in inner] for kind in inner[0]}
        groups = base[0]["param_groups"] if isinstance(base[0], dict) else []
        is_muon = any(group.get("use_muon") for group in groups[index : index + 1])
        if is_muon and "momentum_buffer" in kinds:
            partition = math.ceil(sum(n for _, n in sizes) / (2 * len(files))) * 2
            states |= _muon(sizes, kinds.pop("momentum_buffer"), partition)
        for kind, parts in kinds.items():
            states |= _cut(kind, parts, sizes, gaps)
    return states


def _cut(kind: str, parts: list[Any], sizes: Iterable[tuple[str, int]], gaps: Any) -> States:
    """Split a flat group into its tensors; padding follows the last one."""
    if not torch.is_tensor(parts[0]) or parts[0].ndim == 0:
        return {f"{n}|{kind}": torch.as_tensor(parts[0], dtype=torch.float64) for n, _ in sizes}
    flat, offset, states = torch.cat(parts), 0, {}
    for (name, size), gap in zip(sizes, gaps, strict=True):
        states[f"{name}|{kind}"] = flat[offset : offset + size]
        offset += size + gap
    return states


def _muon(sizes: list[tuple[str, int]], parts: list[torch.Tensor], partition: int) -> States:
    """Each rank holds the whole of every parameter that touches its partition."""
    states: States = {}
    for rank, part in enumerate(parts):
        offset = place = 0
        for name, size in sizes:
            if place < (rank + 1) * partition and place + size > rank * partition:
                whole = part[offset : offset + size]
                assert torch.equal(states.setdefault(f"{name}|momentum_buffer", whole), whole), name
                offset += size
            place += size
        assert offset == part.numel()
    return states


def _zero0(model: Any, order: Sequence[Sequence[str]]) -> States:
    """Return fp32 master weights by optimizer position, or module weights if there are none."""
    saved = model["optimizer"]
    inner = saved.get("optimizer_state_dict", saved)
    states, position = {}, 0
    for index, names in enumerate(order):
        shapes = [model["module"][name].shape for name in names]
        sizes = [(name, shape.numel()) for name, shape in zip(names, shapes, strict=True)]
        if "fp32_groups_flat" in saved:
            kinds = {
                "fp32": saved["fp32_groups_flat"][index].detach(),
                **inner["state"].get(index, {}),
            }
            for kind, flat in kinds.items():
                states |= _cut(kind, [flat], sizes, [0] * len(sizes))
            continue
        groups = saved.get("fp32_groups", [[model["module"][n] for n in ns] for ns in order])
        for (name, _), master in zip(sizes, groups[index], strict=True):
            kinds = {"fp32": master.detach(), **inner["state"].get(position, {})}
            for kind, value in kinds.items():
                states |= _cut(
                    kind,
                    [torch.as_tensor(value).reshape(-1) if torch.as_tensor(value).ndim else value],
                    [(name, master.numel())],
                    [0],
                )
            position += 1
    return states


def _is_flat(value: Any, numel: int) -> bool:
    return torch.is_tensor(value) and value.ndim > 0 and value.numel() == numel


def by_rank(tag_dir: Path, kind: str) -> list[Path]:
    def numbers(path: Path) -> list[int]:
        return [int(one) for one in re.findall(r"\d+", path.name)]

    return sorted(tag_dir.glob(f"*_{kind}.pt"), key=numbers)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)
