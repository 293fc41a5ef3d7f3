"""Hostile zip files of ``torch.save``."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from tests.fuzz.runner import main
from tests.fuzz.target import Target
from zexport.formats.pickle_values import TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file


def saved(*, legacy: bool) -> Sequence[bytes]:
    """A few small files, in one of torch's two containers."""
    shared = torch.arange(12.0)
    values: list[object] = [
        {"w": shared.view(3, 4), "t": shared.view(3, 4).t(), "b": torch.ones(2, dtype=torch.bool)},
        {"e": torch.empty(0), "s": torch.tensor(1.5), "h": torch.ones(5, dtype=torch.bfloat16)},
        [torch.nn.Parameter(torch.zeros(2, 2)), "text", {1: (2, 3)}],
    ]
    files = []
    for value in values:
        stream = io.BytesIO()
        torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
        files.append(stream.getvalue())
    return files


@cache
def seeds() -> Sequence[bytes]:
    """Small zip files."""
    return saved(legacy=False)


def read(data: bytes, folder: Path) -> object:
    """All that can be asked of the file: its value, its records, where its tensors lie."""
    path = folder / "rank.pt"
    path.write_bytes(data)
    file = read_torch_file(path)
    assert all(member.offset + member.nbytes <= len(data) for member in file.members)
    return [_extents(file, tensor, len(data)) for tensor in _tensors(file.value)]


def _tensors(value: object) -> list[TensorRef]:
    children = list(value.values()) if isinstance(value, dict) else value
    return [
        child
        for child in (children if isinstance(children, list | tuple) else ())
        if isinstance(child, TensorRef)
    ]


def _extents(file: TorchFile, tensor: TensorRef, nbytes: int) -> int:
    """The first bytes of a tensor lie within the file."""
    source = file.source(tensor)
    for extent in source.extents(0, min(source.nbytes, 4096)):
        assert 0 <= extent.offset <= extent.offset + extent.nbytes <= nbytes
    return source.nbytes


TARGET = Target("zips", seeds, read)

if __name__ == "__main__":
    main(TARGET)
