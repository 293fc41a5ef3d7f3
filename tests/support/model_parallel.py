"""Checkpoints of several model-parallel ranks, made, joined and read back."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import Tensors
from zexport.checkpoint.contents import Inventory
from zexport.checkpoint.layouts.structure import Structure, assemble
from zexport.checkpoint.rank_files import RankFileKind, list_rank_files
from zexport.checkpoint.ranks import RankStates, Save, read_ranks
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource
from zexport.ranges.replicas import CastReplica, Replica

Edit = Callable[[dict[str, Any]], object]

_TORCH = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.I64: torch.int64,
}


def cases(prefix: str) -> list[Path]:
    """Real checkpoints whose names begin so: of this repository, and of ZEXPORT_CASES."""
    folders = [Path(__file__).parents[2] / "fixtures"]
    if own := os.environ.get("ZEXPORT_CASES"):
        folders.append(Path(own))
    return sorted(file.parent for folder in folders for file in folder.glob(f"{prefix}*/case.json"))


def tag_dir(case: Path) -> Path:
    return case / "ckpt" / (case / "ckpt" / "latest").read_text()


def cells(tag: Path) -> dict[int, RankStates]:
    files = [f for f in list_rank_files(tag) if f.kind is not RankFileKind.PIPELINE_LAYER]
    indices = sorted({file.mp_rank for file in files})
    return {i: read_ranks(tag, [f for f in files if f.mp_rank == i]) for i in indices}


def assembled(tag: Path, structure: Structure) -> Inventory:
    return assemble(Save(tag, list_rank_files(tag), cells(tag)), structure)


def joined_ranks(tag: Path) -> Inventory:
    return assembled(tag, Structure.TENSOR)


def joined_stages(tag: Path) -> Inventory:
    return assembled(tag, Structure.PIPELINE)


def values(inventory: Inventory) -> Tensors:
    """Every tensor, tied names included."""
    found: Tensors = {}
    for tensor in inventory.tensors:
        assert tensor.source is not None
        raw = np.frombuffer(read(tensor.source), np.uint8).copy()
        found[tensor.name] = torch.from_numpy(raw).view(_TORCH[tensor.dtype]).view(tensor.shape)
    return found | {alias: found[name] for alias, name in inventory.aliases.items()}


def read(source: ByteSource) -> bytes:
    """All bytes, asked for in windows of an odd length."""
    return b"".join(
        part.path.read_bytes()[part.offset : part.offset + part.nbytes]
        for start in range(0, source.nbytes, 1000)
        for part in source.extents(start, min(start + 1000, source.nbytes))
    )


def unequal(replicas: Iterable[Replica | CastReplica]) -> list[str]:
    """The copies that differ, where need be after a cast."""
    return [one.name for one in replicas if _kept(one) != read(one.other)]


def _kept(one: Replica | CastReplica) -> bytes:
    raw = read(one.kept)
    if isinstance(one, Replica):
        return raw
    kept = torch.frombuffer(bytearray(raw), dtype=_TORCH[one.kept_dtype])
    return kept.to(_TORCH[one.other_dtype]).view(torch.uint8).numpy().tobytes()


def truth(case: Path) -> Tensors:
    tensors: Tensors = load_file(case / "truth.safetensors")
    return tensors


def described(case: Path) -> Any:
    return json.loads((case / "case.json").read_text())


Shards = Mapping[tuple[int, int], Tensors]


def save_grid(
    folder: Path, shards: Shards, buffers: Shards, info: dict[str, Any] | None, tensor: int
) -> Path:
    """Stages and tensor ranks under ZeRO-1, as DeepSpeed writes them; keys are (stage, rank).

    ``shards`` are trained, ``buffers`` are not; both have full names, ``<layer>.<name>``.
    """
    folder.mkdir()
    for (stage, rank), own in shards.items():
        index = f"{stage * tensor + rank:02d}"
        model: dict[str, Any] = {
            "module": None,
            "buffer_names": list(buffers[stage, rank]),
            "param_shapes": [OrderedDict((name, value.shape) for name, value in own.items())],
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "global_steps": 2,
            "mp_world_size": len(shards),
            "ds_version": "0.16.0",
        } | ({} if info is None else {"universal_checkpoint_info": info})
        flat = torch.cat([value.reshape(-1) for value in own.values()])
        optimizer = {
            "zero_stage": 1,
            "partition_count": [1],
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {"state": {0: {"step": torch.tensor(2.0)}}},
        }
        torch.save(model, folder / f"mp_rank_{index}_model_states.pt")
        path = folder / f"zero_pp_rank_0_mp_rank_{index}_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.16.0"}, path)
        _save_layers(folder, {**own, **buffers[stage, rank]}, rank if tensor > 1 else None)
    return folder


def _save_layers(folder: Path, tensors: Tensors, rank: int | None) -> None:
    layers: dict[str, Tensors] = {}
    for name, value in tensors.items():
        layer, _, key = name.partition(".")
        if layer.isdecimal():
            layers.setdefault(layer, {})[key] = value
    middle = "" if rank is None else f"-model_{rank:02d}"
    for layer, own in layers.items():
        torch.save(own, folder / f"layer_{int(layer):02d}{middle}-model_states.pt")
