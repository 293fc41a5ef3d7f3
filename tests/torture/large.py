"""Tensors over 4 GiB and 2^31 elements, files over 2^32 elements: read from holes, written whole.

The output of one step takes up to 17.2 GB of disk at a time.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support.exports import export, invoke, verify
from tests.support.sparse_checkpoint import Hole, write_sparse_zero3, write_with_holes

_SHAPE = (4, 536_870_925)
_NUMEL = 2_147_483_700
_PARTITION = _NUMEL // 2
_PLACES = (
    *(0, 1, _NUMEL - 2, _NUMEL - 1),
    *(at + step for at in (1 << 30, 1 << 31, _PARTITION) for step in (-1, 0)),
)
"""Byte 2^32 is element 2^30 in fp32, 2^31 in bf16."""
_CHUNK = 1 << 26

_Marks = dict[int, float]


def every_large(folder: Path) -> str:
    """Export, reshard and verify sparse checkpoints; describe what was done."""
    assert 4 * _SHAPE[1] == _NUMEL > 1 << 31
    done = (_exported(folder / "zero"), _resharded(folder / "ranks"), _of_chunk(folder / "dcp"))
    return "; ".join(done)


def _marks(first: int, start: int = 0) -> _Marks:
    """Values from ``first`` on, exact in bf16, for a tensor that begins at an element."""
    return {start + at: float(first + n) for n, at in enumerate(_PLACES)}


def _exported(folder: Path) -> str:
    """fp32 master weights of one rank as one bf16 shard of 2 tensors."""
    flat = _marks(1) | _marks(101, _NUMEL)
    marks = {"master": flat, "exp_avg": {}, "exp_avg_sq": {}}
    write_sparse_zero3(folder / "run", {"a": _SHAPE, "b": _SHAPE}, 1, marks=marks)
    out = folder / "out"
    export(folder / "run", out, "--dtype", "bf16", "--max-shard-size", "100GB")
    _verified(out, folder / "run")
    assert _tensors(out / "model.safetensors") == {"a": _marks(1), "b": _marks(101)}
    shutil.rmtree(folder)
    return "2 tensors of 2^31 elements, exported from fp32 to one bf16 file"


def _resharded(folder: Path) -> str:
    """bf16 master weights and states of one rank for two: 2^32 elements in each file."""
    run, out = folder / "run", folder / "out"
    marks = {
        "master": _marks(1) | _marks(101, _NUMEL),
        "momentum_buffer": _marks(51) | _marks(151, _NUMEL),
    }
    write_sparse_zero3(run, {"a": _SHAPE, "b": _SHAPE}, 1, torch.bfloat16, marks)
    invoke("reshard", run, out, "-n", 2, "--quiet")
    _verified(out, run)
    for rank in range(2):
        (path,) = out.glob(f"*/*_rank_{rank}_*optim_states.pt")
        assert path.stat().st_size > 2 << 32
        inner = torch.load(path, mmap=True, weights_only=False)["optimizer_state_dict"]
        states = inner["optimizer_state_dict"]["state"].values()
        kept = [one["momentum_buffer"] for one in states]
        for name, found in {"master": inner["fp32_flat_groups"], "momentum_buffer": kept}.items():
            assert _found(_bits(one) for one in found) == _partition(marks[name], rank)
    shutil.rmtree(folder)
    return "resharded as bf16 from 1 rank to 2"


def _partition(flat: Mapping[int, float], rank: int) -> _Marks:
    """What a rank of two has of the two tensors."""
    found = {}
    for at, value in flat.items():
        tensor, own = divmod(at, _NUMEL)
        owner, place = divmod(own, _PARTITION)
        if owner == rank:
            found[tensor * _PARTITION + place] = value
    return found


def _of_chunk(folder: Path) -> str:
    """A DCP folder with one chunk of 4.3 GB."""
    run, out = folder / "run", folder / "out"
    run.mkdir(parents=True)
    hole = Hole("0", _NUMEL, torch.bfloat16, _marks(1))
    path = run / "__0_0.distcp"
    write_with_holes(path, hole, (hole,), "archive")
    start, shape = torch.Size((0,)), torch.Size((_NUMEL,))
    whole = TensorStorageMetadata(
        TensorProperties(torch.bfloat16), shape, [ChunkStorageMetadata(start, shape)]
    )
    place = _StorageInfo(path.name, 0, path.stat().st_size)
    content = Metadata({"model.a": whole}, {"model.a": ("model", "a")},
                       {MetadataIndex("model.a", start): place})  # fmt: skip
    (run / ".metadata").write_bytes(pickle.dumps(content))
    export(run, out, "--max-shard-size", "100GB")
    _verified(out, run)
    assert _tensors(out / "model.safetensors") == {"a": _marks(1)}
    shutil.rmtree(folder)
    return "one DCP chunk of 4.3 GB exported"


def _verified(out: Path, run: Path) -> None:
    assert verify(out, "--quiet")["ok"]
    assert verify(out, "--against", run, "--quiet")["ok"]


def _tensors(path: Path) -> dict[str, _Marks]:
    """The values of a bf16 file that are not 0, by tensor."""
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(nbytes))
    del header["__metadata__"]
    found = {}
    for name, one in header.items():
        begin, end = one["data_offsets"]
        assert (one["dtype"], end - begin) == ("BF16", 2 * _NUMEL)
        bits = np.memmap(path, np.uint16, "r", 8 + nbytes + begin, (_NUMEL,))
        found[name] = _found([bits])
    return found


def _bits(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    assert tensor.dtype is torch.bfloat16
    bits: npt.NDArray[np.uint16] = tensor.view(torch.int16).numpy().view(np.uint16)
    return bits


def _found(parts: Iterable[npt.NDArray[np.uint16]]) -> _Marks:
    """The values that are not 0 of arrays that follow each other."""
    found, begin = _Marks(), 0
    for bits in parts:
        for first, last in pairwise((*range(0, len(bits), _CHUNK), len(bits))):
            part = bits[first:last]
            for at in np.flatnonzero(part):
                value = (part[at : at + 1].astype(np.uint32) << 16).view(np.float32)
                found[begin + first + int(at)] = float(value[0])
        begin += len(bits)
    return found
