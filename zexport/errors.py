"""The error tree: what can go wrong, whose fault it is, and the exit code it ends with.

Every error a user can cause is one of these; anything else that escapes is a bug in zexport.
The facts are attributes, so that a program can act on them; the sentence is made from the facts.
Names and values out of a checkpoint come into messages here and nowhere else, so here they are made
harmless to terminals and logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from zexport.findings import FindingKind
from zexport.text import shown

_LINE_MAX = 160
"""Two lines of a terminal, for what a message says beside its path."""


class ZexportError(Exception):
    """Root of the tree.

    Attributes:
        path: the file or folder at fault, where there is one.
        problem: what is wrong, without a full stop.
        found, expected: the two sides of the contradiction, where there is one.
        hint: the next step, as an imperative sentence without a full stop. These four are
            printable: characters that a terminal would obey are written as escapes.
        finding: the kind by which a user may allow it all the same; ``None`` where nobody may.
        problems: the errors that this one stands for, where it stands for several.
        exit_code: what a command ends with.
        kind: a stable word for programs (the ``kind`` of the JSON error object).
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
            way_on = f"go on all the same with --allow {finding.value}"
            hint = f"{hint}, or {way_on}" if hint else way_on.capitalize()
        self.hint = shown(hint)
        super().__init__(self.sentence())

    def __str__(self) -> str:  # also of one that came out of another process
        return self.sentence()

    def sentence(self, within: ZexportError | None = None) -> str:
        """The message, such as ``path: what is wrong (found X, expected Y). What to do.``.

        ``within`` is the error of several that tells of this one; what it says is left out.
        """
        where, step = self._around(within)
        return f"{where}{self.statement()}.{step and ' '}{step}"

    def statement(self) -> str:
        """What is wrong, with both sides of the contradiction, and neither path nor full stop."""
        if self.problems:
            told = "; ".join(one.sentence(self).rstrip(".") for one in self.problems)
            return f"{self.problem}: {shown(told)}"
        facts = ", ".join(f"{word} {value}" for word, value in self._facts())
        return f"{self.problem} ({facts})" if facts else self.problem

    def lines(self, within: ZexportError | None = None) -> list[str]:
        """The sentence for a terminal: where it is long, each fact and each problem on a line."""
        where, step = self._around(within)
        if not self.problems and len(f"{self.statement()} {step}") <= _LINE_MAX:
            return [self.sentence(within)]
        told = [f"{word}: {value}" for word, value in self._facts()]
        for number, one in enumerate(self.problems, start=1):
            first, *more = one.lines(self)
            told += [f"{number}. {first}", *(f" {line}" for line in more)]
        head = f"{where}{self.problem}{':' if self.problems else '.'}"
        return [head, *(f"  {line}" for line in (*told, step) if line)]

    def _facts(self) -> list[tuple[str, str]]:
        found = None if self.problems else self.found  # what was found is told one by one
        facts = (("found", found), ("expected", self.expected))
        return [(word, value) for word, value in facts if value is not None]

    def _around(self, within: ZexportError | None) -> tuple[str, str]:
        """What stands before and behind a message: where it is, and the next step."""
        is_told = within is not None and within.path == self.path
        where = "" if self.path is None or is_told else f"{shown(self.path)}: "
        step = "" if within is not None and within.hint == self.hint else self.hint
        return where, step if step.endswith("?") or not step else f"{step}."


class UsageError(ZexportError):
    """The command was asked for something it cannot mean."""

    exit_code = 2
    kind = "usage"


class AmbiguousTagError(UsageError):
    """Several checkpoints lie side by side and nothing says which one is meant."""

    kind = "ambiguous_tag"


class OtherTagError(UsageError):
    """A tag folder was given, and the name of another tag."""


class MissingExtraError(UsageError):
    """An optional package that this command needs is not installed."""

    kind = "missing_extra"


class MemoryLimitError(UsageError):
    """``--max-memory`` is below what the work needs."""

    kind = "memory_limit"


class CheckpointError(ZexportError):
    """The checkpoint is missing, incomplete or damaged."""

    exit_code = 3
    kind = "checkpoint"


class NoSuchTagError(CheckpointError):
    """The tag that was asked for is not there."""


class NotACheckpointError(CheckpointError):
    """Nothing at this path is a ZeRO checkpoint."""

    kind = "not_a_checkpoint"


class IncompleteCheckpointError(CheckpointError):
    """Files of some ranks are not there."""

    kind = "incomplete"


class DamagedCheckpointError(CheckpointError):
    """A file's bytes contradict themselves, each other, or the format."""

    kind = "damaged"


class FrozenLeftOutError(CheckpointError):
    """Frozen weights were left out when the checkpoint was saved."""

    kind = "frozen_left_out"


class UnsupportedError(ZexportError):
    """Nothing is wrong with the checkpoint, but zexport cannot export it exactly."""

    exit_code = 4
    kind = "unsupported"


class NamesMismatchError(UnsupportedError):
    """The weights are named neither as the model has them in memory nor as on the hub."""

    kind = "names_mismatch"


class UnsafeError(ZexportError):
    """The input tries to lead outside its folder, or hides a value behind code."""

    exit_code = 5
    kind = "unsafe"


class OutputError(ZexportError):
    """The output cannot be written: it exists, there is no space, or no permission."""

    exit_code = 6
    kind = "output"


class VerificationError(ZexportError):
    """What was written, or what is being checked, is not what it should be."""

    exit_code = 7
    kind = "verification"


class TrainingError(ZexportError):
    """A training worker failed."""

    exit_code = 8
    kind = "training"


def raise_all(problems: Sequence[ZexportError], path: Path | None) -> None:
    """Raise the one problem there is, or all of them as one error of the gravest kind.

    A path or a next step that all have in common is told once.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        gravest = max(problems, key=lambda problem: problem.exit_code)
        paths, hints = {one.path for one in problems}, {one.hint for one in problems}
        raise type(gravest)(
            f"has {len(problems)} problems",
            path=paths.pop() if len(paths) == 1 else path,
            hint=hints.pop() if len(hints) == 1 else "Mend them and run again",
            found="; ".join(problem.sentence().rstrip(".") for problem in problems),
            problems=problems,
        )


class LayoutError(Exception):
    """The numbers in a checkpoint contradict its layout; the one error that pure arithmetic raises.

    Attributes:
        problem: what does not fit, without a full stop.
        found, expected: the two numbers (or lists of numbers) that differ.
        hint: what to do, where the numbers tell what happened.
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
    """Raise a ``LayoutError`` as damage of a checkpoint's folder."""
    try:
        yield
    except LayoutError as error:
        hint = error.hint or "Copy all files of one checkpoint again"
        raise DamagedCheckpointError(
            error.problem, path=folder, found=error.found, expected=error.expected, hint=hint
        ) from error
