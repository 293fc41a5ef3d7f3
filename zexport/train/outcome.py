"""How a training run went: what the ranks tell the command that started them, and it the user."""

from __future__ import annotations

import json
import re
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

from zexport.errors import CheckpointError, OutputError, TrainingError, UsageError, ZexportError
from zexport.store.json import Natural, decoded, form_of, values_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """The result of a run.

    Attributes:
        out: the run's folder.
        tag: the last checkpoint on disk; empty if none could be saved.
        steps: the step the training ended with.
        first_loss: mean over the ranks, of the first step of this run.
        last_loss: the same of the last step.
        checkpoints: the tags on disk, oldest first.
        world_size: ranks.
        stage: ZeRO stage.
        partitioned: every rank's part was saved, so that the run can be resumed.
        save_error: why the last save failed; empty if it did not, as always where it is printed: a
            run whose last save failed ends with an error.
    """

    out: Path
    tag: str
    steps: Natural
    first_loss: float
    last_loss: float
    checkpoints: tuple[str, ...]
    world_size: Natural
    stage: Natural
    partitioned: bool = True
    save_error: str = ""

    def to_json(self) -> str:
        """One JSON object on one line, with a ``schema`` number."""
        return json.dumps(form_of(self))

    @classmethod
    def from_json(cls, text: str) -> TrainSummary:
        """The summary that :meth:`to_json` wrote."""
        return decoded(text, cls)

    def to_text(self) -> str:
        """Three lines: how the loss went, what was saved, and what to type next."""
        here = Path.cwd()
        out = self.out.relative_to(here) if self.out.is_relative_to(here) else self.out
        where = out / self.tag if self.partitioned else out / "gathered" / self.tag
        lines = [
            f"trained {self.steps} steps on {self.world_size} ranks, ZeRO stage {self.stage}:"
            f" loss {self.first_loss:.3f} -> {self.last_loss:.3f}",
            f"checkpoint: {where}",
        ]
        if self.partitioned:
            run, model = shlex.quote(str(out)), shlex.quote(f"{out}-model")
            lines.append(f"next: zexport consolidate {run} {model}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way from a rank's process to the command's.

    Attributes:
        when: seconds since the epoch; the earliest of several is the cause of the others.
    """

    when: float
    kind: str
    problem: str
    path: Path | None
    found: str | None
    expected: str | None
    hint: str

    @classmethod
    def of(cls, error: ZexportError, when: float) -> Failure:
        """The failure that ``error`` is."""
        kind = error.kind if error.kind in _TREE else TrainingError.kind
        return cls(when, kind, error.problem, error.path, error.found, error.expected, error.hint)

    def to_json(self) -> str:
        """A JSON object with the fields."""
        return json.dumps(values_of(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """The failure that :meth:`to_json` wrote."""
        return decoded(text, cls)

    def error(self) -> ZexportError:
        """The error again."""
        return _TREE[self.kind](
            self.problem,
            path=self.path,
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
