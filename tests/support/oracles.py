"""The naive answer: load every file with torch, lay everything end to end in memory, cut it up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import Tensors, deepspeed_names


def consolidated(tag_dir: Path) -> Tensors:
    """Every tensor of a checkpoint, at its own element type; tied names left out."""
    models = [_load(path) for path in _by_rank(tag_dir, "model_states")]
    optimizers = [_load(path)["optimizer_state_dict"] for path in _by_rank(tag_dir, "optim_states")]
    is_zero3 = "fp32_flat_groups" in optimizers[0]
    tensors = (_zero3 if is_zero3 else _zero12)(models[0], optimizers)
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        pieces = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        tensors[name] = torch.cat(pieces)[: shape.numel()].view(shape)
    for name, value in models[0]["module"].items():
        is_placeholder = is_zero3 and name not in models[0]["buffer_names"]
        if name not in tensors and name not in models[0]["shared_params"] and not is_placeholder:
            tensors[name] = value
    return tensors


def _zero3(model: Any, optimizers: list[Any]) -> Tensors:
    flats = [torch.cat(o["fp32_flat_groups"] or [torch.empty(0)]) for o in optimizers]
    tensors: Tensors = {}
    offset = 0
    for name, shape in _items(model["param_shapes"]):
        share = -(-shape.numel() // len(flats))
        whole = torch.cat([flat[offset : offset + share] for flat in flats])
        tensors[name] = whole[: shape.numel()].view(shape)
        offset += share
    return tensors


def _zero12(model: Any, optimizers: list[Any]) -> Tensors:
    tensors: Tensors = {}
    for index, shapes in enumerate(model["param_shapes"]):
        flat = torch.cat([o["single_partition_of_fp32_groups"][index] for o in optimizers])
        gaps = optimizers[0].get("param_alignment_paddings", {index: [0] * len(shapes)})[index]
        offset = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            tensors[name] = flat[offset : offset + shape.numel()].view(shape)
            offset += shape.numel() + gap
    return tensors


def _items(groups: Any) -> list[tuple[str, torch.Size]]:
    return [item for group in groups for item in group.items()]


def _by_rank(tag_dir: Path, kind: str) -> list[Path]:
    def rank(path: Path) -> int:
        return int(path.name.partition("pp_rank_")[2].partition("_")[0] or 0)

    return sorted(tag_dir.glob(f"*_{kind}.pt"), key=rank)


def _load(path: Path) -> Any:
    with deepspeed_names():
        return torch.load(path, weights_only=False)


def cast(tensors: Tensors, dtype: torch.dtype, buffers: set[str]) -> Tensors:
    """What an export to ``dtype`` makes of them: fp32 leaves buffers alone, integers stay."""
    kept = {
        name
        for name, value in tensors.items()
        if not value.is_floating_point() or (name in buffers and dtype is torch.float32)
    }
    return {name: value if name in kept else value.to(dtype) for name, value in tensors.items()}


def differences(found: Tensors, expected: Tensors) -> list[str]:
    """Names that are not there, or not the same bit for bit."""
    return sorted(
        (found.keys() ^ expected.keys())
        | {name for name in found.keys() & expected.keys() if not same(found[name], expected[name])}
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether type, shape and every bit agree (NaN with NaN of the same bits)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other) if t.numel()]
    return not bits or torch.equal(bits[0], bits[1])
