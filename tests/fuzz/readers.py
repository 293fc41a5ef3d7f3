"""Malicious pickles, zip and legacy torch files, and safetensors files."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import safetensors.torch
import torch

from tests.fuzz.runner import Target
from zexport.formats.pickle_reader import load
from zexport.formats.pickle_values import TensorRef
from zexport.formats.safetensors import read_header
from zexport.formats.torch_file import read_torch_file

FIXTURES = Path(__file__).parents[2] / "fixtures"
_SEED_NBYTES_MAX = 6000


@cache
def pickles() -> Sequence[bytes]:
    """Return pickles of every protocol and of real rank files."""
    value = {"a": [1, -1, 2**70, 1.5, "ü", b"x", None, True, (1, 2, 3, 4)], (1,): {"b": {3}}}
    found = dict.fromkeys(pickle.dumps(value, protocol) for protocol in range(2, 6))
    for path in sorted(FIXTURES.glob("*/ckpt/**/*.pt")):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
                found[archive.read(name)] = None
    return [data for data in found if len(data) <= _SEED_NBYTES_MAX][:60]


@cache
def torch_files(*, legacy: bool) -> Sequence[bytes]:
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
def safetensors_files() -> Sequence[bytes]:
    tensors = {"a": torch.zeros(2, 3), "b.c": torch.ones((), dtype=torch.int64), "ü": torch.ones(0)}
    with_metadata = safetensors.torch.save(tensors, metadata={"format": "pt"})
    return [safetensors.torch.save(tensors), with_metadata, safetensors.torch.save({})]


def read_torch(data: bytes, folder: Path) -> object:
    """Read a file; every record and tensor is within it."""
    path = folder / "rank.pt"
    path.write_bytes(data)
    file = read_torch_file(path)
    assert all(record.offset + record.nbytes <= len(data) for record in file.records)
    children = file.value.values() if isinstance(file.value, dict) else file.value
    for tensor in children if isinstance(children, list | tuple) else [*(children or ())]:
        if isinstance(tensor, TensorRef):
            source = file.source(tensor)
            for extent in source.extents(0, min(source.nbytes, 4096)):
                assert 0 <= extent.offset <= extent.offset + extent.nbytes <= len(data)
    return file


def read_safetensors(data: bytes, folder: Path) -> object:
    """Read a header; every tensor is within the file."""
    path = folder / "model.safetensors"
    path.write_bytes(data)
    header = read_header(path)
    assert all(one.offset + one.nbytes <= len(data) for one in header.tensors.values())
    return header


TARGETS = {
    "pickles": Target("pickles", pickles, lambda data, folder: load(data, path=folder / "x.pt")),
    "zips": Target("zips", partial(torch_files, legacy=False), read_torch),
    "legacy": Target("legacy", partial(torch_files, legacy=True), read_torch),
    "safetensors_files": Target("safetensors_files", safetensors_files, read_safetensors),
}
