"""A pickle's stack machine without its two dangerous parts: it looks no name up, and calls nothing.

A pickle is a program for that machine. Every opcode makes, stores or appends a bounded number of
values, and none recurses.

Source of the opcodes: CPython 3.11, ``Lib/pickletools.py``. Those are left out that no pickler of
the protocols 2 to 5 writes (the texts, numbers and classes of protocols 0 and 1, and of Python 2;
texts beyond 4 GiB), and those whose values are not in the file (extension codes, out-of-band
buffers).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsafeError, UnsupportedError
from zexport.formats.pickle_globals import CALLS, CONSTRUCTORS, HARMLESS, Call, storage_of
from zexport.formats.pickle_values import (
    ExcessError,
    ForeignStorage,
    FragmentAddress,
    Global,
    HiddenError,
    Made,
    MalformedError,
    Opaque,
    Ordered,
    StorageRef,
    as_key,
)
from zexport.storage.contents import FileBytes

MAX_OPCODES = 32_000_000  # a model of 100,000 tensors takes about 4 million
MAX_NBYTES = 192 << 20
"""Memory that one pickle and its values may take, as ``Machine.spend`` estimates it.

A model file of 100,000 tensors takes nearly all of it (a hundred megabytes, as the estimate errs
upwards). Without this bound a few kilobytes of compressed pickle could ask for gigabytes of empty
containers.
"""
_MAX_INT_NBYTES = 1024  # beyond about 1,780 bytes Python refuses to print an int
_STOP = ord(".")

# What is charged, in bytes; measured with CPython 3.11, rounded up.
_PLACE_NBYTES = 9  # on the stack or in the memo, and a little for its growth
_NUMBER_NBYTES = 48  # with its place
_VALUE_NBYTES = 72  # a text, tuple, list, dict, call or mark, with its place
_MEMBER_NBYTES = 112  # of a dict (its key, its value) or a set; an ``Opaque``
_TABLE_NBYTES = 192  # what the first member costs besides
_GLOBAL_NBYTES = 440
_SHALLOW = 64  # marks; more of them at a time than any checkpoint has are charged for
_COPY_NBYTES = 160  # a value that a call copies
_SHORT = 4  # a call that copies at most so many values takes no more than its opcode costs
_WIDEST = 4  # bytes that a character takes in memory, if one of its text is rare


Run = TypeVar("Run", bound=Callable[..., None])

_OPCODES: list[Callable[..., None] | None] = [None] * 256
_COSTS: list[int] = [_PLACE_NBYTES] * 256


def _opcode(code: bytes, nbytes: int = _PLACE_NBYTES, **known: object) -> Callable[[Run], Run]:
    """What an opcode does, with what its number says, and what its own object takes.

    What depends on the number of values or on their length is charged where they are made.
    """

    def register(run: Run) -> Run:
        _OPCODES[code[0]] = partial(run, **known) if known else run
        _COSTS[code[0]] = nbytes
        return run

    return register


class Machine(Struct, eq=False):
    """The state of one run: the bytes ahead, the stack, the memo, what was mentioned.

    ``stack`` holds the values since the last mark; the stacks below it wait in ``marks``.
    """

    data: bytes | FileBytes
    pos: int
    limit: int
    spent: int
    stack: list[object] = []
    marks: list[list[object]] = []
    memo: list[object] = []
    globals: set[Global] = set()
    misused: set[Global] = set()
    storages: dict[str, StorageRef | ForeignStorage] = {}
    fragments: list[FragmentAddress] = []

    def run(self) -> object:
        """The value on top of the stack at STOP."""
        data, opcodes, costs = self.data, _OPCODES, _COSTS
        for _ in range(MAX_OPCODES):
            code = data[self.pos]
            self.pos += 1
            if code == _STOP:
                break
            self.spent += costs[code]
            if self.spent > MAX_NBYTES:
                self.spend(0)
            if (act := opcodes[code]) is None:
                raise MalformedError(f"{code:#04x} is not an opcode that data needs")
            act(self)
        else:
            raise MalformedError(f"it goes on after {MAX_OPCODES} opcodes")
        if any(fragment.numel < 0 for fragment in self.fragments):
            raise MalformedError("a fragment_address is never filled")
        return self.stack.pop()

    def take(self, nbytes: int) -> bytes:
        """The next ``nbytes`` bytes."""
        begin, end = self.pos, self.pos + nbytes
        if end > self.limit:
            raise MalformedError("it ends early, or is longer than it may be")
        self.pos = end
        self.spent += nbytes
        return self.data[begin:end]

    def take_int(self, nbytes: int) -> int:
        """The next ``nbytes`` bytes as an unsigned number."""
        return int.from_bytes(self.take(nbytes), "little")

    def take_line(self) -> str:
        """The text up to the next line feed, without it."""
        end = self.data.find(b"\n", self.pos, self.limit)
        if end < 0:
            raise MalformedError("a line of it does not end")
        line = self.take(end - self.pos)
        self.pos += 1
        return line.decode()

    def spend(self, nbytes: int) -> None:
        """Account for memory that is about to be taken.

        Everything that an opcode makes is charged when it is made, and never given back: that
        bounds the time as well, since no opcode works longer than it is charged for.
        """
        self.spent += nbytes
        if self.spent > MAX_NBYTES:
            raise ExcessError(f"would take more than {MAX_NBYTES >> 20} MiB of memory")

    def pop(self, count: int) -> list[object]:
        """The ``count`` values on top of the stack, or (0) those since the last mark."""
        if count:
            return [self.stack.pop() for _ in range(count)][::-1]
        values, self.stack = self.stack, self.marks.pop()
        return values

    def members(self) -> Iterator[object]:
        """The values since the last mark, fit to be members of a set."""
        values = self.pop(0)
        self.spend(_MEMBER_NBYTES * len(values) + _TABLE_NBYTES)
        return map(as_key, values)

    def mention(self, module: object, name: object) -> Global:
        """The global of that name."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise MalformedError("the name of a global is not text")
        self.spend(_GLOBAL_NBYTES)
        result = Global(module, name)
        self.globals.add(result)
        return result

    def call(
        self, known: Mapping[Global, Call], callee: object, args: object, made: Made
    ) -> object:
        """What a call stands for: a value for the calls in ``known``, else an ``Opaque``."""
        if not isinstance(args, tuple):
            raise MalformedError("the arguments of a call are not a tuple")
        if isinstance(callee, Global) and (run := known.get(callee)) is not None:
            # A call may copy what it is given, and the memo gives one long list to many calls.
            copied = [len(a) for a in args if isinstance(a, list | tuple) and len(a) > _SHORT]
            self.spend(_COPY_NBYTES * sum(copied))
            value = run(args)
            if isinstance(value, set | frozenset):
                self.spend(_TABLE_NBYTES)
            if isinstance(value, FragmentAddress):
                self.fragments.append(value)
            if value is not None:
                return value
            self.misused.add(callee)
        self.spend(_MEMBER_NBYTES)
        return Opaque(callee, args, made=made)

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
            raise MalformedError(f"a number takes more than {_MAX_INT_NBYTES} bytes")
        self.stack.append(int.from_bytes(raw, "little", signed=True))

    @_opcode(b"\x8c", _VALUE_NBYTES, width=1)
    @_opcode(b"X", _VALUE_NBYTES, width=4)
    def _text(self, width: int) -> None:
        raw = self.take(self.take_int(width))
        # Python writes lone surrogates, such as those of undecodable file names, in this way.
        text = raw.decode("utf-8", "surrogatepass")
        if not text.isascii():
            self.spend(_WIDEST * len(raw))
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
        members = self.members()
        self.stack.append(frozenset(members))

    @_opcode(b"\x90")
    def _add(self) -> None:
        members = self.members()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise MalformedError("it adds a member to what is not a set")
        target.update(members)

    @_opcode(b"a", _VALUE_NBYTES, count=1)
    @_opcode(b"e", count=0)
    def _append(self, count: int) -> None:
        values = self.pop(count)
        target = self.stack[-1]
        items = target.items if isinstance(target, Opaque) else target
        if not isinstance(items, list):
            raise MalformedError("it appends to what is not a list")
        items.extend(values)

    @_opcode(b"s", count=2)
    @_opcode(b"u", count=0)
    def _set_item(self, count: int) -> None:
        values = self.pop(count)
        target = self.stack[-1]
        if len(values) % 2:
            raise MalformedError("a key in it has no value")
        self.spend(_MEMBER_NBYTES * len(values) + _TABLE_NBYTES)
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, dict):
            target.update((as_key(key), value) for key, value in pairs)
        elif isinstance(target, Opaque):
            target.pairs.extend(pairs)
        else:
            raise MalformedError("it sets an item of what is not a dict")

    # The next two are half of a checkpoint's opcodes, and a partial call takes its time. An index
    # cut short by the end of the data is found out at the next opcode, of which there is none.

    @_opcode(b"h")
    @_opcode(b"j", width=4)
    def _get(self, width: int = 1) -> None:
        pos = self.pos
        self.pos = pos + width
        index = int.from_bytes(self.data[pos : self.pos], "little")
        if index >= len(self.memo):
            raise MalformedError("it refers to a value that it never stored")
        self.stack.append(self.memo[index])

    @_opcode(b"q", width=1)
    @_opcode(b"r")
    def _put(self, width: int = 4) -> None:
        pos = self.pos
        self.pos = pos + width
        if int.from_bytes(self.data[pos : self.pos], "little") != len(self.memo):
            raise MalformedError("it does not number in turn what it stores")
        self.memo.append(self.stack[-1])

    @_opcode(b"\x94")
    def _memoize(self) -> None:
        self.memo.append(self.stack[-1])

    @_opcode(b"\x80", length=1)  # the protocol
    @_opcode(b"\x95", length=8)  # a hint for readers that buffer
    def _skip(self, length: int) -> None:
        self.take(length)

    @_opcode(b"(")
    def _mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []
        if len(self.marks) > _SHALLOW:
            self.spend(_VALUE_NBYTES)

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

    @_opcode(b"R", _VALUE_NBYTES, known=CALLS, made=Made.BY_CALL)
    @_opcode(b"\x81", _VALUE_NBYTES, known=CONSTRUCTORS, made=Made.BY_NEW)
    def _call(self, known: Mapping[Global, Call], made: Made) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.call(known, self.stack[-1], args, made)

    @_opcode(b"\x92", _VALUE_NBYTES)
    def _call_with_names(self) -> None:
        named, args = self.stack.pop(), self.stack.pop()
        self.stack[-1] = self.call({}, self.stack[-1], (args, named), Made.BY_NEW_WITH_NAMES)

    @_opcode(b"b")
    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, FragmentAddress):
            target.fill(state)
        elif isinstance(target, Opaque):
            target.state = state
        elif isinstance(target, Ordered):
            target.attributes = state
        elif not isinstance(target, dict):
            raise MalformedError("it gives attributes to what has none")

    @_opcode(b"Q", _VALUE_NBYTES)
    def _storage(self) -> None:
        self.spend(_MEMBER_NBYTES)
        storage = storage_of(self.stack[-1])
        self.stack[-1] = storage
        if self.storages.setdefault(storage.key, storage) != storage:
            raise MalformedError("it describes one storage in two ways")


