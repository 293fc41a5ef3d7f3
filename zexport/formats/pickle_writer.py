"""Writing a pickle of inert values, as ``torch.save`` would of the objects that they stand for.

Only opcodes of protocol 2 and globals of a closed list are written, so a value that came out of a
hostile file cannot pass anything on that runs. Nothing recurses: a value may be nested to any
depth, be shared, and contain itself.

Source of the forms: CPython 3.11, ``Lib/pickle.py``; torch 2.13, ``torch/_tensor.py``
(``_reduce_ex_internal``) and ``torch/serialization.py`` (``persistent_id``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from operator import mul
from typing import TypeAlias

from zexport.errors import UnsafeError
from zexport.formats.pickle_globals import (
    REBUILD_TENSOR,
    REBUILD_TENSOR_V3,
    STORAGES,
    is_carried,
    is_carried_call,
)
from zexport.formats.pickle_values import Global, Made, Opaque, OpaqueKey, Ordered, Size, TensorLeaf
from zexport.ranges.dtypes import Shape

_ORDERED_DICT = Global("collections", "OrderedDict")
_SIZE = Global("torch", "Size")
_ENCODE = Global("_codecs", "encode")
_BUILTINS: dict[type, Global] = {
    kind: Global("__builtin__", kind.__name__) for kind in (set, frozenset, bytearray, complex)
}
_UNTYPED = Global("torch.storage", "UntypedStorage")
_STORAGE_OF = {dtype: name for name, dtype in reversed(STORAGES.items()) if name != _UNTYPED}

_BYTE, _SHORT, _INT = 1 << 8, 1 << 16, 1 << 31
_KEY_PARTS_MAX = 1000
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}

_Task: TypeAlias = tuple[Callable[..., None], object]


def dump(value: object, number_of: Callable[[TensorLeaf], int]) -> bytes:
    """The pickle of ``value``, the same bytes for the same value.

    ``value`` is of plain Python values and the classes of ``zexport.formats.pickle_values``, with a
    ``TensorLeaf`` where a tensor is to be; ``number_of`` gives the number of its record. What is
    one object in ``value`` is one when the pickle is loaded.
    """
    writer = _Writer(number_of)
    writer.run(value)
    return bytes(writer.out)


class _Writer:
    """A pickle in the making: its bytes, what is left to be done (last first), and the memo."""

    def __init__(self, number_of: Callable[[TensorLeaf], int]) -> None:
        self.out = bytearray(b"\x80\x02")
        self._number_of = number_of
        self._tasks: list[_Task] = []
        self._kept: list[object] = []
        self._memo: dict[object, int] = {}

    def run(self, value: object) -> None:
        tasks = self._tasks
        self._value(value)
        while tasks:
            act, argument = tasks.pop()
            act(argument)
        self._put(b".")

    def _then(self, *tasks: _Task) -> None:
        """Have these done next, in order."""
        self._tasks.extend(reversed(tasks))

    def _each(self, values: Iterable[object]) -> None:
        """Have these written next, in order."""
        self._tasks.append((self._rest, iter(values)))

    def _rest(self, values: Iterator[object]) -> None:
        """Write these, up to one that leaves more to be done before the others."""
        here = len(self._tasks)
        for one in values:
            self._value(one)
            if len(self._tasks) > here:
                self._tasks.insert(here, (self._rest, values))
                return

    def _put(self, data: bytes) -> None:
        self.out += data

    def _value(self, value: object) -> None:
        kind = type(value)
        if kind in _PLAIN:
            _PLAIN[kind](self, value)
        elif kind not in _SHARED:
            raise _unsafe(kind.__name__)
        elif not self._recalled(id(value)):
            _SHARED[kind](self, value)

    def _recalled(self, key: object) -> bool:
        """Whether it was written before; then that is what is written again."""
        index = self._memo.get(key)
        if index is None:
            return False
        self._put(b"h%c" % index if index < _BYTE else b"j" + struct.pack("<I", index))
        return True

    def _remember(self, key: object) -> None:
        index = self._memo[key] = len(self._memo)
        self._put(b"q%c" % index if index < _BYTE else b"r" + struct.pack("<I", index))

    # Values that are the same wherever they stand.

    def _none(self, _: None) -> None:
        self._put(b"N")

    def _bool(self, value: bool) -> None:
        self._put(b"\x88" if value else b"\x89")

    def _int(self, value: int) -> None:
        if 0 <= value < _BYTE:
            self._put(b"K%c" % value)
        elif 0 <= value < _SHORT:
            self._put(b"M" + struct.pack("<H", value))
        elif -_INT <= value < _INT:
            self._put(b"J" + struct.pack("<i", value))
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            size = (
                b"\x8a%c" % len(raw) if len(raw) < _BYTE else b"\x8b" + struct.pack("<I", len(raw))
            )
            self._put(size + raw)

    def _float(self, value: float) -> None:
        self._put(b"G" + struct.pack(">d", value))

    def _text(self, value: str) -> None:
        if not self._recalled(value):
            self._put_text(value)
            self._remember(value)

    def _put_text(self, value: str) -> None:
        raw = value.encode("utf-8", "surrogatepass")
        self._put(b"X" + struct.pack("<I", len(raw)) + raw)

    def _name(self, value: Global) -> None:
        if not is_carried(value):
            raise _unsafe(value)
        self._global(value)

    def _global(self, value: Global) -> None:
        if not self._recalled(value):
            self._put(f"c{value.module}\n{value.name}\n".encode())
            self._remember(value)

    def _sizes(self, sizes: Shape) -> None:
        if not sizes:
            self._put(b")")
        elif not self._recalled(sizes):
            self._put(b"" if len(sizes) in _TUPLES else b"(")
            for size in sizes:
                self._int(size)
            self._put(_TUPLES.get(len(sizes), b"t"))
            self._remember(sizes)

    # Values that are one object wherever they are shared.

    def _tuple(self, value: tuple[object, ...]) -> None:
        if not value:
            self._put(b")")
            return
        self._put(b"" if len(value) in _TUPLES else b"(")
        self._then((self._tuple_end, value))
        self._each(value)

    def _tuple_end(self, value: tuple[object, ...]) -> None:
        if id(value) in self._memo:  # it is within one of its parts, where it was finished
            self._put(b"0" * len(value) if len(value) in _TUPLES else b"1")
            self._recalled(id(value))
            return
        self._put(_TUPLES.get(len(value), b"t"))
        self._remember(id(value))

    def _list(self, value: list[object]) -> None:
        self._put(b"]")
        self._remember(id(value))
        self._fill((value, b"e"))

    def _dict(self, value: dict[object, object]) -> None:
        self._put(b"}")
        self._remember(id(value))
        self._fill((_flat(value.items()), b"u"))

    def _ordered(self, value: Ordered) -> None:
        self._global(_ORDERED_DICT)
        self._put(b")R")
        self._remember(id(value))
        if value.attributes is not None:
            self._then((self._value, value.attributes), (self._put, b"b"))
        self._fill((_flat(value.items()), b"u"))

    def _fill(self, parts_and_opcode: tuple[list[object], bytes]) -> None:
        """Have what is on the stack filled."""
        parts, opcode = parts_and_opcode
        if parts:
            self._put(b"(")
            self._then((self._put, opcode))
            self._each(parts)

    def _key(self, value: OpaqueKey) -> None:
        if not _is_fit_as_key(value.value):
            raise _unsafe("a key that may take without end to hash")
        self._value(value.value)

    def _size(self, value: Size) -> None:
        self._call(value, _SIZE, (tuple(value),))

    def _bytes(self, value: bytes) -> None:
        self._call(value, _ENCODE, (value.decode("latin1"), "latin1"))

    def _bytearray(self, value: bytearray) -> None:
        self._call(value, _BUILTINS[bytearray], (bytes(value),))

    def _complex(self, value: complex) -> None:
        self._call(value, _BUILTINS[complex], (value.real, value.imag))

    def _set(self, value: set[object] | frozenset[object]) -> None:
        if any(isinstance(one, OpaqueKey) for one in value):
            raise _unsafe("a set of what is not plain")
        # In an order that does not change from run to run.
        members = sorted(value, key=lambda one: (type(one).__name__, repr(one)))
        self._call(value, _BUILTINS[type(value)], (members,))

    def _opaque(self, value: Opaque) -> None:
        if not isinstance(value.callee, Global) or not is_carried_call(value):
            raise _unsafe(value)
        self._call(value, value.callee, value.args, b"R" if value.made is Made.BY_CALL else b"\x81")

    def _call(
        self, value: object, callee: Global, args: tuple[object, ...], opcode: bytes = b"R"
    ) -> None:
        """Have an object made of ``callee``, and completed."""
        self._kept.append(args)  # so that no other object gets its id
        self._global(callee)
        self._then((self._value, args), (self._call_end, (value, opcode)))

    def _call_end(self, value_and_opcode: tuple[object, bytes]) -> None:
        value, opcode = value_and_opcode
        if id(value) in self._memo:  # as in ``_tuple_end``; callee and arguments go
            self._put(b"00")
            self._recalled(id(value))
            return
        self._put(opcode)
        self._remember(id(value))
        if isinstance(value, Opaque):
            state: tuple[_Task, ...] = ((self._value, value.state), (self._put, b"b"))
            self._then(
                (self._fill, (value.items, b"e")),
                (self._fill, (_flat(value.pairs), b"u")),
                *(() if value.state is None else state),
            )

    def _tensor(self, leaf: TensorLeaf) -> None:
        """The call that ``torch.save`` writes for a dense tensor on the CPU without a gradient."""
        storage = _STORAGE_OF.get(leaf.dtype)
        self._global(REBUILD_TENSOR if storage else REBUILD_TENSOR_V3)
        self._put(b"((")
        self._text("storage")
        self._global(storage or _UNTYPED)
        self._put_text(str(self._number_of(leaf)))  # of its own: there is nothing to remember
        self._text("cpu")
        self._int(leaf.numel if storage else leaf.nbytes)
        self._put(b"tQK\x00")
        self._sizes(leaf.shape)
        self._sizes(_dense(leaf.shape))
        self._bool(False)
        self._global(_ORDERED_DICT)  # of hooks, which no other tensor may share
        self._put(b")R")
        if not storage:
            self._global(Global("torch", leaf.dtype.torch_name))
        self._put(b"tR")
        self._remember(id(leaf))


def _flat(pairs: Iterable[tuple[object, object]]) -> list[object]:
    return [part for pair in pairs for part in pair]


def _dense(shape: Shape) -> Shape:
    """The strides of a row-major tensor; torch counts an empty dimension as one of size 1."""
    steps = accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1)
    return tuple(steps)[::-1] if shape else ()


def _is_fit_as_key(value: object) -> bool:
    """Whether hashing it when it is loaded is cheap: tuples may share their parts many times."""
    waiting, count = [value], 0
    while waiting and count < _KEY_PARTS_MAX:
        one = waiting.pop()
        count += 1
        if isinstance(one, tuple):
            waiting += one
    return not waiting


def _unsafe(found: Global | Opaque | str) -> UnsafeError:
    """The refusal of a value, by the name of what would be called, or by its kind."""
    if isinstance(found, Opaque):
        callee = found.callee
        found = callee if isinstance(callee, Global) else "a call of what another call gives"
    foreign = found in (REBUILD_TENSOR, REBUILD_TENSOR_V3)
    return UnsafeError(
        "holds what zexport does not write again",
        found="a tensor of a foreign element type, or of negated values" if foreign else found,
        expected="plain values, tensors, and globals of a closed list",
    )


_PLAIN: dict[type, Callable[..., None]] = {
    type(None): _Writer._none,
    bool: _Writer._bool,
    int: _Writer._int,
    float: _Writer._float,
    str: _Writer._text,
    Global: _Writer._name,
}
_SHARED: dict[type, Callable[..., None]] = {
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: _Writer._dict,
    Ordered: _Writer._ordered,
    OpaqueKey: _Writer._key,
    Size: _Writer._size,
    bytes: _Writer._bytes,
    bytearray: _Writer._bytearray,
    complex: _Writer._complex,
    set: _Writer._set,
    frozenset: _Writer._set,
    Opaque: _Writer._opaque,
    TensorLeaf: _Writer._tensor,
}
