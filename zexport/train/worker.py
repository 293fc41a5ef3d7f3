"""A rank's process: its output kept in a log, its failure told, its end when orphaned."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zexport.errors import CheckpointError, OutputError, TrainingError, UsageError, ZexportError
from zexport.storage.files import write_durably
from zexport.storage.json import decoded, values_of
from zexport.storage.local import open_log
from zexport.train.options import TrainOptions, TrainSummary

MARK = "zexport train: "
"""Begins a line that rank 0 means for the user; the launcher prints to the same place."""

SUMMARY_FILE = "summary.json"

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
    """An error on its way from a rank's process to the command's; the earliest is the cause."""

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


def run_worker(options: TrainOptions, log: Path, progress: Callable[[str], None]) -> TrainSummary:
    """Trains as one rank, with all that this process prints kept in ``log``."""
    with _output_kept_in(log):
        try:
            from zexport.train.rank_run import run_rank  # noqa: PLC0415 - torch, transformers

            return run_rank(options, progress)
        except ZexportError:
            raise
        except Exception as error:  # anything that DeepSpeed or the model raise ends the run
            traceback.print_exc()
            last = traceback.format_exception_only(error)[-1].strip()
            raise TrainingError(
                f"rank {os.environ['RANK']} failed: {last}",
                hint=f"The full traceback is in {log}",
            ) from error


@contextmanager
def _output_kept_in(log: Path) -> Iterator[None]:
    """File descriptors 1 and 2 write to the log, those of C++ libraries included."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with open_log(log) as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def end_with_the_command() -> None:
    """Ends this process when the command is gone, which holds our standard input open."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """``python -m zexport.train.worker``, as ``zexport train`` starts it through torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--options-file", type=Path, required=True)
    options_file: Path = parser.parse_args().options_file
    run, rank = options_file.parent, int(os.environ["RANK"])
    end_with_the_command()
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    options = TrainOptions.from_json(options_file.read_text(encoding="utf-8"))
    try:
        summary = run_worker(
            options, log_file(run, rank), lambda line: print(MARK + line, file=terminal)
        )
    except ZexportError as error:
        write_durably(failure_file(run, rank), Failure.of(error, time.time()).to_json().encode())
        # The other ranks may be waiting for this one: no clean-up that would wait for them.
        os._exit(error.exit_code)
    if rank == 0:
        write_durably(run / SUMMARY_FILE, summary.to_json().encode())
    # The work is done and on disk; threads of torch and DeepSpeed have aborted a tidy exit.
    os._exit(0)


if __name__ == "__main__":
    main()
