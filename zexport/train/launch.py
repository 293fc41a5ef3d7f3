"""How the ranks of a run are started, watched and ended by the command that asked for them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from zexport.errors import MissingExtraError, OutputError, TrainingError, UsageError, ZexportError
from zexport.optional_deps import HUB_WANTED, lack_for_names, to_install
from zexport.storage.files import write_durably
from zexport.storage.local import open_log, remove_if_possible
from zexport.train.options import TrainOptions, TrainSummary, check_free, settled
from zexport.train.worker import MARK, SUMMARY_FILE, Failure, log_file, run_worker

LAUNCHER_LOG = "launcher.log"
_GRACE_S = 10
"""Seconds that ranks get to end by themselves before they are killed."""


def train(
    options: TrainOptions, explicit: Collection[str] = (), *, progress: Callable[[str], None]
) -> TrainSummary | None:
    """Trains and returns what came of it; None on every rank but the first under a launcher.

    Nothing that was started is left running; a DeepSpeed configuration must not contradict what is
    ``explicit``.
    """
    options = settled(options, explicit)
    _check(options)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        summary = _run_here(options, explicit, progress)
    else:
        summary = _run_launched(options, progress)
    if summary.save_error:
        raise OutputError(
            f"the last checkpoint could not be saved: {summary.save_error}",
            path=options.out,
            hint=f"The last good one is {summary.tag}" if summary.tag else "There is no other",
        )
    return summary if os.environ.get("RANK", "0") == "0" else None


def _check(options: TrainOptions) -> None:
    """What can be known without torch."""
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
            raise UsageError(f"--freeze {pattern} is no regular expression: {error}") from error
    if options.hidden_size % 8:
        raise UsageError(
            "--hidden-size does not divide into attention heads",
            found=options.hidden_size,
            expected="a multiple of 8",
        )


def _run_here(
    options: TrainOptions, explicit: Collection[str], progress: Callable[[str], None]
) -> TrainSummary:
    """This process is a rank of somebody else's launcher."""
    started = int(os.environ["WORLD_SIZE"])
    if options.world_size != started and ("world_size" in explicit or options.resume):
        raise UsageError(
            "the launcher started another number of ranks than the run has",
            found=started,
            expected=options.world_size,
        )
    # A handler in Python does not run while this rank waits in a collective call for one that died.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with _run_folder() as run:
        log = log_file(run, int(os.environ["RANK"]))
        return run_worker(replace(options, world_size=started), log, progress)


def _run_launched(options: TrainOptions, progress: Callable[[str], None]) -> TrainSummary:
    """The ranks are processes of this command."""
    if not options.resume:
        check_free(options.out)
    with _run_folder() as run:
        options_file = run / "options.json"
        write_durably(options_file, options.to_json().encode())
        with _started(options_file, options.world_size) as launcher:
            _relay(launcher, run, options.timeout, progress)
            status = launcher.wait()
        if status != 0:
            raise failure_of(run, status)
        return TrainSummary.from_json((run / SUMMARY_FILE).read_text(encoding="utf-8"))


@contextmanager
def _run_folder() -> Iterator[Path]:
    """A temporary folder for logs, which stays when a rank fails."""
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


@contextmanager
def _started(options_file: Path, world_size: int) -> Iterator[subprocess.Popen[str]]:
    """The launcher with its ranks, all of which are gone when the context ends.

    Torchrun puts them out of reach of a signal: so they hold our pipe as standard input, and end
    themselves when it closes.
    """
    arguments = ("--standalone", "--nproc-per-node", str(world_size), "-m", "zexport.train.worker")
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    launcher = subprocess.Popen(  # noqa: S603 - our own module, in a list
        [*command, "--options-file", str(options_file)],
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
        _end(launcher)


def _end(launcher: subprocess.Popen[str]) -> None:
    """The launcher is gone: asked first, killed after a while."""
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
    """Passes rank 0's lines on until every rank has closed its end; the rest goes to a log."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        launcher.kill()
        if launcher.stdin is not None:
            launcher.stdin.close()

    timer = threading.Timer(timeout_s, give_up)
    timer.start()
    try:
        with open_log(run / LAUNCHER_LOG) as log:
            for line in launcher.stderr or ():
                if line.startswith(MARK):
                    timer.cancel()
                    progress(line.removeprefix(MARK).rstrip())
                else:
                    log.write(line)
    finally:
        timer.cancel()
    if late.is_set():
        raise TrainingError(
            f"the first step was not done after {timeout_s} seconds",
            hint=f"Give it longer with --timeout; output of the ranks: {run}",
        )


def failure_of(run: Path, status: int) -> ZexportError:
    """Why the ranks of a run ended, as far as they could say it.

    A rank that a signal ended said nothing, and the others say that it was gone: so the launcher's
    table of dead ranks is asked first.
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
