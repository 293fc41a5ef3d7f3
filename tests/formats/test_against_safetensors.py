"""Files of ours against the safetensors library, in both directions."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import zexport
from tests.support.checkpoints import Model, Run, save
from zexport import ZexportError
from zexport.formats.safetensors import HeaderEntry, build_header, read_header
from zexport.ranges.dtypes import DType

_SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
_ENTRIES = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable()),
    st.tuples(st.sampled_from(DType), _SHAPES),
    max_size=6,
)
_IN_A_FOLDER = [HealthCheck.function_scoped_fixture]


def test_a_tiny_model_has_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0])}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    root = save(Model([tensors]), Run(), tmp_path / "run")
    zexport.consolidate(root, tmp_path / "out", layout="memory")
    ours = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()


@given(entries=_ENTRIES)
@settings(deadline=None, max_examples=100, suppress_health_check=_IN_A_FOLDER)
def test_the_library_reads_every_header_that_is_written(
    tmp_path: Path, entries: dict[str, tuple[DType, tuple[int, ...]]]
) -> None:
    described = [HeaderEntry(name, dtype, shape) for name, (dtype, shape) in entries.items()]
    header, _ = build_header(described)
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + bytes(sum(entry.nbytes for entry in described)))
    found = load_file(path)
    assert found.keys() == entries.keys()
    for entry in described:
        assert found[entry.name].dtype == getattr(torch, entry.dtype.torch_name)
        assert tuple(found[entry.name].shape) == entry.shape
    assert set(read_header(path).tensors) == set(found)


def test_a_file_of_the_library_is_read_as_it_reads_it(tmp_path: Path) -> None:
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
@settings(deadline=None, max_examples=400, suppress_health_check=_IN_A_FOLDER)
def test_what_the_library_refuses_is_refused(
    tmp_path: Path, where: int, byte: int, cut: int
) -> None:
    """Any byte of a header changed, in a file that is right, longer or shorter."""
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
