"""``read_torch_file`` against ``torch.load``: same values, same bytes, in both containers."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from zexport.formats.pickle_values import Opaque, TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.dtypes import DType

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = os.environ.get("ZEXPORT_CASES")
DTYPES = [getattr(torch, dtype.torch_name) for dtype in DType]
CONTAINERS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


_NEW = {torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64}


def bytes_at(file: TorchFile, tensor: TensorRef) -> bytes:
    source = file.source(tensor)
    assert source.nbytes == tensor.nbytes
    data = file.path.read_bytes()
    return b"".join(
        data[part.offset : part.offset + part.nbytes] for part in source.extents(0, source.nbytes)
    )


def bytes_in(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
    return bytes(dense.view(torch.uint8).tolist()) if tensor.numel() else b""


def assert_same_tensor(file: TorchFile, ours: object, theirs: torch.Tensor) -> None:
    assert isinstance(ours, TensorRef)
    assert f"torch.{ours.dtype.torch_name}" == str(theirs.dtype)
    assert (ours.shape, ours.stride) == (tuple(theirs.shape), theirs.stride())
    assert (ours.numel, ours.offset) == (theirs.numel(), theirs.storage_offset())
    assert bytes_at(file, ours) == bytes_in(theirs)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any type, often a view of something larger."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, [*shape, dtype.itemsize])
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    for view in draw(
        st.lists(st.sampled_from(["turn", "cut", "step", "spread", "clone"]), max_size=3)
    ):
        tensor = _viewed(tensor, view)
    return tensor


def _viewed(tensor: torch.Tensor, view: str) -> torch.Tensor:
    if view == "turn":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if view == "spread":
        return tensor.unsqueeze(0).expand(2, *tensor.shape)
    if view == "clone" or not tensor.dim():
        return tensor.clone()
    return tensor[1:] if view == "cut" else tensor[..., ::2]


@CONTAINERS
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(values=st.lists(tensors(), max_size=4), shared=st.booleans(), protocol=st.integers(2, 5))
def test_tensors_are_where_torch_finds_them(
    tmp_path: Path, zipped: bool, values: list[torch.Tensor], shared: bool, protocol: int
) -> None:
    # torch 2.13 has no old container for 8-bit floats and larger unsigned numbers.
    assume(zipped or not any(value.dtype in _NEW for value in values))
    path = tmp_path / "x.pt"
    saved = OrderedDict((f"t{i}", value) for i, value in enumerate(values))
    if shared and values:
        saved["again"] = values[0]
        saved["parameter"] = torch.nn.Parameter(values[-1], requires_grad=False)
    torch.save(saved, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    file, loaded = read_torch_file(path), torch.load(path, weights_only=False)
    assert isinstance(file.value, dict)
    assert list(file.value) == list(loaded)
    assert file.unknown_globals == ()
    for name, theirs in loaded.items():
        assert_same_tensor(file, file.value[name], theirs)


@CONTAINERS
def test_tensors_with_python_attributes_are_read_as_torch_reads_them(
    tmp_path: Path, zipped: bool
) -> None:
    path = tmp_path / "x.pt"
    flat = torch.arange(10.0)
    flat.ds_id = "0_20"
    weight = torch.nn.Parameter(torch.arange(3.0))
    weight.note = "mine"
    torch.save([flat, flat[2:5], weight], path, _use_new_zipfile_serialization=zipped)
    file, loaded = read_torch_file(path), torch.load(path, weights_only=False)
    assert isinstance(file.value, list)
    for ours, theirs in zip(file.value, loaded, strict=True):
        assert_same_tensor(file, ours, theirs)


@CONTAINERS
def test_what_a_tensor_negates_is_not_taken_for_its_values(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.pt"
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    plain = turned.imag.resolve_neg()
    other = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert other.is_neg()
    saved = {"conj": turned, "neg": other, "plain": plain, "none": b""}
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    file = read_torch_file(path)
    assert isinstance(file.value, dict)
    assert isinstance(file.value["conj"], Opaque)
    assert isinstance(file.value["neg"], Opaque)
    assert_same_tensor(file, file.value["plain"], plain)
    assert file.value["none"] == b""


def test_a_file_saved_to_a_stream_is_read(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(torch.ones(3), stream)
    path = tmp_path / "x.pt"
    path.write_bytes(stream.getvalue())
    file = read_torch_file(path)
    assert file.root == "archive"
    assert_same_tensor(file, file.value, torch.ones(3))


def rank_files() -> Iterator[Path]:
    """The rank files of the checkpoints kept beside the tests, and of ``ZEXPORT_CASES``."""
    for folder in (FIXTURES, CASES):
        for case in Path(folder).glob("*") if folder else ():
            if not case.name.startswith("dmg_"):
                yield from case.rglob("*_states.pt")


def walk(file: TorchFile, ours: object, theirs: object) -> int:
    """Compare every tensor below; returns how many there are."""
    if isinstance(theirs, torch.Tensor):
        assert_same_tensor(file, ours, theirs)
        return 1
    if isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert len(ours) == len(theirs)
        return sum(walk(file, *pair) for pair in zip(ours.values(), theirs.values(), strict=True))
    if isinstance(theirs, list | tuple):
        assert isinstance(ours, list | tuple)
        return sum(walk(file, *pair) for pair in zip(ours, theirs, strict=True))
    return 0


@pytest.mark.slow
def test_every_rank_file_that_deepspeed_wrote_is_read_as_torch_reads_it() -> None:
    for path in sorted(rank_files()):
        file = read_torch_file(path)
        assert file.unknown_globals == ()
        assert file.value, path
        walk(file, file.value, torch.load(path, weights_only=False, map_location="cpu"))
