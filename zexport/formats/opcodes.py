"""What each opcode of the pickle protocols 0 to 5 does to a stack of inert values.

A pickle is a program for a small stack machine. This is that machine without its two dangerous
parts: it looks no name up, and it calls nothing. Every opcode makes, stores or appends a bounded
number of values, and none recurses. A contradiction ends in ``ValueError``, ``IndexError`` or
``KeyError``, for the caller to explain.

Source of the opcodes: CPython 3.11, ``Lib/pickletools.py``. Extension codes and out-of-band buffers
are left out, for their values are not in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias

from zexport.formats.inert import (
    FragmentAddress,
    MalformedError,
    Opaque,
    as_key,
)
from zexport.formats.known_globals import CALLS, CONSTRUCTORS, storage_of
from zexport.formats.machine import Machine

_PLAIN_NBYTES = 9  # a place on the stack or in the memo, and a little for its growth
_MEMBER_NBYTES = 112
_TABLE_NBYTES = 192  # what the first member of a dict costs
_MARK_NBYTES = 96
_WIDEST = 4  # bytes that a character takes in memory, if one of its text is rare
_SHALLOW = 64  # marks; more of them at a time than any checkpoint has are charged for

MAX_INT_NBYTES = 1024  # beyond about 1,780 bytes Python refuses to print an int
HIGHEST_PROTOCOL = 5
STOP = ord(".")


Opcode: TypeAlias = Callable[[Machine], None]


def _unknown(machine: Machine) -> None:
    raise MalformedError(f"{machine.data[machine.pos - 1]:#04x} is not an opcode that data needs")


OPCODES: list[Opcode] = [_unknown] * 256

# The memory that each opcode's own objects take, in bytes; what depends on the number of values or
# on their length is charged where they are made. Measured with CPython 3.11, rounded up.
COSTS: list[int] = [_PLAIN_NBYTES] * 256
for _codes, _nbytes in (
    (b"JMGIFL\x8a\x8b", 48),
    (b"tR\x85\x86\x87", 72),
    (b"SUVTX\x8c\x8d", 80),
    (b"CB\x8e\x96]}al\x81", 96),
    (b"Q", 176),
    (b"\x92o", 176),
    (b"\x8f\x91", 248),
    (b"ci\x93", 512),
):
    for _code in _codes:
        COSTS[_code] = _nbytes


def _opcode(code: bytes) -> Callable[[Opcode], Opcode]:
    def register(run: Opcode) -> Opcode:
        OPCODES[code[0]] = run
        return run

    return register


def _define(code: bytes, make: Callable[[Machine], object]) -> None:
    """An opcode that pushes one value and looks at nothing on the stack."""

    @_opcode(code)
    def push(machine: Machine) -> None:
        machine.stack.append(make(machine))


def _define_fixed(code: bytes, layout: str) -> None:
    """An opcode that pushes a number of fixed size."""
    number = struct.Struct(layout)
    _define(code, lambda machine: number.unpack(machine.take(number.size))[0])


def _define_sized(code: bytes, width: int, decode: Callable[[bytes], object]) -> None:
    """An opcode that pushes a value of so many bytes, their number written before in ``width``."""
    _define(code, lambda machine: decode(machine.take(machine.take_int(width))))


def _define_line(code: bytes, decode: Callable[[bytes], object]) -> None:
    """An opcode that pushes what a line of text says."""
    _define(code, lambda machine: decode(machine.take_line()))


def _define_collection(
    code: bytes, collect: Callable[[list[object]], object], *, hashes: bool = False
) -> None:
    """An opcode that makes one value of those since the last mark."""

    @_opcode(code)
    def gather(machine: Machine) -> None:
        values = machine.pop_mark()
        if hashes:
            machine.spend(_MEMBER_NBYTES * len(values) + _TABLE_NBYTES)
        machine.stack.append(collect(values))


def _define_growth(code: bytes, grow: Callable[[object, list[object]], None], single: int) -> None:
    """An opcode that adds ``single`` values to the container below, or (0) those since the mark."""

    @_opcode(code)
    def add(machine: Machine) -> None:
        if single:
            values = [machine.stack.pop() for _ in range(single)][::-1]
        else:
            values = machine.pop_mark()
        target = machine.stack[-1]
        if not isinstance(target, list):
            machine.spend(_MEMBER_NBYTES * len(values) + (0 if target else _TABLE_NBYTES))
        grow(target, values)


def _define_put(code: bytes, index: Callable[[Machine], int]) -> None:
    """An opcode that stores the top of the stack in the memo."""

    @_opcode(code)
    def put(machine: Machine) -> None:
        machine.remember(index(machine), machine.stack[-1])


def _define_text(
    code: bytes, take: Callable[[Machine], bytes], decode: Callable[[bytes], str]
) -> None:
    """An opcode that pushes text."""

    @_opcode(code)
    def push(machine: Machine) -> None:
        raw = take(machine)
        text = decode(raw)
        if not text.isascii():
            machine.spend(_WIDEST * len(raw))
        machine.stack.append(text)


def _text(raw: bytes) -> str:
    # Python writes lone surrogates, such as those of undecodable file names, in this way.
    return raw.decode("utf-8", "surrogatepass")


def _long(raw: bytes) -> int:
    if len(raw) > MAX_INT_NBYTES:
        raise MalformedError(f"a number takes more than {MAX_INT_NBYTES} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in {b"'", b'"'}:  # noqa: PLR2004
        raise MalformedError("a text in it lacks its quotes")
    return line[1:-1].decode("unicode_escape")


def _int_line(line: bytes) -> object:
    return {b"00": False, b"01": True}[line] if line in {b"00", b"01"} else int(line)


def _global(machine: Machine) -> object:
    module, name = machine.take_line(), machine.take_line()
    return machine.mention(module.decode(), name.decode())


def _extend(target: object, values: list[object]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, Opaque):
        target.items.extend(values)
    else:
        raise MalformedError("it appends to what is not a list")


def _update(target: object, values: list[object]) -> None:
    if len(values) % 2:
        raise MalformedError("a key in it has no value")
    pairs = zip(values[::2], values[1::2], strict=True)
    if isinstance(target, dict):
        target.update((as_key(key), value) for key, value in pairs)
    elif isinstance(target, Opaque):
        target.items.extend(pairs)
    else:
        raise MalformedError("it sets an item of what is not a dict")


def _add(target: object, values: list[object]) -> None:
    if not isinstance(target, set):
        raise MalformedError("it adds a member to what is not a set")
    target.update(map(as_key, values))


def _new_dict(values: list[object]) -> object:
    result: dict[object, object] = {}
    _update(result, values)
    return result


_define(b"N", lambda _: None)
_define(b"\x88", lambda _: True)
_define(b"\x89", lambda _: False)
_define(b"]", lambda _: [])
_define(b"}", lambda _: {})
_define(b")", lambda _: ())
_define(b"\x8f", lambda _: set())
_define(b"2", lambda machine: machine.stack[-1])
_define(b"c", _global)
_define(b"g", lambda machine: machine.recall(int(machine.take_line())))
_define_put(b"p", lambda machine: int(machine.take_line()))
_define_put(b"\x94", lambda machine: len(machine.memo) + len(machine.strays))
_define_fixed(b"J", "<i")
_define_fixed(b"M", "<H")
_define_fixed(b"G", ">d")
_define_sized(b"\x8a", 1, _long)
_define_sized(b"\x8b", 4, _long)
_define_text(b"T", lambda machine: machine.take(machine.take_int(4)), _text)
_define_text(b"U", lambda machine: machine.take(machine.take_int(1)), _text)
_define_text(b"\x8c", lambda machine: machine.take(machine.take_int(1)), _text)
_define_text(b"\x8d", lambda machine: machine.take(machine.take_int(8)), _text)
_define_sized(b"C", 1, bytes)
_define_sized(b"B", 4, bytes)
_define_sized(b"\x8e", 8, bytes)
_define_sized(b"\x96", 8, bytearray)
_define_line(b"I", _int_line)
_define_line(b"L", lambda line: int(line.removesuffix(b"L")))
_define_line(b"F", float)
_define_text(b"S", Machine.take_line, _quoted)
_define_text(b"V", Machine.take_line, lambda line: line.decode("raw_unicode_escape"))
_define_text(b"X", lambda machine: machine.take(machine.take_int(4)), _text)
_define_collection(b"t", tuple)
_define_collection(b"l", list)
_define_collection(b"d", _new_dict, hashes=True)
_define_collection(b"\x91", lambda values: frozenset(map(as_key, values)), hashes=True)
_define_growth(b"a", _extend, 1)
_define_growth(b"e", _extend, 0)
_define_growth(b"s", _update, 2)
_define_growth(b"u", _update, 0)
_define_growth(b"\x90", _add, 0)


# The next five are two thirds of a checkpoint's opcodes, so they do without the helpers. A
# number cut short by the end of the data is found out at the next opcode, of which there is none.


@_opcode(b"K")
def _binint1(machine: Machine) -> None:
    machine.stack.append(machine.data[machine.pos])
    machine.pos += 1


@_opcode(b"h")
def _binget(machine: Machine) -> None:
    machine.stack.append(machine.recall(machine.data[machine.pos]))
    machine.pos += 1


@_opcode(b"j")
def _long_binget(machine: Machine) -> None:
    pos = machine.pos
    machine.pos = pos + 4
    machine.stack.append(machine.recall(int.from_bytes(machine.data[pos : pos + 4], "little")))


@_opcode(b"q")
def _binput(machine: Machine) -> None:
    machine.remember(machine.data[machine.pos], machine.stack[-1])
    machine.pos += 1


@_opcode(b"r")
def _long_binput(machine: Machine) -> None:
    pos = machine.pos
    machine.pos = pos + 4
    machine.remember(int.from_bytes(machine.data[pos : pos + 4], "little"), machine.stack[-1])


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
        machine.spend(_MARK_NBYTES)


@_opcode(b"0")
def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()  # POP on a fresh mark takes the mark


@_opcode(b"1")
def _pop_mark(machine: Machine) -> None:
    machine.pop_mark()


@_opcode(b"\x85")
def _tuple1(machine: Machine) -> None:
    machine.stack[-1] = (machine.stack[-1],)


@_opcode(b"\x86")
def _tuple2(machine: Machine) -> None:
    last = machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], last)


@_opcode(b"\x87")
def _tuple3(machine: Machine) -> None:
    last, middle = machine.stack.pop(), machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], middle, last)


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
    machine.stack[-1] = Opaque(machine.stack[-1], (args, kwargs))


@_opcode(b"i")
def _inst(machine: Machine) -> None:
    callee = _global(machine)
    args = machine.pop_mark()
    machine.stack.append(Opaque(callee, tuple(args)))


@_opcode(b"o")
def _obj(machine: Machine) -> None:
    values = machine.pop_mark()
    machine.stack.append(Opaque(values[0], tuple(values[1:])))


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
    storage = storage_of(machine.stack[-1])
    machine.stack[-1] = storage
    if machine.storages.setdefault(storage.key, storage) != storage:
        raise MalformedError("it describes one storage in two ways")
