"""The files and lines by which the ranks tell the command that started them how it went."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from zexport.errors import CheckpointError, OutputError, TrainingError, UsageError, ZexportError

MARK = "zexport train: "
"""Begins a line that rank 0 means for the user; the launcher prints to the same place."""

SUMMARY_FILE = "summary.json"
LAUNCHER_LOG = "launcher.log"

_TREE: dict[str, type[ZexportError]] = {
    error.kind: error for error in (UsageError, CheckpointError, OutputError, TrainingError)
}


def log_file(run: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return run / f"rank{rank}.log"


def failure_file(run: Path, rank: int) -> Path:
    """Where a rank says why it failed."""
    return run / f"failure{rank}.json"


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way from a rank's process to the command's.

    Attributes:
        when: seconds since the epoch; the earliest of several is the cause of the others.
    """

    when: float
    kind: str
    problem: str
    path: str | None
    found: str | None
    expected: str | None
    hint: str

    @classmethod
    def of(cls, error: ZexportError, when: float) -> Failure:
        """The failure that ``error`` is."""
        kind = error.kind if error.kind in _TREE else TrainingError.kind
        path = None if error.path is None else str(error.path)
        return cls(when, kind, error.problem, path, error.found, error.expected, error.hint)

    def to_json(self) -> str:
        """A JSON object with the fields."""
        from zexport.store.json import values_of  # noqa: PLC0415 - --help does without

        return json.dumps(values_of(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """The failure that :meth:`to_json` wrote."""
        from zexport.store.json import decoded  # noqa: PLC0415 - --help does without

        return decoded(text, cls)

    def error(self) -> ZexportError:
        """The error again."""
        return _TREE[self.kind](
            self.problem,
            path=None if self.path is None else Path(self.path),
            found=self.found,
            expected=self.expected,
            hint=self.hint,
        )


def failure_of(run: Path, status: int) -> ZexportError:
    """Why the ranks of a run ended, as far as they could say it.

    A rank that a signal ended has not said anything, and what the others say is that it was gone:
    so the launcher's table of dead ranks is asked first, for signals other than its own SIGTERM.
    """
    log = run / LAUNCHER_LOG
    table = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    for rank, number in re.findall(r"rank\s*:\s*(\d+).*\n\s*exitcode\s*:\s*-(\d+)", table):
        if int(number) != signal.SIGTERM:
            return TrainingError(
                f"rank {rank} was ended by {signal.Signals(int(number)).name}",
                hint=f"Output of the ranks: {run}",
            )
    failures = [Failure.from_json(path.read_text()) for path in run.glob("failure*.json")]
    if failures:
        return min(failures, key=lambda failure: failure.when).error()
    return TrainingError(
        "the ranks ended without a word",
        found=f"exit status {status} of torch.distributed.run",
        hint=f"Output of the ranks and of the launcher: {run}",
    )
