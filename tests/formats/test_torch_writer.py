"""Written torch files: ``torch.load`` returns the same values, and no code can be in them."""

from __future__ import annotations

import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zexport import UnsafeError
from zexport.formats.pickle_values import (
    NEWOBJ,
    NEWOBJ_EX,
    Global,
    Opaque,
    Ordered,
    Size,
    TensorLeaf,
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
    path = save(written | {"s": _leaf()})
    loaded, read = torch.load(path, weights_only=True, mmap=mmap), read_torch_file(path).value
    assert isinstance(read, dict)
    plain = values.keys() - {"bytes"}  # which Python decodes with a call
    assert all(read[name] == values[name] for name in plain)
    assert isinstance(read["ordered"]["a"], Ordered)
    assert all(read[name].dtype.value == name for name in tensors)
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
