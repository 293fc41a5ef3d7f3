"""Writing files of ``torch.save``'s form: torch gives back what went in, and nothing else can."""

from __future__ import annotations

import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zexport.errors import UnsafeError, UnsupportedError
from zexport.formats.inert import Global, Made, Opaque, Ordered, Size
from zexport.formats.leaves import TensorLeaf
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
        "others": [{1}, 1 - 2j, {(1, "a"): 2, None: 3, 1.5: 4}],
    }
    extra = {
        "ordered": (Ordered(b=1, a=Ordered()), OrderedDict(b=1, a=OrderedDict())),
        "size": (Size((2, 3)), torch.Size((2, 3))),
        "dtype": (Global("torch", "bfloat16"), torch.bfloat16),
        "device": (Opaque(Global("torch", "device"), ("cuda", 1)), torch.device("cuda", 1)),
    }
    tensors = {dtype.value: _leaf(3, dtype=dtype) for dtype in DType}
    given = values | {name: one for name, (one, _) in extra.items()} | tensors
    loaded = torch.load(save(given | {"s": _leaf()}), weights_only=True, mmap=mmap)
    wanted = values | {name: one for name, (_, one) in extra.items()}
    for name, expected in wanted.items():
        assert (loaded[name], repr(loaded[name])) == (expected, repr(expected))
    assert loaded["s"].shape == ()
    for name, leaf in tensors.items():
        raw = bytes(at % 59 for at in range(leaf.nbytes))
        assert loaded[name].dtype is getattr(torch, leaf.dtype.torch_name)
        assert loaded[name].view(torch.uint8).numpy().tobytes() == raw


def test_what_is_one_object_stays_one_and_nothing_else_becomes_it(save: Save) -> None:
    tied, alike, empty = _leaf(2), _leaf(2), _leaf(0, 2)
    cyclic: list[object] = []
    inner: tuple[object, ...] = (cyclic, 1, 2, 3)
    cyclic += [inner, [cyclic]]
    shared = [cyclic, tied, empty]
    hooked = Opaque(Global("collections", "defaultdict"), (Global("builtins", "list"),))
    hooked.pairs = [("a", hooked)]
    value = (shared, shared, inner, {"a": tied, "b": alike, "e": _leaf(0)}, hooked)
    loaded = torch.load(save(value), weights_only=False)
    assert loaded[0] is loaded[1]
    assert loaded[0][0] is loaded[2][0] is loaded[2][0][1][0]
    assert loaded[2] is loaded[2][0][0]
    assert loaded[0][1] is loaded[3]["a"]
    assert loaded[3]["a"].data_ptr() != loaded[3]["b"].data_ptr()
    assert (loaded[0][2].shape, loaded[3]["e"].shape) == ((0, 2), (0,))
    assert isinstance(loaded[4], defaultdict)
    assert loaded[4]["a"] is loaded[4]
    assert loaded[3]["a"]._backward_hooks is not loaded[3]["b"]._backward_hooks


def test_values_may_be_nested_to_any_depth(save: Save) -> None:
    value: object = _leaf(2)
    for _ in range(50_000):
        value = [(value,), {"a": 1}]
    loaded = torch.load(save(value), weights_only=True)
    for _ in range(50_000):
        loaded = loaded[0][0]
    assert loaded.shape == (2,)
    assert read_torch_file(save(value)).members


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Opaque(Global("os", "system"), ("true",)), "os.system"),
        (Global("os", "system"), "os.system"),
        (Opaque(Opaque(Global("torch", "device"), ()), ()), "what another call gives"),
        (Opaque(Global("argparse", "Namespace"), ()), "argparse.Namespace"),
        (Opaque(Global("torch", "device"), ("cpu",), made=Made.BY_NEW), "torch.device"),
        (Opaque(Global("torch", "device"), ("cpu", {}), made=Made.BY_NEW_WITH_NAMES), "device"),
        (Opaque(Global("numpy", "dtype"), ("O8", False, True)), "numpy.dtype"),
        (Opaque(Global("_codecs", "encode"), ("x", "rot13")), "_codecs.encode"),
    ],
)
def test_nothing_that_could_run_is_written(value: object, told: str) -> None:
    with pytest.raises(UnsafeError, match=told):
        lay_out({"a": [(value,)]}, "file")
    state = Opaque(Global("argparse", "Namespace"), (), made=Made.BY_NEW, state={"a": value})
    with pytest.raises(UnsafeError, match=told):
        lay_out(state, "file")


def test_a_tensor_of_a_foreign_type_is_named_as_such(tmp_path: Path) -> None:
    torch.save(torch.zeros(2, dtype=torch.complex128), tmp_path / "a.pt")
    value = read_torch_file(tmp_path / "a.pt").value
    with pytest.raises(UnsupportedError, match="an element type that zexport does not know"):
        lay_out(value, "file")
