"""Write plain data and tensors as a pickle, with the bytes that ``torch.save`` writes.

Only opcodes of protocol 2 and globals of a closed list are written, so values from a hostile file
cannot pass on code.

Source: CPython 3.11, ``Lib/pickle.py``; torch 2.13, ``torch/_tensor.py``
(``_reduce_ex_internal``) and ``torch/serialization.py`` (``persistent_id``).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import mul

from zexport.errors import UnsafeError
from zexport.formats.pickle_values import (
    DTYPES,
    FRAGMENT,
    LOSS_SCALERS,
    NEWOBJ,
    REBUILD_TENSOR,
    REBUILD_TENSOR_V3,
    REDUCE,
    STORAGES,
    UNTYPED_STORAGE,
    ZERO_STAGE,
    Global,
    Opaque,
    OpaqueKey,
    Ordered,
    Size,
    TensorLeaf,
    builtins_of,
    globals_of,
)
from zexport.ranges.dtypes import Shape

_ORDERED_DICT = Global("collections", "OrderedDict")
_SIZE = Global("torch", "Size")
_ENCODE = Global("_codecs", "encode")
_NUMPY_DTYPE = Global("numpy", "dtype")
_NUMERIC = re.compile("[<>|=]?(?:[?bBhHiIlLqQefdgFD]|[biufcSU][0-9]{1,4})")
"""NumPy dtypes that contain no objects."""
_BUILTIN: dict[type, Global] = {
    kind: Global("__builtin__", kind.__name__) for kind in (set, frozenset, bytearray)
}
_STORAGE_OF = {dtype: name for name, dtype in reversed(STORAGES.items()) if name != UNTYPED_STORAGE}

_CALLED = (
    globals_of("collections", "OrderedDict", "defaultdict", "deque", "Counter")
    | globals_of("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum")
    | globals_of("torch", "device")
    | globals_of("numpy", "ndarray", "dtype")
    | globals_of("numpy.core.multiarray", "scalar", "_reconstruct")
    | globals_of("numpy._core.multiarray", "scalar", "_reconstruct")
    | {ZERO_STAGE, _ENCODE}
    | builtins_of("bytearray", "complex")
)
_CONSTRUCTED = LOSS_SCALERS | {Global("argparse", "Namespace"), FRAGMENT}
_NAMED = (
    DTYPES.keys()
    | {_SIZE, Global("numpy", "ndarray")}
    | builtins_of("bool", "dict", "float", "int", "list", "set", "str", "tuple")
)
"""Globals that may be called, constructed without arguments, or stored as values."""

_BYTE, _SHORT, _INT = 1 << 8, 1 << 16, 1 << 31
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def dump(value: object, number_of: Callable[[TensorLeaf], int]) -> bytes:
    """Return the pickle of ``value``: plain Python values and classes of ``pickle_values``.

    ``number_of`` returns the number of a tensor's record. An object at several places stays one
    object.

    Raises:
        UnsafeError: a value is outside the closed list.
    """
    writer = _Writer(number_of)
    try:
        writer.put(value)
    except RecursionError as error:
        raise _unsafe("a value that is nested too deep, or contains itself") from error
    return bytes(writer.out + b".")


class _Writer:
    """The pickle so far, and the index of each memoized value."""

    def __init__(self, number_of: Callable[[TensorLeaf], int]) -> None:
        self.out = bytearray(b"\x80\x02")
        self._number_of = number_of
        self._memo: dict[object, int] = {}
        self._kept: list[object] = []

    def put(self, value: object) -> None:
        kind = type(value)
        if kind in _PLAIN:
            _PLAIN[kind](self, value)
        elif kind not in _SHARED:
            raise _unsafe("a key that is slow to hash" if kind is OpaqueKey else kind.__name__)
        elif not self._recalled(id(value)):
            _SHARED[kind](self, value)

    def _recalled(self, key: object) -> bool:
        """Refer to a memoized value; false if there is none."""
        index = self._memo.get(key)
        if index is None:
            return False
        self.out += b"h%c" % index if index < _BYTE else b"j" + struct.pack("<I", index)
        return True

    def _memoize(self, key: object) -> None:
        index = self._memo[key] = len(self._memo)
        self.out += b"q%c" % index if index < _BYTE else b"r" + struct.pack("<I", index)

    def _constant(self, value: bool | None) -> None:
        self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]

    def _int(self, value: int) -> None:
        if 0 <= value < _BYTE:
            self.out += b"K%c" % value
        elif 0 <= value < _SHORT:
            self.out += b"M" + struct.pack("<H", value)
        elif -_INT <= value < _INT:
            self.out += b"J" + struct.pack("<i", value)
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            is_short = len(raw) < _BYTE
            self.out += b"\x8a%c" % len(raw) if is_short else b"\x8b" + struct.pack("<I", len(raw))
            self.out += raw

    def _float(self, value: float) -> None:
        self.out += b"G" + struct.pack(">d", value)

    def _text(self, value: str) -> None:
        if not self._recalled(value):
            self._new_text(value)
            self._memoize(value)

    def _new_text(self, value: str) -> None:
        raw = value.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(raw)) + raw

    def _name(self, value: Global) -> None:
        if value not in _NAMED:
            raise _unsafe(value)
        self._global(value)

    def _global(self, value: Global) -> None:
        if not self._recalled(value):
            self.out += f"c{value.module}\n{value.name}\n".encode()
            self._memoize(value)

    def _tuple(self, value: tuple[object, ...], key: object = None) -> None:
        if not value:
            self.out += b")"
            return
        end = _TUPLES.get(len(value), b"t")
        self.out += b"(" if end == b"t" else b""
        for one in value:
            self.put(one)
        self.out += end
        self._memoize(key or id(value))

    def _list(self, value: list[object]) -> None:
        self.out += b"]"
        self._memoize(id(value))
        self._fill(value, b"e")

    def _dict(self, value: dict[object, object]) -> None:
        self.out += b"}"
        self._memoize(id(value))
        self._fill(_flat(value.items()), b"u")

    def _ordered(self, value: Ordered) -> None:
        self._global(_ORDERED_DICT)
        self.out += b")R"
        self._memoize(id(value))
        self._fill(_flat(value.items()), b"u")
        self._set_state(value.attributes)

    def _fill(self, values: list[object], opcode: bytes) -> None:
        if values:
            self.out += b"("
            for one in values:
                self.put(one)
            self.out += opcode

    def _set_state(self, state: object) -> None:
        if state is not None:
            self.put(state)
            self.out += b"b"

    def _size(self, value: Size) -> None:
        self._call(value, _SIZE, (tuple(value),))

    def _bytes(self, value: bytes) -> None:
        self._call(value, _ENCODE, (value.decode("latin1"), "latin1"))

    def _bytearray(self, value: bytearray) -> None:
        self._call(value, _BUILTIN[bytearray], (bytes(value),))

    def _set(self, value: set[object] | frozenset[object]) -> None:
        if any(isinstance(one, OpaqueKey) for one in value):
            raise _unsafe("a set of nested values")
        items = sorted(value, key=lambda one: (type(one).__name__, repr(one)))  # reproducible
        self._call(value, _BUILTIN[type(value)], (items,))

    def _opaque(self, value: Opaque) -> None:
        callee, args = value.callee, value.args
        if not (isinstance(callee, Global) and _is_known(callee, args, value.opcode)):
            raise _unsafe(value)
        self._call(value, callee, args, value.opcode)
        self._fill(value.items, b"e")
        self._fill(_flat(value.pairs), b"u")
        self._set_state(value.state)

    def _call(
        self, value: object, callee: Global, args: tuple[object, ...], opcode: bytes = REDUCE
    ) -> None:
        self._kept.append(args)  # so that its id, a memo key, is not reused
        self._global(callee)
        self.put(args)
        self.out += opcode
        self._memoize(id(value))

    def _tensor(self, leaf: TensorLeaf) -> None:
        """Write a contiguous tensor on the CPU without gradient."""
        storage = _STORAGE_OF.get(leaf.dtype)
        self._global(REBUILD_TENSOR if storage else REBUILD_TENSOR_V3)
        self.out += b"(("
        self._text("storage")
        self._global(storage or UNTYPED_STORAGE)
        self._new_text(str(self._number_of(leaf)))
        self._text("cpu")
        self._int(leaf.numel if storage else leaf.nbytes)
        self.out += b"tQK\x00"
        self._sizes(leaf.shape)
        # torch counts an empty dimension as one of size 1.
        strides = accumulate((max(size, 1) for size in reversed(leaf.shape[1:])), mul, initial=1)
        self._sizes(tuple(strides)[::-1] if leaf.shape else ())
        self._constant(False)
        self._global(_ORDERED_DICT)  # hooks
        self.out += b")R"
        if not storage:
            self._global(Global("torch", leaf.dtype.torch_name))
        self.out += b"tR"
        self._memoize(id(leaf))

    def _sizes(self, sizes: Shape) -> None:
        """Write a tuple of numbers; equal ones are one object."""
        if not self._recalled(sizes):
            self._tuple(sizes, sizes)


def _is_known(callee: Global, args: tuple[object, ...], opcode: bytes) -> bool:
    """Whether loading this call runs nothing of the file's choice."""
    if opcode == NEWOBJ:
        return callee in _CONSTRUCTED and not args
    if opcode != REDUCE or callee not in _CALLED:
        return False
    if callee == _NUMPY_DTYPE:
        is_numeric = bool(args) and isinstance(args[0], str) and _NUMERIC.fullmatch(args[0])
        return bool(is_numeric) and all(isinstance(one, int) for one in args[1:])
    return callee != _ENCODE or args[1:] in (("latin1",), ("latin-1",))


