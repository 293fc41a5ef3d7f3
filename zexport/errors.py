"""Exceptions that users can cause, with exit codes. Anything else that escapes is a bug.

Names and values from a checkpoint enter messages only here, so here they are escaped for terminals
and logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from zexport.findings import FindingKind
from zexport.text import shown

_LINE_MAX = 160
"""Two terminal lines: a longer message gets one line per fact."""


class ZexportError(Exception):
    """Base of all errors.

    Attributes:
        path: the file or folder at fault, if any.
        problem: what is wrong, without a full stop.
        found, expected: both sides of a mismatch, if any.
        hint: the next step, as an imperative sentence without a full stop.
        finding: the kind that ``--allow`` accepts; ``None`` if it cannot be accepted.
        problems: the errors that this one combines, if any.
        exit_code: exit code of the command.
        kind: stable word for programs (``kind`` of the JSON error object).

    ``problem``, ``found``, ``expected`` and ``hint`` are printable: control characters are escaped.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "internal"

    def __init__(
        self,
        problem: str,
        *,
        path: Path | None = None,
        found: object = None,
        expected: object = None,
        hint: str = "",
        finding: FindingKind | None = None,
        problems: Sequence[ZexportError] = (),
    ) -> None:
        self.problem = shown(problem)
        self.path = path
        self.problems = tuple(problems)
        self.found = None if found is None else shown(found)
        self.expected = None if expected is None else shown(expected)
        self.finding = finding
        if finding is not None:
            accept = f"accept it with --allow {finding}"
            hint = f"{hint}, or {accept}" if hint else accept.capitalize()
        self.hint = shown(hint)
        super().__init__(self.sentence())

    def __str__(self) -> str:  # also of an error from another process
        return self.sentence()

    def sentence(self, within: ZexportError | None = None) -> str:
        """Return the message, such as ``path: problem (found X, expected Y). Hint.``.

        ``within`` is the error that combines this one; a path or hint that it has is left out.
        """
        where, step = self._around(within)
        return f"{where}{self.statement()}.{step and ' '}{step}"

    def statement(self) -> str:
        """Return the message without path, hint and full stop."""
        if self.problems:
            combined = "; ".join(one.sentence(self).rstrip(".") for one in self.problems)
            return f"{self.problem}: {shown(combined)}"
        facts = ", ".join(f"{word} {value}" for word, value in self._facts())
        return f"{self.problem} ({facts})" if facts else self.problem

    def lines(self, within: ZexportError | None = None) -> list[str]:
        """Return the message for a terminal; a long one has a line for each fact and problem."""
        where, step = self._around(within)
        if not self.problems and len(f"{self.statement()} {step}") <= _LINE_MAX:
            return [self.sentence(within)]
        below = [f"{word}: {value}" for word, value in self._facts()]
        for number, one in enumerate(self.problems, start=1):
            first, *more = one.lines(self)
            below += [f"{number}. {first}", *(f" {line}" for line in more)]
        head = f"{where}{self.problem}{':' if self.problems else '.'}"
        return [head, *(f"  {line}" for line in (*below, step) if line)]

    def _facts(self) -> list[tuple[str, str]]:
        found = None if self.problems else self.found  # the problems repeat it
        facts = (("found", found), ("expected", self.expected))
        return [(word, value) for word, value in facts if value is not None]

    def _around(self, within: ZexportError | None) -> tuple[str, str]:
        """Return the path before a message, and the hint after it."""
        is_known = within is not None and within.path == self.path
        where = "" if self.path is None or is_known else f"{shown(self.path)}: "
        step = "" if within is not None and within.hint == self.hint else self.hint
        return where, step if step.endswith("?") or not step else f"{step}."


class UsageError(ZexportError):
    """The command or its options make no sense."""

    exit_code = 2
    kind = "usage"


class AmbiguousTagError(UsageError):
    """The folder has several checkpoints, and none was chosen."""

    kind = "ambiguous_tag"


class OtherTagError(UsageError):
    """The path is a tag folder, and ``--tag`` is the name of another tag."""


class MissingExtraError(UsageError):
    """An optional package that the command needs is not installed."""

    kind = "missing_extra"


class MemoryLimitError(UsageError):
    """``--max-memory`` is too small."""

    kind = "memory_limit"


class CheckpointError(ZexportError):
    """The checkpoint is missing, incomplete or damaged."""

    exit_code = 3
    kind = "checkpoint"


class NoSuchTagError(CheckpointError):
    """The chosen tag does not exist."""


class NotACheckpointError(CheckpointError):
    """The path contains no checkpoint."""

    kind = "not_a_checkpoint"


class IncompleteCheckpointError(CheckpointError):
    """Files of some ranks are missing."""

    kind = "incomplete"


class DamagedCheckpointError(CheckpointError):
    """A file contradicts itself, another file, or its format."""

    kind = "damaged"


class FrozenLeftOutError(CheckpointError):
    """Frozen weights were excluded when the checkpoint was saved."""

    kind = "frozen_left_out"


class UnsupportedError(ZexportError):
    """The checkpoint is intact, but zexport cannot export it exactly."""

    exit_code = 4
    kind = "unsupported"


class NamesMismatchError(UnsupportedError):
    """The weights have neither the model's in-memory names nor its Hub names."""

    kind = "names_mismatch"


class UnsafeError(ZexportError):
    """The input leads out of its folder, or needs code to be run."""

    exit_code = 5
    kind = "unsafe"


class OutputError(ZexportError):
    """The output cannot be written: it exists, the disk is full, or permission is denied."""

    exit_code = 6
    kind = "output"


class VerificationError(ZexportError):
    """The output differs from its manifest or its checkpoint."""

    exit_code = 7
    kind = "verification"


class TrainingError(ZexportError):
    """A training worker failed."""

    exit_code = 8
    kind = "training"


def raise_all(problems: Sequence[ZexportError], path: Path | None) -> None:
    """Raise all problems as one error of the gravest kind; a single one as it is."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        gravest = max(problems, key=lambda problem: problem.exit_code)
        paths, hints = {one.path for one in problems}, {one.hint for one in problems}
        raise type(gravest)(
            f"{len(problems)} problems",
            path=paths.pop() if len(paths) == 1 else path,
            hint=hints.pop() if len(hints) == 1 else "Fix them and run again",
            found="; ".join(problem.sentence().rstrip(".") for problem in problems),
            problems=problems,
        )


class LayoutError(Exception):
    """Numbers in a checkpoint contradict each other; raised by code that knows no path.

    Attributes: as those of ``ZexportError``.
    """

    def __init__(
        self, problem: str, found: object, expected: object, hint: str | None = None
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.found = found
        self.expected = expected
        self.hint = hint


@contextmanager
def layout_of(folder: Path) -> Iterator[None]:
    """Raise a ``LayoutError`` as ``DamagedCheckpointError`` of a checkpoint folder."""
    try:
        yield
    except LayoutError as error:
        hint = error.hint or "Copy all files of one checkpoint again"
        raise DamagedCheckpointError(
            error.problem, path=folder, found=error.found, expected=error.expected, hint=hint
        ) from error
