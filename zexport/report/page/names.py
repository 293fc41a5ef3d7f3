"""Many names that differ in their numbers alone, said once: ``layers.0.up`` to ``layers.31.up``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from zexport.printable import shown

_NUMBERS = re.compile(r"\d+")
HOLE = "\x01"
"""Where a number stood; no shown text has it."""


def pattern_of(name: str) -> tuple[str, tuple[str, ...]]:
    """A name without its numbers, and the numbers."""
    text = shown(name)
    return _NUMBERS.sub(HOLE, text), tuple(_NUMBERS.findall(text))


def grouped(names: Iterable[str]) -> Mapping[str, list[int]]:
    """The places of names by their pattern, in the order of their first."""
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(pattern_of(name)[0], []).append(place)
    return groups


def group_name(names: Sequence[str]) -> str:
    """One name for many of a pattern: ``layers.{0-31}.up``."""
    if len(names) == 1:
        return shown(names[0])
    found = [pattern_of(name) for name in names]
    parts = found[0][0].split(HOLE)
    columns = zip(*(numbers for _, numbers in found), strict=True)
    told = (_range(column) + part for column, part in zip(columns, parts[1:], strict=True))
    return parts[0] + "".join(told)


def _range(numbers: Sequence[str]) -> str:
    different = sorted(set(numbers), key=lambda one: (len(one), one))
    return different[0] if len(different) == 1 else f"{{{different[0]}-{different[-1]}}}"


def modules(name: str) -> tuple[str, ...]:
    """The modules that a tensor is in, from the outermost, and its own last name."""
    return tuple(shown(name).split("."))
