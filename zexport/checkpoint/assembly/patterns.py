r"""Name patterns out of a checkpoint, matched as Python's ``re.match`` would but in bounded time.

They come from whoever wrote the checkpoint, so they are never compiled. What DeepSpeed and
Megatron-DeepSpeed write is a small grammar: plain characters, escaped ones, ``.`` for any character
and ``\d`` or ``\d+`` for digits, with ``^`` and ``$`` at the ends. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from zexport.errors import DamagedCheckpointError, UnsupportedError

T = TypeVar("T")

MAX_LENGTH = 1024
MAX_WILD = 256
"""Patterns of one list that are more than a name written out: each is tried on every name."""

_SPECIAL = frozenset("*+?{}[]()|^$\\")


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a pattern: which character it takes, once or (digits only) more often."""

    literal: str = ""
    is_digit: bool = False
    repeats: bool = False

    def takes(self, character: str) -> bool:
        if self.is_digit:
            return character.isdecimal()
        return not self.literal or character == self.literal


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of the small grammar.

    Attributes:
        steps: what it takes, from the beginning of the name.
        to_end: whether the name must end where it ends.
    """

    steps: tuple[_Step, ...]
    to_end: bool

    @property
    def literal(self) -> str | None:
        """The one name it matches, if it is a name written out."""
        plain = self.to_end and all(step.literal for step in self.steps)
        return "".join(step.literal for step in self.steps) if plain else None

    def matches(self, name: str) -> bool:
        """Whether it matches the name, or its beginning; time grows with both lengths' product."""
        reached = {0}
        for step in self.steps:
            taken = {at + 1 for at in reached if at < len(name) and step.takes(name[at])}
            for at in range(len(name)) if step.repeats else ():
                if at in taken and step.takes(name[at]):
                    taken.add(at + 1)
            reached = taken
        return len(name) in reached if self.to_end else bool(reached)


def parse_pattern(text: str, path: Path) -> Pattern:
    """The pattern that ``text`` writes.

    Raises:
        UnsupportedError: it is longer than ``MAX_LENGTH`` or goes beyond the grammar.
    """
    if len(text) > MAX_LENGTH:
        raise _unsupported(text, path)
    body = text.removeprefix("^")
    steps: list[_Step] = []
    at, to_end = 0, False
    while at < len(body):
        taken = body[at : at + 2] if body[at] == "\\" else body[at]
        at += len(taken)
        repeats = taken == "\\d" and body[at : at + 1] == "+"
        at += repeats
        if taken == "$" and at == len(body):
            to_end = True
        elif taken == "\\d":
            steps.append(_Step(is_digit=True, repeats=repeats))
        elif taken == ".":
            steps.append(_Step())
        elif len(taken) == 2 and not taken[1].isalnum():  # noqa: PLR2004 - an escape and its letter
            steps.append(_Step(taken[1]))
        elif taken in _SPECIAL or len(taken) != 1:
            raise _unsupported(text, path)
        else:
            steps.append(_Step(taken))
    return Pattern(tuple(steps), to_end)


@dataclass(frozen=True, slots=True)
class PatternTable(Generic[T]):
    """Values by pattern, asked for by name."""

    path: Path
    _literals: dict[str, T] = field(default_factory=dict)
    _wild: list[tuple[Pattern, T]] = field(default_factory=list)

    @classmethod
    def read(cls, items: Iterable[tuple[str, T]], path: Path) -> PatternTable[T]:
        """The table of ``items``; ``path`` is the file they come from.

        Raises:
            UnsupportedError: a pattern goes beyond the grammar, or there are too many wild ones.
        """
        table = cls(path)
        for text, value in items:
            pattern = parse_pattern(text, path)
            literal = pattern.literal
            if literal is None:
                table._wild.append((pattern, value))
            else:
                table._literals[literal] = value
        if len(table._wild) > MAX_WILD:
            raise UnsupportedError(
                "has too many name patterns that are not names written out",
                path=path,
                found=len(table._wild),
                expected=f"{MAX_WILD} or fewer in a list",
            )
        return table

    def get(self, name: str) -> T | None:
        """The value whose pattern matches ``name``; ``None`` if none does.

        Raises:
            DamagedCheckpointError: several do.
        """
        found = [value for pattern, value in self._wild if pattern.matches(name)]
        found += [self._literals[name]] if name in self._literals else []
        if len(found) > 1:
            raise DamagedCheckpointError(
                f"says in {len(found)} ways how {name!r} is split over the tensor ranks",
                path=self.path,
                found=f"{len(found)} patterns that match it",
                expected="one",
                hint="Copy the file again from where it was written",
            )
        return found[0] if found else None


def _unsupported(text: str, path: Path) -> UnsupportedError:
    return UnsupportedError(
        "describes its tensors with a name pattern beyond names, dots and digits",
        path=path,
        found=repr(text[:80]),
        expected=r"a name, its special characters escaped, with \d+ for numbers",
    )
