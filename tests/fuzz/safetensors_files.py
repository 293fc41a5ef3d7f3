"""Hostile safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from tests.fuzz.runner import main
from tests.fuzz.target import Target
from zexport.formats.safetensors import read_header


@cache
def seeds() -> Sequence[bytes]:
    """Small files."""
    tensors = {"a": torch.zeros(2, 3), "b.c": torch.ones((), dtype=torch.int64), "ü": torch.ones(0)}
    return [save(tensors), save(tensors, metadata={"format": "pt"}), save({})]


def read(data: bytes, folder: Path) -> object:
    """The header; every tensor lies within the file."""
    path = folder / "model.safetensors"
    path.write_bytes(data)
    header = read_header(path)
    for tensor in header.tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(data)
    return header


TARGET = Target("safetensors_files", seeds, read)

if __name__ == "__main__":
    main(TARGET)