MAX_PICKLE_NBYTES = 64 << 20
_UNFIT = "it ends early, takes more values than it made, or has a text that cannot be decoded"


class Pickle(Struct, frozen=True):
    """A pickle: its value, the byte after it, and the names in it.

    The value is of plain Python values and the classes of ``pickle_values``; it may be
    nested to any depth and contain itself. ``unknown_globals`` are those outside the closed list,
    and those on it that were called with arguments they are never given, sorted.
    """

    value: object
    end: int
    unknown_globals: tuple[Global, ...]
    storages: Mapping[str, StorageRef | ForeignStorage]


def load(data: bytes | memoryview | FileBytes, *, path: Path, start: int = 0) -> Pickle:
    """Return the pickle at byte ``start`` of ``data``; nothing it names is imported or called.

    ``path`` is its file, for messages.
    """
    if isinstance(data, memoryview):
        data = data.tobytes()
    limit = min(len(data), start + MAX_PICKLE_NBYTES)
    is_held = isinstance(data, bytes)
    machine = Machine(data, start, limit, spent=limit - start if is_held else 0)
    try:
        value = machine.run()
    except HiddenError as error:
        problem = f"{error}, at byte {machine.pos} of its pickle"
        hint = "Do not load this file with anything that runs pickles unless you trust its author"
        raise UnsafeError(problem, path=path, hint=hint) from error
    except ExcessError as error:
        hint = "Save again without the large lists that client_state may hold"
        problem = f"holds a pickle that {error}"
        raise UnsupportedError(problem, path=path, hint=hint) from error
    except (ValueError, IndexError) as error:
        reason = error if isinstance(error, MalformedError) else _UNFIT
        problem = f"the pickle is damaged at byte {machine.pos}: {reason}"
        hint = "Copy the file again from where it was written"
        raise DamagedCheckpointError(problem, path=path, hint=hint) from error
    unknown = (machine.globals - HARMLESS) | machine.misused
    return Pickle(value, machine.pos, tuple(sorted(unknown)), machine.storages)
