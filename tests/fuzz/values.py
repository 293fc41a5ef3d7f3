"""Replace values inside a pickle; the rest stays readable."""

from __future__ import annotations

import pickle
import pickletools
from bisect import bisect_left
from io import BytesIO
from random import Random
from typing import NamedTuple

_NOT_VALUES = ("PROTO", "FRAME", "STOP")
_COMPLETING = ("SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS", "BUILD")
_SELF = b""
"""A list that contains itself twice."""


class Foreign:
    """An unknown class."""


class Op(NamedTuple):
    """An opcode with its argument, and the number of the value it stores or gets."""

    raw: bytes
    name: str
    argument: object
    put: int | None = None
    get: int | None = None


class Parsed(NamedTuple):
    """A pickle, and the opcodes (first, last) of values without references from outside."""

    ops: list[Op]
    values: list[tuple[int, int]]


def parsed(data: bytes) -> Parsed:
    ops: list[Op] = []
    stack: list[tuple[int, int]] = []  # where a value begins, and its number (a mark: none)
    made: dict[int, tuple[int, int]] = {}
    last_use: dict[int, int] = {}
    found = list(pickletools.genops(data))
    stops = [place or 0 for _, _, place in found[1:]] + [len(data)]
    count = 0
    for (op, argument, start), stop in zip(found, stops, strict=True):
        put = get = None
        number = len(ops)
        if op.name == "MEMOIZE" or "PUT" in op.name:
            put, count = (count if op.name == "MEMOIZE" else int(argument)), count + 1
            made[stack[-1][1]] = (stack[-1][0], number)
        elif op.name not in _NOT_VALUES:
            if op.name.endswith("GET"):
                get = int(argument)
                last_use[get] = number
            before = [one.name for one in op.stack_before]
            taken_count = len(before)
            if "mark" in before:
                mark = max(at for at, (_, value) in enumerate(stack) if value < 0)
                taken_count = len(stack) - mark + before.index("mark")
            taken = stack[len(stack) - taken_count :]
            del stack[len(stack) - taken_count :]
            if op.name in _COMPLETING:
                made.pop(taken[0][1], None)
            first = taken[0][0] if taken else number
            stack += [(first, -1 if op.name == "MARK" else number)] * len(op.stack_after)
            if op.stack_after and op.name != "MARK":
                made[number] = (first, number)
        raw = b"" if op.name == "FRAME" else data[start:stop]
        ops.append(Op(raw, op.name, argument, put, get))
    lasting = [number for number, op in enumerate(ops) if op.put in last_use]
    return Parsed(
        ops,
        [
            (first, last)
            for first, last in made.values()
            if all(
                last_use[ops[at].put or 0] <= last
                for at in lasting[bisect_left(lasting, first) : bisect_left(lasting, last + 1)]
            )
        ],
    )


def exchanged(draw: Random, pickle: Parsed) -> bytes:
    """Return a pickle with one to three values replaced."""
    chosen: dict[int, int] = {}
    for _ in range(draw.choice((1, 1, 2, 3))):
        first, last = draw.choice(pickle.values)
        if all(last < a or b < first for a, b in chosen.items()):
            chosen[first] = last
    out, new, at = bytearray(), dict[int, int](), 0
    while at < len(pickle.ops):
        op = pickle.ops[at]
        if at in chosen:
            is_plain = "INT" in op.name or "UNICODE" in op.name
            other = _other(draw, op.argument if is_plain and chosen[at] <= at + 1 else None)
            if other is _SELF:
                number = len(new).to_bytes(4, "little")
                new[-1 - at] = len(new)
                other = b"]r%b(j%bj%be" % (number, number, number)
            out += other
            at = chosen[at]
        elif op.put is not None:
            out += b"r" + len(new).to_bytes(4, "little")
            new[op.put] = len(new)
        elif op.get is not None:
            out += b"j" + new[op.get].to_bytes(4, "little")
        else:
            out += op.raw
        at += 1
    return bytes(out)


def _other(draw: Random, value: object) -> bytes:
    """Return another value: similar, or of any kind."""
    if isinstance(value, int) and draw.random() < 0.6:
        return written(draw.choice((0, 1, value + 1, value - 1, 2 * value, -value, value + 2**62)))
    if isinstance(value, str) and draw.random() < 0.6:
        return written(draw.choice((f"{value}x", value[1:], "0", "1", "7", f"../{value}")))
    return draw.choice(_JUNK)


def written(value: object) -> bytes:
    """Return the pickle of a value without memo."""
    stream = BytesIO()
    pickler = pickle.Pickler(stream, 2)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()[2:-1]


def _tensor(kind: str, key: str, numel: int, shape: tuple[int, ...], stride: object) -> bytes:
    storage = b"(" + written("storage") + b"ctorch\n%bStorage\n" % kind.encode()
    storage += written(key) + written("cpu") + written(numel) + b"tQ"
    place = written(0) + written(shape) + written(stride) + written(False)
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + place
        + b"ccollections\nOrderedDict\n)RtR"
    )


_JUNK = [
    *map(
        written,
        [
            *(None, True, -1, 0, 1, 3, 2**62, -(2**70), 10**300, 10**2400, 1.5, float("nan")),
            *("", "x", "../x", "\x1b[2J\n", "\ud800", "²", "n" * 100_000, b"x"),
            *((), (1,), [], {}, set(), [[]], [0], [-1], ["64"], [2**62, 2**62], [1] * 100),
            *({"x": [2]}, {1: 2}, {10**2400: 1}, {"\ud800": 1}, {None: {(1, 2): 3}}),
            *(Foreign(), Foreign),
        ],
    ),
    _SELF,
    _tensor("Float", "0", 3, (3,), (1,)),
    _tensor("Float", "none", 0, (0,), (1,)),
    _tensor("Float", "0", 1, (10**12,), (0,)),
    _tensor("BFloat16", "1", 4, (2, 2), (1, 2)),
    _tensor("Char", "2", 4, (4,), (1,)),
    _tensor("ComplexFloat", "1", 2, (), ()),
    _tensor("Float", "1", 2**40, (2**20, 2**20), (2**20, 1)),
]
