"""Start, watch and end the ranks of a run; the process of one rank, up to torch.

The command starts torchrun, which starts ``python -m zexport.train.launch`` per rank. Under
torchrun or the deepspeed launcher, the command itself is a rank.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.errors import (
    CheckpointError,
    MissingExtraError,
    OutputError,
    TrainingError,
    UsageError,
    ZexportError,
)
from zexport.optional_deps import HUB_WANTED, lack_for_names, to_install
from zexport.storage.files import write_durably
from zexport.storage.json import decoded, values_of
from zexport.storage.local import open_log, remove_if_possible
from zexport.train.options import TrainOptions, TrainSummary, check_free, merge_ds_config

_MARK = "zexport train: "
"""Prefix of rank 0's lines for the user; the launcher prints to the same stream."""

_LAUNCHER_LOG, _SUMMARY_FILE = "launcher.log", "summary.json"
_GRACE_S = 10
"""Seconds that ranks get to end before they are killed."""


# The command


def train(
    options: TrainOptions, explicit: Collection[str] = (), *, progress: Callable[[str], None]
) -> TrainSummary | None:
    """Train and return the result; ``None`` on every rank but the first under a launcher.

    No process is left running. ``explicit`` options may not contradict ``--ds-config``.
    """
    options = merge_ds_config(options, explicit)
    _check(options)
    with _run_folder() as run:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            summary = _run_here(options, explicit, run, progress)
        else:
            summary = _run_launched(options, run, progress)
    if summary.save_error:
        raise OutputError(
            f"the last checkpoint could not be saved: {summary.save_error}",
            path=options.out,
            hint=f"The last good one is {summary.tag}" if summary.tag else "There is no other",
        )
    return summary if os.environ.get("RANK", "0") == "0" else None


def _check(options: TrainOptions) -> None:
    """Raise for errors that can be found without torch."""
    needed = ["deepspeed", "peft"] if options.lora else ["deepspeed"]
    lacking = [package for package in needed if find_spec(package) is None]
    if lacking or lack_for_names():
        raise MissingExtraError(
            f"zexport train needs {' and '.join(lacking) or HUB_WANTED}",
            found=None if lacking else lack_for_names(),
            hint=to_install("deepspeed"),
        )
    for pattern in options.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"--freeze {pattern}: invalid regular expression: {error}") from error
    if options.hidden_size % 8:
        raise UsageError(
            "--hidden-size does not divide into attention heads",
            found=options.hidden_size,
            expected="a multiple of 8",
        )


@contextmanager
def _run_folder() -> Iterator[Path]:
    """A temporary folder for logs, kept if a rank fails."""
    run = Path(tempfile.mkdtemp(prefix="zexport-train-"))
    kept = False
    try:
        yield run
    except TrainingError:
        kept = True
        raise
    finally:
        if not kept:
            remove_if_possible(run)


def _run_here(
    options: TrainOptions, explicit: Collection[str], run: Path, progress: Callable[[str], None]
) -> TrainSummary:
    """Train as a rank of another launcher."""
    started = int(os.environ["WORLD_SIZE"])
    if options.world_size != started and ("world_size" in explicit or options.resume):
        raise UsageError(
            "the launcher started another number of ranks than the run has",
            found=started,
            expected=options.world_size,
        )
    # A handler in Python does not run while this rank waits in a collective call for a dead one.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    options = replace(options, world_size=started)
    return _run_rank(options, run / f"rank{os.environ['RANK']}.log", progress)


def _run_launched(
    options: TrainOptions, run: Path, progress: Callable[[str], None]
) -> TrainSummary:
    """Train with ranks that this command starts."""
    if not options.resume:
        check_free(options.out)
    options_file = run / "options.json"
    write_durably(options_file, options.to_json().encode())
    with _started(options_file, options.world_size) as launcher:
        _relay(launcher, run, options.timeout, progress)
        status = launcher.wait()
    if status != 0:
        raise _failure_of(run, status)
    return decoded((run / _SUMMARY_FILE).read_text(encoding="utf-8"), TrainSummary)


