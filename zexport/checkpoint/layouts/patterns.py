r"""Name patterns out of a checkpoint, matched as Python's ``re.match`` would but in bounded time.

They come from whoever wrote the checkpoint, so they are never compiled. DeepSpeed writes names with
their special characters escaped; Megatron-DeepSpeed and others, who write them by hand, also write
digits as ``\d+`` or ``[0-9]``, anything as ``.*``, and choices as ``(weight|bias)``. All of that is
read, and what goes beyond is refused: repeated groups, counts, looks around, references.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from zexport.errors import DamagedCheckpointError, UnsupportedError

T = TypeVar("T")

MAX_LENGTH = 1024
MAX_WILD = 256
"""Patterns of one list that are more than a name written out: each is tried on every name."""
MAX_DEPTH = 16
"""Groups within groups."""

_SPECIAL = frozenset("*+?{}[]()|^$\\")


@dataclass(frozen=True, slots=True)
class _Characters:
    """Which characters may stand at one place.

    Attributes:
        ranges: the first and the last of each run of them.
        digits: whether all digits may.
        negated: whether all others may instead.
    """

    ranges: tuple[tuple[str, str], ...] = ()
    digits: bool = False
    negated: bool = False

    @property
    def literal(self) -> str | None:
        """The one character, if there is but one."""
        one = len(self.ranges) == 1 and not (self.digits or self.negated)
        first, last = self.ranges[0] if one else ("", None)
        return first if first == last else None

    def hold(self, character: str) -> bool:
        """Whether a character may stand there."""
        held = any(first <= character <= last for first, last in self.ranges)
        return (held or (self.digits and character.isdecimal())) is not self.negated


@dataclass(frozen=True, slots=True)
class _Step:
    """One place of a name, or a run of places alike.

    Attributes:
        characters: what may stand there.
        may_lack: whether it may be left out, as before ``?`` and ``*``.
        repeats: whether more of them may follow, as before ``+`` and ``*``.
    """

    characters: _Characters
    may_lack: bool = False
    repeats: bool = False

    @property
    def literal(self) -> str | None:
        """The one character that it takes, if there is but one."""
        return None if self.may_lack or self.repeats else self.characters.literal

    def ends(self, name: str, begins: Set[int]) -> Set[int]:
        """Where it ends in ``name``, having begun anywhere in ``begins``."""
        hold = self.characters.hold
        ends = {at + 1 for at in begins if at < len(name) and hold(name[at])}
        for at in range(len(name)) if self.repeats else ():
            if at in ends and hold(name[at]):
                ends.add(at + 1)
        return ends | begins if self.may_lack else ends


@dataclass(frozen=True, slots=True)
class _Choice:
    """A group: one of several sequences."""

    branches: tuple[tuple[_Step | _Choice, ...], ...]

    def ends(self, name: str, begins: Set[int]) -> set[int]:
        """Where any of them ends in ``name``, having begun anywhere in ``begins``."""
        return set().union(*(_ends(branch, name, begins) for branch in self.branches))


def _ends(steps: Iterable[_Step | _Choice], name: str, begins: Set[int]) -> Set[int]:
    for step in steps:
        begins = step.ends(name, begins)
    return begins


_ANY = _Characters((("\n", "\n"),), negated=True)
_DIGIT = _Characters(digits=True)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of the small grammar.

    Attributes:
        steps: what it takes, from the beginning of the name.
        to_end: whether the name must end where it ends.
    """

    steps: tuple[_Step | _Choice, ...]
    to_end: bool

    @property
    def literal(self) -> str | None:
        """The one name it matches, if it is a name written out."""
        letters = [step.literal if isinstance(step, _Step) else None for step in self.steps]
        known = [letter for letter in letters if letter is not None]
        return "".join(known) if self.to_end and len(known) == len(letters) else None

    def matches(self, name: str) -> bool:
        """Whether it matches the name, or its beginning; time grows with both lengths' product."""
        reached = _ends(self.steps, name, {0})
        return len(name) in reached if self.to_end else bool(reached)


