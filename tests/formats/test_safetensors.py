"""Safetensors files of zexport against the library, in both directions."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import zexport
from tests.support.checkpoints import Model, Run, save
from zexport import DamagedCheckpointError, UnsupportedError, ZexportError
from zexport.formats.safetensors import HeaderEntry, build_header, read_header
from zexport.ranges.dtypes import DType

_IN_A_FOLDER = [HealthCheck.function_scoped_fixture]


def test_export_of_a_tiny_model_has_the_bytes_of_the_library(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0])}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    root = save(Model([tensors]), Run(), tmp_path / "run")
    zexport.consolidate(root, tmp_path / "out", layout="memory")
    ours = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()


def test_file_of_the_library_is_read(tmp_path: Path) -> None:
    tensors = {
        dtype.torch_name: torch.zeros(3, 2, dtype=getattr(torch, dtype.torch_name))
        for dtype in DType
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "more": "text"})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "more": "text"}
    with safe_open(path, framework="np") as theirs:
        assert set(header.tensors) == set(theirs.keys())
        for name, tensor in header.tensors.items():
            assert tensor.dtype.value == theirs.get_slice(name).get_dtype()
            assert list(tensor.shape) == theirs.get_slice(name).get_shape()


@given(where=st.integers(0, 250), byte=st.integers(0, 255), cut=st.integers(-2, 2))
@settings(deadline=None, max_examples=150, suppress_health_check=_IN_A_FOLDER)
def test_file_that_the_library_refuses_is_refused(
    tmp_path: Path, where: int, byte: int, cut: int
) -> None:
    """Any byte of a header changed, in a file of the right size, longer or shorter."""
    header, _ = build_header(
        [HeaderEntry("first", DType.F32, (2, 3)), HeaderEntry("second", DType.BF16, (4,))]
    )
    data = bytearray(header + bytes(32))
    data[where % len(header)] = byte
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(data[: len(data) + min(cut, 0)]) + bytes(max(cut, 0)))
    try:
        ours = set(read_header(path).tensors)
    except ZexportError:
        return
    try:
        with safe_open(path, framework="np") as opened:
            assert set(opened.keys()) == ours
    except SafetensorError as error:
        raise AssertionError(f"accepted what the library refuses: {error}") from error


@pytest.mark.parametrize("name", ["__metadata__", "twice", "\ud800"])
def test_name_that_a_file_cannot_contain_is_refused(name: str) -> None:
    entries = [HeaderEntry("twice", DType.U8, (1,)), HeaderEntry(name, DType.U8, (1,))]
    with pytest.raises(UnsupportedError, match="--rename"):
        build_header(entries)


def test_header_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zexport.formats.safetensors.HEADER_NBYTES_LIMIT", 64)
    with pytest.raises(UnsupportedError, match="--max-shard-size"):
        build_header([HeaderEntry("name", DType.F32, (2, 3))])


def _tensor(begin: int, end: int, dtype: str = "F32", **changes: object) -> dict[str, object]:
    shape = [(end - begin) // 4]
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **changes}


@pytest.mark.parametrize(
    ("table", "nbytes", "message"),
    [
        ({"a": _tensor(4, 8)}, 8, "data offsets"),
        ({"a": _tensor(0, 8), "b": _tensor(4, 8)}, 8, "data offsets"),
        ({"a": _tensor(0, 4), "b": _tensor(8, 12)}, 12, "data offsets"),
        ({"a": _tensor(0, 8, shape=[3])}, 8, "data offsets"),
        ({"a": _tensor(0, 8, shape=[2**62, 8])}, 8, "data offsets"),
        ({"a": _tensor(0, 8, shape=[10**4000, 10**4000])}, 8, "not valid at 'a'"),
        ({"a": _tensor(4, 0, shape=[1])}, 4, "data offsets"),
        ({"a": _tensor(0, 4)}, 3, "size of the file"),
        ({"a": _tensor(0, 4, shape=[-1])}, 4, "not valid at 'a'"),
        ({"a": _tensor(0, 4, data_offsets=[0])}, 4, "not valid at 'a'"),
        ({"__metadata__": {"a": 1}}, 0, "not valid at '__metadata__'"),
        (b"{", 0, "not valid"),
        (b'{"a":' + b"[" * 100_000, 0, "not valid"),
    ],
)
def test_file_that_violates_the_format_is_refused(
    tmp_path: Path, table: object, nbytes: int, message: str
) -> None:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    with pytest.raises(DamagedCheckpointError, match=message) as caught:
        read_header(path)
    assert caught.value.path == path


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", *(struct.pack("<Q", n) + b"{}" for n in (3, 100_000_001, 2**64 - 1))],
)
def test_file_shorter_than_its_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"too short|exceeds the file"):
        read_header(path)


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    text = json.dumps({"a": _tensor(0, 4, "F8_E8M0", shape=[4])}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(UnsupportedError, match=r"not supported \(found F8_E8M0"):
        read_header(path)
