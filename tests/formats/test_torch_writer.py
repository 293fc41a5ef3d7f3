"""Written torch files: ``torch.load`` returns the same values, and no code can be in them."""

from __future__ import annotations

import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zexport import UnsafeError
from zexport.formats.pickle_values import (
    NEWOBJ,
    NEWOBJ_EX,
    Global,
    Opaque,
    OpaqueKey,
    Ordered,
    Size,
    TensorLeaf,
    TensorRef,
    as_key,
)
from zexport.formats.torch_file import read_torch_file
from zexport.formats.torch_writer import lay_out
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import DType

Save = Callable[[object], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a value; the bytes of its tensors count up."""

    def save(value: object) -> Path:
        path = tmp_path / "file.pt"
        frame, placed = lay_out(value, "file")
        data = [bytes(at % 59 for at in range(one.leaf.nbytes)) for one in placed]
        with path.open("wb") as file:
            for one, content in zip(placed, data, strict=True):
                file.seek(one.offset)
                file.write(content)
            for offset, content in frame.pieces([zlib.crc32(content) for content in data]):
                file.seek(offset)
                file.write(content)
        assert path.stat().st_size == frame.nbytes + sum(map(len, data))
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        return path

    return save


def _leaf(*shape: int, dtype: DType = DType.F32) -> TensorLeaf:
    leaf = TensorLeaf(shape, dtype, Zeros(0), dtype)
    return TensorLeaf(shape, dtype, Zeros(leaf.nbytes), dtype)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_every_kind_of_value(save: Save, mmap: bool) -> None:
    values: dict[str, object] = {
        "numbers": [-1, 0, 255, 256, 65535, 65536, 2**31, -(2**31), 2**63, -(2**80), 2**1000, 1.5],
        "texts": ("", "é", "\ud800", "a" * 300),
        "constants": [None, True, False, ()],
        "bytes": [b"", b"a\xff", bytearray(b"abc")],
        "others": [{1}, {(1, "a"): 2, None: 3, 1.5: 4}],
    }
    extra = {
        "ordered": (Ordered(b=1, a=Ordered()), OrderedDict(b=1, a=OrderedDict())),
        "size": (Size((2, 3)), torch.Size((2, 3))),
        "dtype": (Global("torch", "bfloat16"), torch.bfloat16),
        "device": (Opaque(Global("torch", "device"), ("cuda", 1)), torch.device("cuda", 1)),
    }
    tensors = {dtype.value: _leaf(3, dtype=dtype) for dtype in DType}
    written = values | {name: one for name, (one, _) in extra.items()} | tensors
    loaded = torch.load(save(written | {"s": _leaf()}), weights_only=True, mmap=mmap)
    wanted = values | {name: one for name, (_, one) in extra.items()}
    for name, expected in wanted.items():
        assert (loaded[name], repr(loaded[name])) == (expected, repr(expected))
    assert loaded["s"].shape == ()
    for name, leaf in tensors.items():
        raw = bytes(at % 59 for at in range(leaf.nbytes))
        assert loaded[name].dtype is getattr(torch, leaf.dtype.torch_name)
        assert loaded[name].view(torch.uint8).numpy().tobytes() == raw


def test_shared_objects_stay_shared_and_equal_ones_separate(save: Save) -> None:
    tied, alike, empty = _leaf(2), _leaf(2), _leaf(0, 2)
    cyclic: list[object] = []
    cyclic += [cyclic, [cyclic]]
    shared = [cyclic, tied, empty]
    hooked = Opaque(Global("collections", "defaultdict"), (Global("builtins", "list"),))
    hooked.pairs = [("a", hooked)]
    value = (shared, shared, (), {"a": tied, "b": alike, "e": _leaf(0)}, hooked)
    loaded = torch.load(save(value), weights_only=False)
    assert loaded[0] is loaded[1]
    assert loaded[0][0] is loaded[0][0][0] is loaded[0][0][1][0]
    assert loaded[0][1] is loaded[3]["a"]
    assert loaded[3]["a"].data_ptr() != loaded[3]["b"].data_ptr()
    assert (loaded[0][2].shape, loaded[3]["e"].shape) == ((0, 2), (0,))
    assert isinstance(loaded[4], defaultdict)
    assert loaded[4]["a"] is loaded[4]
    assert loaded[3]["a"]._backward_hooks is not loaded[3]["b"]._backward_hooks


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Opaque(Global("os", "system"), ("true",)), "os.system"),
        (Global("os", "system"), "os.system"),
        (Opaque(Opaque(Global("torch", "device"), ()), ()), "call of a call"),
        (Opaque(Global("argparse", "Namespace"), ()), "argparse.Namespace"),
        (Opaque(Global("torch", "device"), ("cpu",), opcode=NEWOBJ), "torch.device"),
        (Opaque(Global("torch", "device"), ("cpu", {}), opcode=NEWOBJ_EX), "device"),
        (Opaque(Global("numpy", "dtype"), ("O8", False, True)), "numpy.dtype"),
        (Opaque(Global("_codecs", "encode"), ("x", "rot13")), "_codecs.encode"),
    ],
)
def test_calls_outside_the_closed_list_are_refused(value: object, name: str) -> None:
    with pytest.raises(UnsafeError, match=name):
        lay_out({"a": [(value,)]}, "file")
    state = Opaque(Global("argparse", "Namespace"), (), opcode=NEWOBJ, state={"a": value})
    with pytest.raises(UnsafeError, match=name):
        lay_out(state, "file")


def test_keys_that_are_slow_to_hash_are_refused(save: Save) -> None:
    key: tuple[object, ...] = ("a", ("b", 1.5, None))
    loaded = torch.load(save({as_key(key): 1, OpaqueKey(tuple(range(20))): 2}))
    assert loaded == {key: 1, tuple(range(20)): 2}
    for _ in range(40):
        key = (key, key)
    with pytest.raises(UnsafeError, match="slow to hash"):
        lay_out({as_key(key): 1}, "file")
    with pytest.raises(UnsafeError, match="a set of nested values"):
        lay_out({as_key((key,))}, "file")
    with pytest.raises(UnsafeError, match="found PosixPath"):
        lay_out([Path("x")], "file")
    cyclic: list[object] = []
    cyclic.append((cyclic,))
    assert lay_out(cyclic, "file")
    for _ in range(5000):
        cyclic = [cyclic]
    with pytest.raises(UnsafeError, match="nested too deep"):
        lay_out(cyclic, "file")


_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
_KEYS = st.one_of(_PLAIN.filter(lambda one: not isinstance(one, bytes)), st.tuples(st.integers()))
_TREES = st.recursive(
    st.one_of(
        _PLAIN,
        st.builds(lambda n, of: _leaf(n, dtype=of), st.integers(0, 3), st.sampled_from(DType)),
    ),
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.lists(parts, max_size=4).map(tuple),
        st.dictionaries(_KEYS, parts, max_size=4),
        st.dictionaries(st.text(max_size=3), parts, max_size=4).map(Ordered),
        st.sets(st.integers()),
        st.lists(st.integers(0, 9), max_size=3).map(Size),
        parts.map(lambda one: [one, one]),
    ),
    max_leaves=20,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_TREES)
def test_any_value_is_read_back(save: Save, tree: object) -> None:
    path = save(tree)
    _check_alike(tree, torch.load(path, weights_only=True), read_torch_file(path).value)


def _check_alike(given: object, loaded: object, read: object) -> None:
    """That torch and the inert reader give what was given, in the same sharing."""
    if isinstance(given, TensorLeaf):
        assert isinstance(loaded, torch.Tensor)
        assert isinstance(read, TensorRef)
        assert (tuple(loaded.shape), read.shape, read.dtype) == (
            given.shape,
            given.shape,
            given.dtype,
        )
    elif isinstance(given, dict):
        assert (
            isinstance(loaded, OrderedDict)
            == isinstance(given, Ordered)
            == isinstance(read, Ordered)
        )
        assert [*given] == [*loaded] == [*read]
        for key, part in given.items():
            _check_alike(part, loaded[key], read[key])
    elif isinstance(given, list | tuple):
        kind = torch.Size if isinstance(given, Size) else type(given)
        assert (type(loaded), type(read), len(loaded), len(read)) == (
            kind,
            type(given),
            len(given),
            len(given),
        )
        for at, part in enumerate(given):
            _check_alike(part, loaded[at], read[at])
        if len(given) > 1 and given[0] is given[1] and isinstance(given[0], list | TensorLeaf):
            assert loaded[0] is loaded[1]
    else:
        assert (type(loaded), loaded) == (type(given), given)
        assert isinstance(given, bytes) or (type(read), read) == (type(given), given)