def parse_pattern(text: str, path: Path) -> Pattern:
    """The pattern that ``text`` writes."""
    try:
        return _Reader(text).pattern()
    except _BeyondError as error:
        raise UnsupportedError(
            "describes its tensors with a name pattern beyond what is read",
            path=path,
            found=repr(text[:80]),
            expected=r"names with \d+, [0-9], .* and (a|b) for what varies",
        ) from error


class _BeyondError(Exception):
    """A pattern is not of the grammar."""


@dataclass(slots=True)
class _Reader:
    """Reads a pattern from its beginning; ``rest`` is what is not read yet."""

    rest: str

    def pattern(self) -> Pattern:
        """All of it."""
        if len(self.rest) > MAX_LENGTH:
            raise _BeyondError
        self.skip("^")
        steps = self.sequence(0)
        to_end = self.skip("$")
        if self.rest:
            raise _BeyondError
        return Pattern(steps, to_end)

    def skip(self, mark: str) -> bool:
        """Whether ``mark`` comes next; it is read then."""
        found = self.rest.startswith(mark)
        self.rest = self.rest.removeprefix(mark)
        return found

    def sequence(self, depth: int) -> tuple[_Step | _Choice, ...]:
        """All steps up to the end, or up to what ends a branch."""
        steps: list[_Step | _Choice] = []
        while self.rest and not self.rest.startswith(("|", ")", "$")):
            steps.append(self._choice(depth) if self.skip("(") else self._step())
        return tuple(steps)

    def _choice(self, depth: int) -> _Choice:
        self.skip("?:")
        if depth == MAX_DEPTH:
            raise _BeyondError
        branches = [self.sequence(depth + 1)]
        while self.skip("|"):
            branches.append(self.sequence(depth + 1))
        if not self.skip(")") or self.rest.startswith(("*", "+", "{")):
            raise _BeyondError
        return _Choice((*branches, ()) if self.skip("?") else tuple(branches))

    def _step(self) -> _Step:
        characters = self._set() if self.skip("[") else self._characters()
        sign = self.rest[:1] if self.rest[:1] in {"*", "+", "?"} else ""
        if self.skip(sign) and sign:
            self.skip("?")  # as few as possible: that says which match is found, not whether
        return _Step(characters, may_lack=sign in {"*", "?"}, repeats=sign in {"*", "+"})

    def _characters(self) -> _Characters:
        if self.skip("\\d"):
            return _DIGIT
        if self.skip("."):
            return _ANY
        if self.rest[0] in _SPECIAL - {"\\"}:
            raise _BeyondError
        letter = self._letter()
        return _Characters(((letter, letter),))

    def _letter(self) -> str:
        """A character that stands for itself, be it because it is escaped."""
        escaped = self.skip("\\")
        letter, self.rest = self.rest[:1], self.rest[1:]
        if not letter or (escaped and letter.isalnum()):
            raise _BeyondError
        return letter

    def _set(self) -> _Characters:
        negated, digits = self.skip("^"), False
        ranges: list[tuple[str, str]] = []
        while not self.rest.startswith("]"):
            if self.skip("\\d"):
                digits = True
            elif self.rest.startswith(("[", "&&", "||", "~~", "--")):
                raise _BeyondError  # Python keeps these for sets of sets
            else:
                first = self._letter()
                is_range = self.rest.startswith("-") and not self.rest.startswith("-]")
                ranges.append((first, self._letter() if is_range and self.skip("-") else first))
        in_order = all(first <= last for first, last in ranges)
        if not self.skip("]") or not (ranges or digits) or not in_order:
            raise _BeyondError
        return _Characters(tuple(ranges), digits, negated)


@dataclass(frozen=True, slots=True)
class PatternTable(Generic[T]):
    """Values by pattern, asked for by name."""

    path: Path
    _literals: dict[str, T] = field(default_factory=dict)
    _wild: list[tuple[Pattern, T]] = field(default_factory=list)

    @classmethod
    def read(cls, items: Iterable[tuple[str, T]], path: Path) -> PatternTable[T]:
        """The table of ``items``; ``path`` is the file they come from."""
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
        """The value whose pattern matches ``name``; ``None`` if none does."""
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
