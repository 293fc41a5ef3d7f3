"""Read pickles as plain data: a pickle machine that imports nothing and calls nothing.

Every opcode creates, stores or appends a bounded number of values; none recurses.

Source of the opcodes: CPython 3.11, ``Lib/pickletools.py``. Opcodes that no pickler of protocols 2
to 5 writes are refused, and those whose values are not in the file (extension codes, out-of-band
buffers).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsafeError, UnsupportedError, ZexportError
from zexport.formats.pickle_values import (
    CALLS,
    HARMLESS,
    NEWOBJ,
    NEWOBJ_EX,
    REDUCE,
    Global,
    Opaque,
    Ordered,
    PickleError,
    Row,
    StorageRef,
    as_key,
    storage_of,
)
from zexport.storage.files import FileBytes

MAX_PICKLE_NBYTES = 64 << 20
MAX_OPCODES = 48_000_000  # a model of 100,000 tensors has about 4 million
MAX_NBYTES = 192 << 20
"""Memory that one pickle and its values may take, as ``Machine.charge`` estimates it.

A model states file of 100,000 tensors is charged nearly all of it, and takes 100 MB. Without a
limit, a few kilobytes of pickle could allocate gigabytes of empty containers.
"""
_MAX_INT_NBYTES = 1024  # Python refuses to print an int beyond 1,780 bytes
_STOP = ord(".")

# Charges in bytes, measured with CPython 3.11 and rounded up.
_SLOT_NBYTES = 9  # on the stack or in the memo
_NUMBER_NBYTES = 48  # with its slot
_VALUE_NBYTES = 72  # a text, tuple, list, dict, call or mark, with its slot
_ITEM_NBYTES = 112  # of a dict (key, value) or a set; an ``Opaque``
_TABLE_NBYTES = 192  # for the first item
_GLOBAL_NBYTES = 440
_FREE_MARKS = 64  # more open marks than any checkpoint has
_COPY_NBYTES = 160  # a value that a call copies
_FREE_COPIES = 4
_CHARACTER_NBYTES = 4  # if a text contains a rare character
_ROW_NBYTES = 56  # with its numbers

Share: TypeAlias = Callable[[Any], Any]
"""Returns the first of equal values, each of which is charged once."""

Rows: TypeAlias = Mapping[Global, Callable[[dict[Any, Any], Share], Row]]
"""By class: the ``Row`` to keep of an object, made from its attributes; texts and tuples shared.