def _flat(pairs: Iterable[tuple[object, object]]) -> list[object]:
    return [part for pair in pairs for part in pair]


def _unsafe(found: object) -> UnsafeError:
    if isinstance(found, Opaque):
        found = found.callee if isinstance(found.callee, Global) else "a call of a call's result"
    if found in (REBUILD_TENSOR, REBUILD_TENSOR_V3):
        found = "a tensor of an unknown dtype, or a conjugate or negative view"
    return UnsafeError(
        "value cannot be written safely",
        found=found,
        expected="plain values, tensors, and globals of a closed list",
    )


_PLAIN: dict[type, Callable[..., None]] = {
    type(None): _Writer._constant,
    bool: _Writer._constant,
    int: _Writer._int,
    float: _Writer._float,
    str: _Writer._text,
    Global: _Writer._name,
}
"""Values that are equal everywhere."""

_SHARED: dict[type, Callable[..., None]] = {
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: _Writer._dict,
    Ordered: _Writer._ordered,
    Size: _Writer._size,
    bytes: _Writer._bytes,
    bytearray: _Writer._bytearray,
    set: _Writer._set,
    frozenset: _Writer._set,
    Opaque: _Writer._opaque,
    TensorLeaf: _Writer._tensor,
}
"""Values that are one object where they are shared."""
