"""Plans made by hand over files that torch itself has written."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zexport.export.plan import (
    ExportPlan,
    FilePlan,
    Form,
    Origin,
    SideFile,
    SourceFile,
    TensorPlan,
)
from zexport.formats.safetensors import HeaderEntry, SafetensorsFrame, build_header
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Extent, Member
from zexport.storage.files import version

HUGE = 1 << 20


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found


def save(path: Path, tensors: Sequence[torch.Tensor]) -> tuple[SourceFile, list[Extent]]:
    """Write tensors with ``torch.save``; the file as a source, and where each tensor lies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({str(index): tensor for index, tensor in enumerate(tensors)}, path)
    members = sorted(_members(path), key=lambda member: member.offset)
    by_index = sorted(members, key=lambda member: int(member.name.rsplit("/", 1)[1]))
    extents = [Extent(path, member.offset, member.nbytes) for member in by_index]
    return source_file(path, tuple(members)), extents


def source_file(path: Path, members: tuple[Member, ...] = ()) -> SourceFile:
    return SourceFile(path, version(path), members)


def _members(path: Path) -> Iterable[Member]:
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            if "/data/" in info.filename:
                file.seek(info.header_offset + 26)
                name_nbytes, extra_nbytes = struct.unpack("<HH", file.read(4))
                offset = info.header_offset + 30 + name_nbytes + extra_nbytes
                yield Member(info.filename, offset, info.file_size, info.CRC)


@dataclass(frozen=True)
class Wanted:
    """A tensor of a plan: where it is stored, and what it is to become."""

    name: str
    shape: tuple[int, ...]
    stored: DType
    target: DType
    source: ByteSource


def shard_plan(filename: str, wanted: Sequence[Wanted]) -> FilePlan:
    header, offsets = build_header([HeaderEntry(w.name, w.target, w.shape) for w in wanted])
    tensors = tuple(
        TensorPlan(w.name, w.shape, w.target, w.name, w.stored, w.source, len(header) + offset)
        for w, offset in zip(wanted, offsets, strict=True)
    )
    return FilePlan(filename, SafetensorsFrame(header), tensors)


def export_plan(
    out_dir: Path,
    shards: Mapping[str, Sequence[Wanted]],
    sources: Sequence[SourceFile],
    *,
    side_files: tuple[SideFile, ...] = (),
    overwrite: bool = False,
    jobs: int = 2,
    chunk_nbytes: int = HUGE,
) -> ExportPlan:
    return ExportPlan(
        out_dir=out_dir,
        origin=Origin("run/global_step3", 3, "ZeRO-2", 2),
        form=Form(("float32",), "hub", weights_only=False),
        shards=tuple(shard_plan(name, wanted) for name, wanted in shards.items()),
        side_files=side_files,
        sources=tuple(sources),
        provenance={"tag": "global_step3", "world_size": 2},
        warnings=("no config was found",),
        overwrite=overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
    )
