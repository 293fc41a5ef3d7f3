"""Checkpoints of any size that take no room: their tensors are holes in the files."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32, crc32_combine
from torch._utils import _rebuild_tensor_v2

Shape = tuple[int, ...]


_STORAGES = {torch.float32: torch.FloatStorage, torch.bfloat16: torch.BFloat16Storage}


@dataclass(frozen=True)
class Hole:
    """Stands for a tensor of zeros but for ``marks`` by index; ``key`` names its record."""

    key: str
    numel: int
    dtype: torch.dtype = torch.float32
    marks: Mapping[int, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.numel * int(self.dtype.itemsize)

    def marked(self) -> list[tuple[int, bytes]]:
        """Bytes that are not holes, by offset."""
        size = self.dtype.itemsize
        return [
            (at * size, torch.tensor([one], dtype=self.dtype).view(torch.uint8).numpy().tobytes())
            for at, one in sorted(self.marks.items())
        ]


@dataclass(frozen=True)
class _Storage:
    hole: Hole


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, _Storage):
            hole = obj.hole
            return ("storage", _STORAGES[hole.dtype], hole.key, "cpu", hole.numel)
        return None

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, Hole):
            return NotImplemented
        args: tuple[object, ...] = (_Storage(obj), 0, (obj.numel,), (1,), False, OrderedDict())
        return _rebuild_tensor_v2, args


def write_with_holes(
    path: Path, value: object, holes: tuple[Hole, ...], root: str | None = None
) -> None:
    """What ``torch.save`` would write, every tensor of ``holes`` a hole of its size."""
    root = root or path.stem
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", buffer.getvalue())
        archive.writestr(f"{root}/byteorder", "little")
        for hole in holes:
            _skip_record(archive, f"{root}/data/{hole.key}", hole)


def _skip_record(archive: zipfile.ZipFile, name: str, hole: Hole) -> None:
    info = zipfile.ZipInfo(name)
    info.file_size = info.compress_size = hole.nbytes
    info.header_offset = archive.start_dir
    info.CRC = _crc_of(hole)
    assert archive.fp is not None
    archive.fp.seek(info.header_offset)
    archive.fp.write(info.FileHeader(zip64=True))
    begin = archive.fp.tell()
    for offset, data in hole.marked():
        archive.fp.seek(begin + offset)
        archive.fp.write(data)
    archive.fp.seek(begin + hole.nbytes)
    archive.start_dir = archive.fp.tell()
    archive.filelist.append(info)
    archive.NameToInfo[name] = info


def _crc_of(hole: Hole) -> int:
    crc, done = 0, 0
    for offset, data in (*hole.marked(), (hole.nbytes, b"")):
        crc = crc32_combine(crc, _crc_of_zeros(offset - done), offset - done)
        crc, done = crc32(data, crc), offset + len(data)
    return crc


def _crc_of_zeros(nbytes: int) -> int:
    """Return the CRC-32 of ``nbytes`` zeros, combined from powers of two."""
    crc, power, length = 0, crc32(b"\0"), 1
    while length <= nbytes:
        if nbytes & length:
            crc = crc32_combine(crc, power, length)
        power, length = crc32_combine(power, power, length), length * 2
    return crc


def write_sparse_zero3(
    root: Path,
    shapes: Mapping[str, Shape],
    world_size: int,
    dtype: torch.dtype = torch.float32,
    marks: Mapping[str, Mapping[int, float]] | None = None,
) -> None:
    """A whole checkpoint of step 1000 below ``root``, with ``latest``.

    ``marks`` are values of every rank's flat group, and names the states that the optimizer has.
    """
    tag_dir = root / "global_step1000"
    tag_dir.mkdir(parents=True)
    (root / "latest").write_text("global_step1000")
    numel = sum(-(-prod(shape) // world_size) for shape in shapes.values())
    marks = marks or {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    holes = {name: Hole(str(n), numel, dtype, own) for n, (name, own) in enumerate(marks.items())}
    saved: dict[int, tuple[bytes, bytes]] = {}
    for rank in range(world_size):
        path = tag_dir / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        inside = path.stem.encode()
        if len(inside) not in saved:
            torch.save(_model(shapes), path)
            saved[len(inside)] = inside, path.read_bytes()
        like, content = saved[len(inside)]  # the zip differs in nothing but the folder's name
        path.write_bytes(content.replace(like, inside))
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        write_with_holes(tag_dir / name, _optimizer(holes, world_size), (*holes.values(),))


def _model(shapes: Mapping[str, Shape]) -> dict[str, object]:
    return {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in shapes),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(shape)) for n, shape in shapes.items())],
        "frozen_param_shapes": OrderedDict(),
        "frozen_param_fragments": OrderedDict(),
        "shared_params": {},
        "lr_scheduler": {"last_epoch": 1000},
        "global_steps": 1000,
        "mp_world_size": 1,
        "ds_config": {"optimizer": {"type": "AdamW"}},
        "ds_version": "0.19.8",
    }


def _optimizer(holes: Mapping[str, Hole], world_size: int) -> dict[str, object]:
    flat, *_ = holes.values()
    moments = {"step": 1000, **{n: one for n, one in holes.items() if one is not flat}}
    states = {
        "zero_stage": 3,
        "partition_count": world_size,
        "optimizer_state_dict": {"state": {0: moments}, "param_groups": [{"params": [0]}]},
        "fp32_flat_groups": [flat],
    }
    return {"optimizer_state_dict": states, "ds_config": {}, "ds_version": "0.19.8"}