@contextmanager
def _started(options_file: Path, world_size: int) -> Iterator[subprocess.Popen[str]]:
    """Torchrun with its ranks, all of which have ended when the context ends.

    torchrun shields the ranks from signals, so they inherit our pipe as standard input, and end
    themselves when it closes.
    """
    arguments = ("--standalone", "--nproc-per-node", str(world_size), "-m", "zexport.train.launch")
    launcher = subprocess.Popen(  # noqa: S603 - our own module, in a list
        [sys.executable, "-m", "torch.distributed.run", *arguments, str(options_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        yield launcher
    finally:
        if launcher.stdin is not None:
            launcher.stdin.close()
        if launcher.poll() is None:
            launcher.terminate()
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(_GRACE_S)
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()


def _relay(
    launcher: subprocess.Popen[str], run: Path, timeout_s: int, progress: Callable[[str], None]
) -> None:
    """Pass on rank 0's lines until every rank has ended; write other lines to a log."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        launcher.kill()
        if launcher.stdin is not None:
            launcher.stdin.close()

    timer = threading.Timer(timeout_s, give_up)
    timer.start()
    try:
        with open_log(run / _LAUNCHER_LOG) as log:
            for line in launcher.stderr or ():
                if line.startswith(_MARK):
                    timer.cancel()
                    progress(line.removeprefix(_MARK).rstrip())
                else:
                    log.write(line)
    finally:
        timer.cancel()
    if late.is_set():
        raise TrainingError(
            f"the first step was not done after {timeout_s} seconds",
            hint=f"Raise --timeout; output of the ranks: {run}",
        )


def _failure_of(run: Path, status: int) -> ZexportError:
    """Return why the ranks ended.

    A rank killed by a signal leaves no failure file, and the others only miss it: so torchrun's
    table of dead ranks comes first.
    """
    log = run / _LAUNCHER_LOG
    table = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    for rank, number in re.findall(r"rank\s*:\s*(\d+).*\n\s*exitcode\s*:\s*-(\d+)", table):
        if int(number) != signal.SIGTERM:
            return TrainingError(
                f"rank {rank} was ended by {signal.Signals(int(number)).name}",
                hint=f"Output of the ranks: {run}",
            )
    failures = [decoded(path.read_text(), _Failure) for path in run.glob("failure*.json")]
    if failures:
        return min(failures, key=lambda failure: failure.when).error()
    return TrainingError(
        "the ranks ended without an error message",
        found=f"exit status {status} of torch.distributed.run",
        hint=f"Output of the ranks and of the launcher: {run}",
    )


# The process of a rank


class _Failure(Struct, frozen=True):
    """An error of a rank's process, for the command; the earliest is the cause."""

    when: float
    kind: str
    problem: str
    path: Path | None
    found: str | None
    expected: str | None
    hint: str

    def error(self) -> ZexportError:
        kinds = {one.kind: one for one in (UsageError, CheckpointError, OutputError)}
        return kinds.get(self.kind, TrainingError)(
            self.problem,
            path=self.path,
            found=self.found,
            expected=self.expected,
            hint=self.hint,
        )


def _run_rank(options: TrainOptions, log: Path, progress: Callable[[str], None]) -> TrainSummary:
    """Train as one rank, with the output of this process in ``log``."""
    with _output_to(log):
        try:
            from zexport.train.worker import run_rank  # noqa: PLC0415 - torch, transformers

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
def _output_to(log: Path) -> Iterator[None]:
    """Redirect file descriptors 1 and 2, which C++ libraries use as well."""
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


def end_with_parent() -> None:
    """End this process when standard input closes, which the command holds open."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run one rank, as torchrun starts it."""
    options_file = Path(sys.argv[1])
    run, rank = options_file.parent, os.environ["RANK"]
    end_with_parent()
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    options = TrainOptions.from_json(options_file.read_text(encoding="utf-8"))
    try:
        summary = _run_rank(
            options, run / f"rank{rank}.log", lambda line: print(_MARK + line, file=terminal)
        )
    except ZexportError as error:
        facts = (error.problem, error.path, error.found, error.expected, error.hint)
        failure = json.dumps(values_of(_Failure(time.time(), error.kind, *facts)))
        write_durably(run / f"failure{rank}.json", failure.encode())
        # The other ranks may be waiting for this one: no clean-up that would wait for them.
        os._exit(error.exit_code)
    if rank == "0":
        write_durably(run / _SUMMARY_FILE, summary.to_json().encode())
    # The work is done and on disk; threads of torch and DeepSpeed have aborted a tidy exit.
    os._exit(0)


if __name__ == "__main__":
    main()