The metadata of 1,000 ranks has a million objects, which take ten times as much memory.
"""

_Act = TypeVar("_Act", bound=Callable[..., None])
_OPCODES: list[Callable[..., None] | None] = [None] * 256
_CHARGES: list[int] = [_SLOT_NBYTES] * 256


def _opcode(code: bytes, nbytes: int = _SLOT_NBYTES, **arguments: object) -> Callable[[_Act], _Act]:
    """Register a method for an opcode, and the charge for each use."""

    def register(act: _Act) -> _Act:
        _OPCODES[code[0]] = partial(act, **arguments) if arguments else act
        _CHARGES[code[0]] = nbytes
        return act

    return register


class _SparseMemo:
    """A memo that keeps only the values that the pickle reads back.

    ``used`` counts the values kept, and the containers read back: others can keep no value.
    """

    def __init__(self, wanted: set[int]) -> None:
        self._wanted, self._size = wanted, 0
        self._values: dict[int, object] = {}
        self.used = 0

    def __len__(self) -> int:
        return self._size

    def append(self, value: object) -> None:
        if self._size in self._wanted:
            self._values[self._size] = value
            self.used += 1
        self._size += 1

    def __getitem__(self, index: int) -> object:
        value = self._values[index]
        if isinstance(value, list | dict | set | Opaque):
            self.used += 1
        return value


def _operands(counts: Mapping[int, bytes]) -> bytes:
    return b"|".join(b"[%s].{%d}" % (re.escape(codes), n) for n, codes in counts.items())


_FIXED = {0: b"N\x88\x89)]}\x8f\x85\x86\x87t\x91\x90aesu\x94(01\x93R\x81\x92bQ", 1: b"K\x80q"}
_FIXED |= {2: b"M", 4: b"Jr", 8: b"G\x95"}
_TO_NEXT_GET = re.compile(b"(?:%s)*+(?:h(.)|j(.{4}))?" % _operands(_FIXED), re.DOTALL)
_WIDTHS = {**dict.fromkeys(b"\x8cC\x8a", 1), **dict.fromkeys(b"XB\x8b", 4), 0x96: 8}
"""Bytes of the length that follows an opcode of variable length."""


class Machine:
    """The state of a pickle being read.

    ``stack`` contains the values since the last mark; ``marks`` the stacks below it.
    """

    # CPython 3.11 sets attributes of a plain class faster than those of a ``Struct``.

    def __init__(self, data: bytes | FileBytes, start: int, rows: Rows) -> None:
        self.data = data
        self.pos = start
        self.limit = len(data) if rows else min(len(data), start + MAX_PICKLE_NBYTES)
        self.charged = self.limit - start if isinstance(data, bytes) and not rows else 0
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: list[object] | _SparseMemo = []
        self.rows = rows
        self.begun = (0, 0)
        self.shared: dict[object, object] = {}
        self.globals: set[Global] = set()
        self.misused: set[Global] = set()
        self.storages: dict[str, StorageRef] = {}

    def run(self) -> object:
        """Return the value on top of the stack at STOP."""
        data, opcodes, charges = self.data, _OPCODES, _CHARGES
        if self.rows and isinstance(data, bytes):
            self.memo = _SparseMemo(self._read_back(data, self.pos))
        for _ in range(MAX_OPCODES):
            code = data[self.pos]
            self.pos += 1
            if code == _STOP:
                return self.stack.pop()
            self.charged += charges[code]
            if self.charged > MAX_NBYTES:
                self.charge(0)
            if (act := opcodes[code]) is None:
                raise PickleError(f"{code:#04x} is not an opcode of plain data")
            act(self)
        raise PickleError(f"it has more than {MAX_OPCODES} opcodes")

    def _read_back(self, data: bytes, pos: int) -> set[int]:
        """Return the numbers of the stored values that a pickle of protocol 4 or 5 reads back."""
        found: set[int] = set()
        while (match := _TO_NEXT_GET.match(data, pos)) is not None:
            pos = match.end()
            if index := match[1] or match[2]:
                if (number := int.from_bytes(index, "little")) not in found:
                    self.charge(_ITEM_NBYTES)
                    found.add(number)
            elif pos < len(data) and (width := _WIDTHS.get(data[pos])) is not None:
                pos += 1 + width + int.from_bytes(data[pos + 1 : pos + 1 + width], "little")
            else:
                break  # the end, or what the machine refuses
        return found

    def take(self, nbytes: int) -> bytes:
        """Return the next ``nbytes`` bytes."""
        begin, end = self.pos, self.pos + nbytes
        if end > self.limit:
            raise PickleError("it ends early, or is too long")
        self.pos = end
        self.charged += nbytes
        return self.data[begin:end]

    def take_int(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def take_line(self) -> str:
        """Return the text up to the next line feed."""
        end = self.data.find(b"\n", self.pos, self.limit)
        if end < 0:
            raise PickleError("a line does not end")
        line = self.take(end - self.pos)
        self.pos += 1
        return line.decode()

    def charge(self, nbytes: int) -> None:
        """Count memory before it is allocated.

        Nothing is credited back, so the limit bounds time too: no opcode works longer than it is
        charged for.
        """
        self.charged += nbytes
        if self.charged > MAX_NBYTES:
            raise PickleError(
                f"it would take more than {MAX_NBYTES >> 20} MiB of memory", UnsupportedError
            )

    def pop(self, count: int) -> list[object]:
        """Remove ``count`` values from the stack, or (0) those since the last mark."""
        if count:
            return [self.stack.pop() for _ in range(count)][::-1]
        values, self.stack = self.stack, self.marks.pop()
        return values

    def pop_items(self) -> Iterator[object]:
        """Remove the values since the last mark, and yield them as items of a set."""
        values = self.pop(0)
        self.charge(_ITEM_NBYTES * len(values) + _TABLE_NBYTES)
        return map(as_key, values)

    def mention(self, module: object, name: object) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("name of a global is not text")
        self.charge(_GLOBAL_NBYTES)
        result = Global(module, name)
        self.globals.add(result)
        return result

    @_opcode(b"N", value=None)
    @_opcode(b"\x88", value=True)
    @_opcode(b"\x89", value=False)
    def _constant(self, value: object) -> None:
        self.stack.append(value)

    @_opcode(b"K")
    def _byte(self) -> None:
        self.stack.append(self.data[self.pos])
        self.pos += 1

    @_opcode(b"J", _NUMBER_NBYTES, layout=struct.Struct("<i"))
    @_opcode(b"M", _NUMBER_NBYTES, layout=struct.Struct("<H"))
    @_opcode(b"G", _NUMBER_NBYTES, layout=struct.Struct(">d"))
    def _number(self, layout: struct.Struct) -> None:
        self.stack.append(layout.unpack(self.take(layout.size))[0])

    @_opcode(b"\x8a", _NUMBER_NBYTES, width=1)
    @_opcode(b"\x8b", _NUMBER_NBYTES, width=4)
    def _long(self, width: int) -> None:
        raw = self.take(self.take_int(width))
        if len(raw) > _MAX_INT_NBYTES:
            raise PickleError(f"a number has more than {_MAX_INT_NBYTES} bytes")
        self.stack.append(int.from_bytes(raw, "little", signed=True))

    @_opcode(b"\x8c", _VALUE_NBYTES, width=1)
    @_opcode(b"X", _VALUE_NBYTES, width=4)
    def _text(self, width: int) -> None:
        raw = self.take(self.take_int(width))
        # Python writes lone surrogates, as in undecodable file names, in this way.
        text = raw.decode("utf-8", "surrogatepass")
        if not text.isascii():
            self.charge(_CHARACTER_NBYTES * len(raw))
        self.stack.append(text)

    @_opcode(b"C", _VALUE_NBYTES, width=1, kind=bytes)
    @_opcode(b"B", _VALUE_NBYTES, width=4, kind=bytes)
    @_opcode(b"\x96", _VALUE_NBYTES, width=8, kind=bytearray)
    def _bytes(self, width: int, kind: type[bytes | bytearray]) -> None:
        self.stack.append(kind(self.take(self.take_int(width))))

    @_opcode(b")", kind=tuple)
    @_opcode(b"]", _VALUE_NBYTES, kind=list)
    @_opcode(b"}", _VALUE_NBYTES, kind=dict)
    @_opcode(b"\x8f", _VALUE_NBYTES + _TABLE_NBYTES, kind=set)
    def _empty(self, kind: Callable[[], object]) -> None:
        self.stack.append(kind())

    @_opcode(b"\x85", _VALUE_NBYTES, count=1)
    @_opcode(b"\x86", _VALUE_NBYTES, count=2)
    @_opcode(b"\x87", _VALUE_NBYTES, count=3)
    @_opcode(b"t", _VALUE_NBYTES, count=0)
    def _tuple(self, count: int) -> None:
        values = self.pop(count)
        self.stack.append(tuple(values))

    @_opcode(b"\x91", _VALUE_NBYTES)
    def _frozenset(self) -> None:
        items = self.pop_items()
        self.stack.append(frozenset(items))

    @_opcode(b"\x90")
    def _add(self) -> None:
        items = self.pop_items()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise PickleError("it adds an item to a value that is not a set")
        target.update(items)

    @_opcode(b"a", _VALUE_NBYTES, count=1)
    @_opcode(b"e", count=0)
    def _append(self, count: int) -> None:
        values = self.pop(count)
        target = self.stack[-1]
        items = target.items if isinstance(target, Opaque) else target
        if not isinstance(items, list):
            raise PickleError("it appends to a value that is not a list")
        items.extend(values)

    @_opcode(b"s", count=2)
    @_opcode(b"u", count=0)
    def _set_item(self, count: int) -> None:
        values = self.pop(count)
        target = self.stack[-1]
        if len(values) % 2:
            raise PickleError("a key has no value")
        self.charge(_ITEM_NBYTES * len(values) // 2 + _TABLE_NBYTES)
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, dict):
            target.update((as_key(key), value) for key, value in pairs)
        elif isinstance(target, Opaque):
            target.pairs.extend(pairs)
        else:
            raise PickleError("it sets an item of a value that is not a dict")

    # _get and _put are half of a checkpoint's opcodes, so they call nothing. If the data ends in
    # an index, the next opcode is missing.

    @_opcode(b"h")
    @_opcode(b"j", width=4)
    def _get(self, width: int = 1) -> None:
        pos = self.pos
        self.pos = pos + width
        self.stack.append(self.memo[int.from_bytes(self.data[pos : self.pos], "little")])

    @_opcode(b"q", width=1)
    @_opcode(b"r")
    def _put(self, width: int = 4) -> None:
        pos = self.pos
        self.pos = pos + width
        if int.from_bytes(self.data[pos : self.pos], "little") != len(self.memo):
            raise PickleError("it does not number stored values consecutively")
        self.memo.append(self.stack[-1])

    @_opcode(b"\x94")
    def _memoize(self) -> None:
        self.memo.append(self.stack[-1])

    @_opcode(b"\x80", length=1)  # protocol
    @_opcode(b"\x95", length=8)  # frame
    def _skip(self, length: int) -> None:
        self.take(length)

    @_opcode(b"(")
    def _mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []
        if len(self.marks) > _FREE_MARKS:
            self.charge(_VALUE_NBYTES)

    @_opcode(b"0", count=1)
    @_opcode(b"1", count=0)
    def _drop(self, count: int) -> None:
        self.pop(count)

    @_opcode(b"c", _VALUE_NBYTES)
    def _global(self) -> None:
        self.stack.append(self.mention(self.take_line(), self.take_line()))

    @_opcode(b"\x93", _VALUE_NBYTES)
    def _stack_global(self) -> None:
        name = self.stack.pop()
        self.stack[-1] = self.mention(self.stack[-1], name)

    @_opcode(REDUCE, _VALUE_NBYTES)
    def _call(self) -> None:
        args, callee = self.stack.pop(), self.stack[-1]
        call = CALLS.get(callee) if isinstance(callee, Global) else None
        if call is not None and isinstance(args, tuple):
            # The memo can pass one long list to many calls, each of which copies it.
            copied = [len(a) for a in args if isinstance(a, list | tuple) and len(a) > _FREE_COPIES]
            self.charge(_COPY_NBYTES * sum(copied))
            value = call(args)
            if isinstance(value, set | frozenset):
                self.charge(_TABLE_NBYTES)
            if value is not None:
                self.stack[-1] = value
                return
            self.misused.add(cast("Global", callee))
        self._construct(args, REDUCE)

    @_opcode(NEWOBJ, _VALUE_NBYTES)
    def _new(self) -> None:
        self._construct(self.stack.pop(), NEWOBJ)

    @_opcode(NEWOBJ_EX, _VALUE_NBYTES)
    def _new_with_names(self) -> None:
        named, args = self.stack.pop(), self.stack.pop()
        self._construct((args, named), NEWOBJ_EX)

    def _construct(self, args: object, opcode: bytes) -> None:
        """Replace the class on top of the stack with an ``Opaque``."""
        if not isinstance(args, tuple):
            raise PickleError("arguments of a call are not a tuple")
        if self.rows:
            call = _VALUE_NBYTES + 2 * _SLOT_NBYTES  # with the class, and no arguments
            self.begun = self.charged - call, self._kept()
        self.charge(_ITEM_NBYTES)
        self.stack[-1] = Opaque(self.stack[-1], args, opcode=opcode)

    @_opcode(b"b")
    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.state = state
            if self.rows:
                self._to_row(target)
        elif isinstance(target, Ordered):
            target.attributes = state
        elif not isinstance(target, dict):
            raise PickleError("it sets attributes of a value that has none")

    def _to_row(self, target: Opaque) -> None:
        """Replace an object, and credit what was charged since it began if nothing keeps it."""
        make = self.rows.get(target.callee) if isinstance(target.callee, Global) else None
        if make is None or not isinstance(target.state, dict):
            return
        charged, kept = self.begun
        if kept == self._kept():
            self.charged = charged
        self.charge(_ROW_NBYTES)
        self.stack[-1] = make(target.state, self._share)

    def _share(self, value: Any) -> Any:
        known = self.shared.get(value)
        if known is None:
            numbers = len(value) if isinstance(value, str | tuple) else 0
            self.charge(_ITEM_NBYTES + _VALUE_NBYTES + _NUMBER_NBYTES * numbers)
            known = self.shared[value] = value
        return known

    def _kept(self) -> int:
        used = self.memo.used if isinstance(self.memo, _SparseMemo) else len(self.memo)
        return used + len(self.globals) + len(self.misused) + len(self.storages)

    @_opcode(b"Q", _VALUE_NBYTES)
    def _storage(self) -> None:
        self.charge(_ITEM_NBYTES)
        storage = storage_of(self.stack[-1])
        self.stack[-1] = storage
        if self.storages.setdefault(storage.key, storage) != storage:
            raise PickleError("it describes one storage in two ways")


class Pickle(Struct, frozen=True):
    """A pickle's value, and the byte after it.

    The value consists of plain Python values and the classes of ``pickle_values``; it may be
    nested to any depth and contain itself. ``unknown_globals`` are sorted: those outside the closed
    list, and those called with arguments that torch and DeepSpeed never write.
    """

    value: object
    end: int
    unknown_globals: tuple[Global, ...]
    storages: Mapping[str, StorageRef]


_HINTS: Mapping[type[ZexportError], str] = {
    DamagedCheckpointError: "Copy the file again",
    UnsafeError: "Do not load this file with torch.load; ask who made it",
    UnsupportedError: "Save again with fewer values, such as without lists in client_state",
}


def load(
    data: bytes | FileBytes, *, path: Path, start: int = 0, rows: Rows = MappingProxyType({})
) -> Pickle:
    """Return the pickle at byte ``start`` of ``data``; ``path`` is for messages.

    With ``rows``, only the values count as memory, not ``data``.

    Raises:
        DamagedCheckpointError: it is malformed.
        UnsafeError: a tensor's place or dtype requires running code.
        UnsupportedError: its values would take too much memory.
    """
    machine = Machine(data, start, rows)
    try:
        value = machine.run()
    except (ValueError, LookupError) as cause:
        error = cause
        if not isinstance(error, PickleError):
            error = PickleError("it ends early, uses a missing value, or contains invalid text")
        problem = f"pickle at byte {machine.pos}: {error}"
        raise error.kind(problem, path=path, hint=_HINTS[error.kind]) from cause
    unknown = (machine.globals - HARMLESS) | machine.misused
    return Pickle(value, machine.pos, tuple(sorted(unknown)), machine.storages)
