"""``read_torch_file`` against ``torch.load``: same values, same bytes, zip and legacy."""

from __future__ import annotations

import argparse
import pickle
from collections import OrderedDict, deque
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from zexport import DamagedCheckpointError
from zexport.formats.pickle_reader import load
from zexport.formats.pickle_values import Opaque, TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.dtypes import DType

DTYPES = [getattr(torch, dtype.torch_name) for dtype in DType]
CONTAINERS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
_ZIP_ONLY = {torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64}


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
    """A tensor of any dtype, often a view of something larger."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, [*shape, dtype.itemsize])
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    views = st.sampled_from(["transpose", "slice", "step", "expand", "clone"])
    for view in draw(st.lists(views, max_size=3)):
        tensor = _viewed(tensor, view)
    return tensor


def _viewed(tensor: torch.Tensor, view: str) -> torch.Tensor:
    if view == "transpose":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if view == "expand":
        return tensor.unsqueeze(0).expand(2, *tensor.shape)
    if view == "clone" or not tensor.dim():
        return tensor.clone()
    return tensor[1:] if view == "slice" else tensor[..., ::2]


@CONTAINERS
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(values=st.lists(tensors(), max_size=4), shared=st.booleans(), protocol=st.integers(2, 5))
def test_tensors_equal_those_of_torch(
    tmp_path: Path, zipped: bool, values: list[torch.Tensor], shared: bool, protocol: int
) -> None:
    assume(zipped or not any(value.dtype in _ZIP_ONLY for value in values))
    path = tmp_path / "x.pt"
    saved = OrderedDict((f"t{i}", value) for i, value in enumerate(values))
    if shared and values:
        saved["again"] = values[0]
        saved["parameter"] = nn.Parameter(values[-1], requires_grad=False)
    torch.save(saved, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    file, loaded = read_torch_file(path), torch.load(path, weights_only=False)
    assert isinstance(file.value, dict)
    assert list(file.value) == list(loaded)
    assert file.unknown_globals == ()
    for name, theirs in loaded.items():
        assert_same_tensor(file, file.value[name], theirs)


@CONTAINERS
def test_tensors_with_python_attributes_are_read(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.pt"
    flat = torch.arange(10.0)
    flat.ds_id = "0_20"
    weight = nn.Parameter(torch.arange(3.0))
    weight.note = "mine"
    torch.save([flat, flat[2:5], weight], path, _use_new_zipfile_serialization=zipped)
    file, loaded = read_torch_file(path), torch.load(path, weights_only=False)
    assert isinstance(file.value, list)
    for ours, theirs in zip(file.value, loaded, strict=True):
        assert_same_tensor(file, ours, theirs)


@CONTAINERS
def test_conjugate_and_negative_views_are_not_read_as_their_storage(
    tmp_path: Path, zipped: bool
) -> None:
    path = tmp_path / "x.pt"
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    plain = conjugate.imag.resolve_neg()
    negative = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negative.is_neg()
    saved = {"conj": conjugate, "neg": negative, "plain": plain, "none": b""}
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    file = read_torch_file(path)
    assert isinstance(file.value, dict)
    assert isinstance(file.value["conj"], Opaque)
    assert isinstance(file.value["neg"], Opaque)
    assert_same_tensor(file, file.value["plain"], plain)
    assert file.value["none"] == b""


@CONTAINERS
@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [((13,), (1,), 0), ((3, 4), (4, 1), 1), ((2,), (12,), 0), ((1,), (1,), 12), ((), (), 2**62)],
)
def test_tensor_beyond_its_storage_is_refused(
    tmp_path: Path, zipped: bool, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.zeros(12), path, _use_new_zipfile_serialization=zipped)
    file = read_torch_file(path)
    assert isinstance(file.value, TensorRef)
    wild = TensorRef(file.value.dtype, shape, stride, offset, file.value.storage)
    with pytest.raises(DamagedCheckpointError, match=r"exceeds its storage.*found 48 bytes"):
        file.source(wild)
    inside = TensorRef(file.value.dtype, (2, 2), (9, 2), 0, file.value.storage)
    assert file.source(inside).nbytes == 16


@CONTAINERS
def test_no_tensor_data_is_read(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "big.pt"
    torch.save(torch.zeros(3_000_000), path, _use_new_zipfile_serialization=zipped)
    before = _bytes_read()
    file = read_torch_file(path)
    assert isinstance(file.value, TensorRef)
    assert file.source(file.value).nbytes == 12_000_000
    assert _bytes_read() - before < 1 << 21


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**300), 2**300)
    | st.floats(allow_nan=False)
    | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.tuples(st.integers(), st.booleans()), inner, max_size=4
        )
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(OrderedDict)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.frozensets(st.tuples(st.integers(), st.text(max_size=3)), max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=50)
@given(PLAIN, st.binary(max_size=300), st.integers(2, 5))
def test_plain_values_equal_those_of_python(value: object, raw: bytes, protocol: int) -> None:
    both = [value, raw, bytearray(raw)] if protocol == 5 else value
    result = load(pickle.dumps(both, protocol), path=Path("x"))
    assert result.value == both
    assert result.unknown_globals == ()


def test_zero_stage_is_a_number_however_python_pickled_it() -> None:
    stage = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    by_value = load(stage + b"K\x03\x85R.", path=Path("x"))
    name = b"X\x07\x00\x00\x00weights"
    by_name = load(b"c__builtin__\ngetattr\n" + stage + name + b"\x86R.", path=Path("x"))
    assert by_name.value == by_value.value == 3
    assert by_name.unknown_globals == by_value.unknown_globals == ()
    other = load(b"cbuiltins\ngetattr\ncposix\nsystem\n" + name + b"\x86R.", path=Path("x"))
    assert isinstance(other.value, Opaque)
    assert "builtins.getattr" in map(str, other.unknown_globals)


@pytest.mark.parametrize("protocol", range(2, 6))
@CONTAINERS
def test_everything_that_torch_saves_is_read(protocol: int, zipped: bool, tmp_path: Path) -> None:
    inner: list[object] = []
    inner.append((1, 2, 3, inner))
    state = {
        "plain": [None, True, 1, -1, 300, 70_000, 2**70, 2**3000, 1.5, "ü", "u" * 300],
        "bytes": [b"x", b"y" * 300, bytearray(b"z")],
        "many": [list(range(2001)), {str(i): i for i in range(2001)}, set(range(2001))],
        "objects": [argparse.Namespace(a=1), Path("x"), slice(1), deque([1]), inner],
        "mine": [OrderedDict(a=OrderedDict()), frozenset({1}), torch.Size([1]), torch.float32],
        "tensors": [torch.zeros(3, 2).t(), nn.Parameter(torch.ones(2)), torch.zeros(1).bfloat16()],
        "optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(2))]).state_dict(),
    }
    path = tmp_path / "x.pt"
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    value = read_torch_file(path).value
    assert isinstance(value, dict)
    for key in ("plain", "many", "optimizer"):
        assert value[key] == state[key]
    assert [type(one).__name__ for one in value["tensors"]] == ["TensorRef"] * 3
