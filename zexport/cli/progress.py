"""How far the work has come, on stderr: a bar for people, lines for a log, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zexport.report.text import duration, size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from zexport.run.execute import Progress

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
        with _new_bar() as bar:
            task = bar.add_task("", total=None)
            yield lambda progress: bar.update(
                task,
                description=_LABEL[progress.phase.value],
                completed=progress.nbytes_done,
                total=progress.nbytes_total,
            )
    else:
        yield _PlainLines().tell


def _is_terminal() -> bool:
    """Whether stderr can draw a line over: not in a pipe, and not on a dumb terminal."""
    if not sys.stderr.isatty():
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


class _Lines:
    """Time since the work began, and the speed that it shows."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told_at = 0.0

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _speed(self, progress: Progress) -> int:
        """Bytes a second."""
        return round(progress.nbytes_done / max(self._seconds(), 1e-9))

    def _seconds_left(self, progress: Progress) -> float | None:
        speed = progress.nbytes_done / max(self._seconds(), 1e-9)
        return (progress.nbytes_total - progress.nbytes_done) / speed if speed else None


class _JsonLines(_Lines):
    """Objects with ``phase``, ``nbytes_done``, ``nbytes_total`` and their like."""

    def tell(self, progress: Progress) -> None:
        now = self._seconds()
        is_last = progress.nbytes_done >= progress.nbytes_total
        if self._told_at and now - self._told_at < _JSON_SECONDS and not is_last:
            return
        self._told_at = now
        left = self._seconds_left(progress)
        line = {
            "phase": progress.phase.value,
            "nbytes_done": progress.nbytes_done,
            "nbytes_total": progress.nbytes_total,
            "nbytes_resumed": progress.nbytes_resumed,
            "bytes_per_second": self._speed(progress),
            "seconds_left": None if left is None else round(left, 1),
        }
        print(json.dumps(line), file=sys.stderr, flush=True)  # noqa: T201 - the command line speaks


class _PlainLines(_Lines):
    """A line at every tenth of the work, or after ten seconds, and never two within a second."""

    def __init__(self) -> None:
        super().__init__()
        self._told_tenth = 0

    def tell(self, progress: Progress) -> None:
        now = self._seconds()
        done, total = progress.nbytes_done, progress.nbytes_total
        tenth = done * _LINES_PER_JOB // max(total, 1)
        waited = now - self._told_at
        if waited < (_LINE_SECONDS_MIN if tenth > self._told_tenth else _LINE_SECONDS):
            return
        self._told_at, self._told_tenth = now, tenth
        left = self._seconds_left(progress)
        rest = "" if left is None else f", {duration(left)} left"
        line = (
            f"{_LABEL[progress.phase.value]}: {100 * done // max(total, 1)} % "
            f"({size(done)} of {size(total)}, {size(self._speed(progress))}/s{rest})"
        )
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def _new_bar() -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
