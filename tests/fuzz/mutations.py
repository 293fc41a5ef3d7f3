"""Random changes to bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
_WIDTHS = (1, 2, 4, 8)
_LONGEST = 64


def mutated(random: Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the seeds with one to eight changes."""
    data = bytearray(random.choice(seeds))
    for _ in range(random.choice((1, 1, 1, 2, 2, 4, 8))):
        random.choice(_CHANGES)(random, data, seeds)
    return bytes(data)


def _place(random: Random, data: bytearray) -> int:
    return random.randrange(len(data)) if data else 0


def _flip(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[_place(random, data)] ^= 1 << random.randrange(8)


def _set(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[_place(random, data)] = random.randrange(256)


def _number(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    width, place = random.choice(_WIDTHS), _place(random, data)
    value = random.choice(_NUMBERS) % 256**width
    data[place : place + width] = value.to_bytes(width, random.choice(("little", "big")))


def _insert(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    place = _place(random, data)
    data[place:place] = random.randbytes(random.randrange(1, 9))


def _cut(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    place = _place(random, data)
    del data[place : place + random.randrange(1, _LONGEST)]


def _end(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[_place(random, data) :]


def _repeat(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    place = _place(random, data)
    part = data[place : place + random.randrange(1, _LONGEST)]
    data[place:place] = part * random.choice((1, 2, 100))


def _splice(random: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = random.choice(seeds)
    begin = random.randrange(len(other) + 1)
    part = other[begin : begin + random.randrange(1, 8 * _LONGEST)]
    place = _place(random, data)
    data[place : place + random.choice((0, len(part)))] = part


_Change = Callable[[Random, bytearray, Sequence[bytes]], None]
_CHANGES: tuple[_Change, ...] = (
    *(_flip, _set, _set, _number, _insert, _cut, _end, _repeat, _splice, _splice),
)
