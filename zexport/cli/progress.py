"""How far the work has come, on stderr: a bar for people, lines for a log, JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zexport.report.text import duration, size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from zexport.export.progress import Phase, Progress

_LINE_SECONDS = 10.0
_LINE_SECONDS_MIN = 1.0
_LINES_PER_JOB = 10
_JSON_SECONDS = 0.5
_LABEL = {"resume": "Comparing what is there", "write": "Writing", "verify": "Checking"}


@contextmanager
def progress_printer(
    mode: str, *, quiet: bool = False
) -> Iterator[Callable[[Progress], None] | None]:
    """The callback for ``run_export`` and its kin; ``None`` where nothing is to be said.

    ``mode`` is ``auto`` (a bar on a terminal, a plain line now and then elsewhere) or ``json`` (an
    object a line).
    """
    if quiet:
        yield None
    elif mode == "json":
        yield _JsonLines().tell
    elif _is_terminal():
        with _new_bar() as bar, _told_of_waiting(bar.console.print):
            yield _on_bar(bar)
    else:
        with _told_of_waiting(_print_line):
            yield _PlainLines().tell


@contextmanager
def _told_of_waiting(tell: Callable[[str], None]) -> Iterator[None]:
    """What the library says it waits for is told as it begins, and what it warns of."""
    log, handler = logging.getLogger("zexport"), logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        said = record.getMessage()
        tell(f"Warning: {said}" if is_warning else f"{said} ...")

    handler.emit = emit  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the command line speaks


def _is_terminal() -> bool:
    """Whether stderr can draw a line over: not in a pipe, and not on a dumb terminal."""
    if not sys.stderr.isatty():
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


class _Lines:
    """When a phase began, what was done of it then, and the speed that shows since."""

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._began = self._told_at = 0.0
        self._done_before = 0

    def _pace(self, progress: Progress) -> tuple[float, float, float | None]:
        """The time now, bytes a second, and seconds left, where that can be said."""
        now, done = time.monotonic(), progress.nbytes_done
        if progress.phase is not self._phase:
            self._phase, self._began, self._done_before = progress.phase, now, done
        speed = (done - self._done_before) / max(now - self._began, 1e-9)
        rest = progress.nbytes_total - done
        return now, speed, rest / speed if speed else None if rest else 0.0


class _JsonLines(_Lines):
    """Objects with ``phase``, ``nbytes_done``, ``nbytes_total`` and their like."""

    def tell(self, progress: Progress) -> None:
        now, speed, left = self._pace(progress)
        is_last = progress.nbytes_done >= progress.nbytes_total
        if self._told_at and now - self._told_at < _JSON_SECONDS and not is_last:
            return
        self._told_at = now
        line = {
            "phase": progress.phase.value,
            "nbytes_done": progress.nbytes_done,
            "nbytes_total": progress.nbytes_total,
            "nbytes_resumed": progress.nbytes_resumed,
            "bytes_per_second": round(speed),
            "seconds_left": None if left is None else round(left, 1),
        }
        print(json.dumps(line), file=sys.stderr, flush=True)  # noqa: T201 - the command line speaks


class _PlainLines(_Lines):
    """A line at every tenth of the work, or after ten seconds, and never two within a second."""

    def __init__(self) -> None:
        super().__init__()
        self._told_tenth = 0

    def tell(self, progress: Progress) -> None:
        is_new = progress.phase is not self._phase
        now, speed, left = self._pace(progress)
        done, total = progress.nbytes_done, progress.nbytes_total
        tenth = done * _LINES_PER_JOB // max(total, 1)
        if is_new:
            self._told_at, self._told_tenth = self._told_at or now, tenth
        waited = now - self._told_at
        if waited < (_LINE_SECONDS_MIN if tenth > self._told_tenth else _LINE_SECONDS):
            return
        self._told_at, self._told_tenth = now, tenth
        rest = "" if left is None else f", {duration(left)} left"
        line = (
            f"{_LABEL[progress.phase.value]}: {100 * done // max(total, 1)} % "
            f"({size(done)} of {size(total)}, {size(round(speed))}/s{rest})"
        )
        _print_line(line)


def _new_bar() -> Bar:
    """A bar that moves, and nothing can be counted yet."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    return Bar(*columns, console=Console(stderr=True), transient=True)


def _on_bar(bar: Bar) -> Callable[[Progress], None]:
    """Shows phases on a bar, one after the other."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    task = bar.add_task("Preparing", total=None)
    counted = (*bar.columns[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    shown: list[Phase] = []

    def tell(progress: Progress) -> None:
        done, total = progress.nbytes_done, progress.nbytes_total
        if progress.phase not in shown:
            shown.append(progress.phase)
            bar.columns = counted
            bar.reset(task, total=total, description=_LABEL[progress.phase.value])
        bar.update(task, completed=done, total=total)

    return tell
