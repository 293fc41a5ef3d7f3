"""What each opcode of the pickle protocols 2 to 5 does to a stack of inert values.

A pickle is a program for a small stack machine. This is that machine without its two dangerous
parts: it looks no name up, and it calls nothing. Every opcode makes, stores or appends a bounded
number of values, and none recurses. A contradiction ends in ``ValueError``, ``IndexError`` or
``KeyError``, for the caller to explain.

Source of the opcodes: CPython 3.11, ``Lib/pickletools.py``. Those are left out that no pickler of
these protocols writes (the texts, numbers and classes of protocols 0 and 1, and of Python 2; texts
beyond 4 GiB), and those whose values are not in the file (extension codes, out-of-band buffers).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from mmap import mmap
from typing import TypeAlias

from zexport.formats.inert import (
    ExcessError,
    ForeignStorage,
    FragmentAddress,
    Global,
    MalformedError,
    Opaque,
    StorageRef,
    as_key,
)
from zexport.formats.known_globals import CALLS, CONSTRUCTORS, Call, storage_of

MAX_NBYTES = 192 << 20
"""Memory that one pickle and its values may take, as ``Machine.spend`` estimates it.

A model file of 100,000 tensors takes nearly all of it (a hundred megabytes, as the estimate errs
upwards). Without this bound a few kilobytes of compressed pickle could ask for gigabytes of empty
containers.
"""
MAX_INT_NBYTES = 1024  # beyond about 1,780 bytes Python refuses to print an int
HIGHEST_PROTOCOL = 5
STOP = ord(".")

# What is charged, in bytes; measured with CPython 3.11, rounded up.
_PLACE_NBYTES = 9  # on the stack or in the memo, and a little for its growth
_NUMBER_NBYTES = 48  # with its place
_VALUE_NBYTES = 72  # a text, tuple, list, dict, call or mark, with its place
_MEMBER_NBYTES = 112  # of a dict (its key, its value) or a set
_TABLE_NBYTES = 192  # what the first member costs besides
_OPAQUE_NBYTES = 112
_GLOBAL_NBYTES = 440
_SHALLOW = 64  # marks; more of them at a time than any checkpoint has are charged for
_COPY_NBYTES = 160  # a value that a call copies
_SHORT = 4  # a call that copies at most so many values takes no more than its opcode costs
_WIDEST = 4  # bytes that a character takes in memory, if one of its text is rare


@dataclass(slots=True, eq=False)
class Machine:
    """The state of one run: the bytes ahead, the stack, the memo, what was mentioned.

    ``stack`` holds the values since the last mark; the stacks below it wait in ``marks``.
    """

    data: bytes | mmap
    pos: int
    limit: int
    spent: int = 0
    stack: list[object] = field(default_factory=list)
    marks: list[list[object]] = field(default_factory=list)
    memo: list[object] = field(default_factory=list)
    globals: set[Global] = field(default_factory=set)
    misused: set[Global] = field(default_factory=set)
    storages: dict[str, StorageRef | ForeignStorage] = field(default_factory=dict)
    fragments: list[FragmentAddress] = field(default_factory=list)

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

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo; picklers number what they store from 0 on."""
        if index != len(self.memo):
            raise MalformedError("it does not number in turn what it stores")
        self.memo.append(self.stack[-1])

    def recall(self, index: int) -> None:
        """Push what the memo has at ``index``."""
        if index >= len(self.memo):
            raise MalformedError("it refers to a value that it never stored")
        self.stack.append(self.memo[index])

    def pop(self, count: int) -> list[object]:
        """The ``count`` values on top of the stack, in the order they were pushed."""
        return [self.stack.pop() for _ in range(count)][::-1]

    def pop_mark(self) -> list[object]:
        """The values since the last mark."""
        values, self.stack = self.stack, self.marks.pop()
        return values

    def mention(self, module: object, name: object) -> Global:
        """The global of that name."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise MalformedError("the name of a global is not text")
        self.spend(_GLOBAL_NBYTES)
        result = Global(module, name)
        self.globals.add(result)
        return result

    def call(self, known: Mapping[Global, Call], callee: object, args: object) -> object:
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
            if value is not None:
                return value
            self.misused.add(callee)
        self.spend(_OPAQUE_NBYTES)
        return Opaque(callee, args)


Opcode: TypeAlias = Callable[[Machine], None]


def _unknown(machine: Machine) -> None:
    raise MalformedError(f"{machine.data[machine.pos - 1]:#04x} is not an opcode that data needs")


OPCODES: list[Opcode] = [_unknown] * 256

# What each opcode's own object takes; what depends on the number of values or on their length is
# charged where they are made.
COSTS: list[int] = [_PLACE_NBYTES] * 256
for _codes, _nbytes in (
    (b"JMG\x8a\x8b", _NUMBER_NBYTES),
    (b"X\x8cCB\x96t\x85\x86\x87]}\x8f\x91acR\x81\x92\x93Q", _VALUE_NBYTES),
):
    for _code in _codes:
        COSTS[_code] = _nbytes


def _opcode(code: bytes) -> Callable[[Opcode], Opcode]:
    def register(run: Opcode) -> Opcode:
        OPCODES[code[0]] = run
        return run

    return register


def _define(code: bytes, make: Callable[[Machine], object]) -> None:
    """An opcode that pushes one value."""

    @_opcode(code)
    def push(machine: Machine) -> None:
        value = make(machine)  # which may put another stack in this one's place
        machine.stack.append(value)


def _define_number(code: bytes, layout: str) -> None:
    """An opcode that pushes a number of fixed size."""
    number = struct.Struct(layout)
    _define(code, lambda machine: number.unpack(machine.take(number.size))[0])


def _define_sized(code: bytes, width: int, decode: Callable[[Machine, bytes], object]) -> None:
    """An opcode that pushes a value of so many bytes, their number written before in ``width``."""
    _define(code, lambda machine: decode(machine, machine.take(machine.take_int(width))))


def _define_growth(
    code: bytes, single: int, grow: Callable[[Machine, object, list[object]], None]
) -> None:
    """An opcode that adds ``single`` values to the container below, or (0) those since the mark."""

    @_opcode(code)
    def add(machine: Machine) -> None:
        values = machine.pop(single) if single else machine.pop_mark()
        grow(machine, machine.stack[-1], values)


def _text(machine: Machine, raw: bytes) -> str:
    # Python writes lone surrogates, such as those of undecodable file names, in this way.
    text = raw.decode("utf-8", "surrogatepass")
    if not text.isascii():
        machine.spend(_WIDEST * len(raw))
    return text


def _long(_: Machine, raw: bytes) -> int:
    if len(raw) > MAX_INT_NBYTES:
        raise MalformedError(f"a number takes more than {MAX_INT_NBYTES} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _members(machine: Machine, values: list[object]) -> Iterator[object]:
    """The values, fit to be members of a set."""
    machine.spend(_MEMBER_NBYTES * len(values) + _TABLE_NBYTES)
    return map(as_key, values)


def _extend(_: Machine, target: object, values: list[object]) -> None:
    items = target.items if isinstance(target, Opaque) else target
    if not isinstance(items, list):
        raise MalformedError("it appends to what is not a list")
    items.extend(values)


def _update(machine: Machine, target: object, values: list[object]) -> None:
    if len(values) % 2:
        raise MalformedError("a key in it has no value")
    machine.spend(_MEMBER_NBYTES * len(values) + _TABLE_NBYTES)
    pairs = zip(values[::2], values[1::2], strict=True)
    if isinstance(target, dict):
        target.update((as_key(key), value) for key, value in pairs)
    elif isinstance(target, Opaque):
        target.items.extend(pairs)
    else:
        raise MalformedError("it sets an item of what is not a dict")


def _add(machine: Machine, target: object, values: list[object]) -> None:
    if not isinstance(target, set):
        raise MalformedError("it adds a member to what is not a set")
    target.update(_members(machine, values))


_define(b"N", lambda _: None)
_define(b"\x88", lambda _: True)
_define(b"\x89", lambda _: False)
_define(b"]", lambda _: [])
_define(b"}", lambda _: {})
_define(b")", lambda _: ())
_define(b"\x8f", lambda machine: set(_members(machine, [])))
_define(b"t", lambda machine: tuple(machine.pop_mark()))
_define(b"\x85", lambda machine: tuple(machine.pop(1)))
_define(b"\x86", lambda machine: tuple(machine.pop(2)))
_define(b"\x87", lambda machine: tuple(machine.pop(3)))
_define(b"\x91", lambda machine: frozenset(_members(machine, machine.pop_mark())))
_define(b"c", lambda machine: machine.mention(machine.take_line(), machine.take_line()))
_define_number(b"J", "<i")
_define_number(b"M", "<H")
_define_number(b"G", ">d")
_define_sized(b"\x8a", 1, _long)
_define_sized(b"\x8b", 4, _long)
_define_sized(b"\x8c", 1, _text)
_define_sized(b"X", 4, _text)
_define_sized(b"C", 1, lambda _, raw: raw)
_define_sized(b"B", 4, lambda _, raw: raw)
_define_sized(b"\x96", 8, lambda _, raw: bytearray(raw))
_define_growth(b"a", 1, _extend)
_define_growth(b"e", 0, _extend)
_define_growth(b"s", 2, _update)
_define_growth(b"u", 0, _update)
_define_growth(b"\x90", 0, _add)


# The next five are two thirds of a checkpoint's opcodes, so they do without the helpers. A
# number cut short by the end of the data is found out at the next opcode, of which there is none.


@_opcode(b"K")
def _binint1(machine: Machine) -> None:
    machine.stack.append(machine.data[machine.pos])
    machine.pos += 1


@_opcode(b"h")
def _binget(machine: Machine) -> None:
    machine.recall(machine.data[machine.pos])
    machine.pos += 1


@_opcode(b"j")
def _long_binget(machine: Machine) -> None:
    pos = machine.pos
    machine.pos = pos + 4
    machine.recall(int.from_bytes(machine.data[pos : pos + 4], "little"))


@_opcode(b"q")
def _binput(machine: Machine) -> None:
    machine.remember(machine.data[machine.pos])
    machine.pos += 1


@_opcode(b"r")
def _long_binput(machine: Machine) -> None:
    pos = machine.pos
    machine.pos = pos + 4
    machine.remember(int.from_bytes(machine.data[pos : pos + 4], "little"))


@_opcode(b"\x94")
def _memoize(machine: Machine) -> None:
    machine.memo.append(machine.stack[-1])


@_opcode(b"\x80")
def _proto(machine: Machine) -> None:
    if machine.take_int(1) > HIGHEST_PROTOCOL:
        raise MalformedError(f"it claims a protocol above {HIGHEST_PROTOCOL}")


@_opcode(b"\x95")
def _frame(machine: Machine) -> None:
    machine.take(8)  # a hint for readers that buffer


@_opcode(b"(")
def _mark(machine: Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []
    if len(machine.marks) > _SHALLOW:
        machine.spend(_VALUE_NBYTES)


@_opcode(b"0")
def _pop(machine: Machine) -> None:
    machine.stack.pop()


@_opcode(b"1")
def _pop_mark(machine: Machine) -> None:
    machine.pop_mark()


@_opcode(b"\x93")
def _stack_global(machine: Machine) -> None:
    name = machine.stack.pop()
    machine.stack[-1] = machine.mention(machine.stack[-1], name)


@_opcode(b"R")
def _reduce(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(CALLS, machine.stack[-1], args)


@_opcode(b"\x81")
def _newobj(machine: Machine) -> None:
    args = machine.stack.pop()
    made = machine.call(CONSTRUCTORS, machine.stack[-1], args)
    machine.stack[-1] = made
    if isinstance(made, FragmentAddress):
        machine.fragments.append(made)


@_opcode(b"\x92")
def _newobj_ex(machine: Machine) -> None:
    kwargs, args = machine.stack.pop(), machine.stack.pop()
    machine.stack[-1] = machine.call({}, machine.stack[-1], (args, kwargs))


@_opcode(b"b")
def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, FragmentAddress):
        target.fill(state)
    elif isinstance(target, Opaque):
        target.state = state
    elif not isinstance(target, dict):  # an OrderedDict's attributes are of no use here
        raise MalformedError("it gives attributes to what has none")


@_opcode(b"Q")
def _binpersid(machine: Machine) -> None:
    machine.spend(_MEMBER_NBYTES)
    storage = storage_of(machine.stack[-1])
    machine.stack[-1] = storage
    if machine.storages.setdefault(storage.key, storage) != storage:
        raise MalformedError("it describes one storage in two ways")
