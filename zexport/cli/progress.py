"""Progress on stderr: a bar, plain lines, or JSON lines."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import click

from zexport.report.text import duration, size

if TYPE_CHECKING:
    from zexport.export.report import Phase, Progress

_LINE_SECONDS = 10.0
_JSON_SECONDS = 0.5
_LABELS = {"resume": "Comparing finished files", "write": "Writing", "verify": "Verifying"}

_OnProgress: TypeAlias = "Callable[[Progress], None]"


@contextmanager
def progress_printer(mode: str, *, quiet: bool = False) -> Iterator[_OnProgress | None]:
    """Yield the callback for ``run_export`` and others; ``None`` if ``quiet``.

    ``mode`` is ``auto`` (a bar on a terminal, else a line every ten seconds) or ``json``.
    """
    if quiet:
        yield None
    elif mode == "json":
        yield _Lines(_JSON_SECONDS, _json_line)
    elif sys.stderr.isatty():
        with _bar() as (on_progress, echo), _logged(echo):
            yield on_progress
    else:
        with _logged(_echo):
            yield _Lines(_LINE_SECONDS, _plain_line)


def _echo(line: str) -> None:
    click.echo(line, err=True)


@contextmanager
def _logged(echo: Callable[[str], None]) -> Iterator[None]:
    """Print what the library logs: what it waits for, and warnings."""
    log, level = logging.getLogger("zexport"), logging.getLogger("zexport").level
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        message = record.getMessage()
        is_warning = record.levelno >= logging.WARNING
        echo(f"Warning: {message}" if is_warning else f"{message} ...")

    handler.emit = emit  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _Lines:
    """Prints a line every some seconds; a JSON line at the end of each phase too."""

    def __init__(
        self, seconds: float, line: Callable[[Progress, float, float | None], str]
    ) -> None:
        self._seconds = seconds
        self._line = line
        self._phase: Phase | None = None
        self._start = self._printed = time.monotonic()
        self._done_before = 0

    def __call__(self, progress: Progress) -> None:
        now, rest = time.monotonic(), progress.nbytes_total - progress.nbytes_done
        is_new = progress.phase is not self._phase
        if is_new:
            self._phase, self._start = progress.phase, now
            self._done_before = progress.nbytes_done
        is_edge = self._line is _json_line and (is_new or rest <= 0)
        if now - self._printed < self._seconds and not is_edge:
            return
        self._printed = now
        speed = (progress.nbytes_done - self._done_before) / max(now - self._start, 1e-9)
        seconds_left = rest / speed if speed else None if rest else 0.0
        _echo(self._line(progress, speed, seconds_left))


def _json_line(progress: Progress, speed: float, seconds_left: float | None) -> str:
    content = {
        "phase": progress.phase.value,
        "nbytes_done": progress.nbytes_done,
        "nbytes_total": progress.nbytes_total,
        "nbytes_resumed": progress.nbytes_resumed,
        "bytes_per_second": round(speed),
        "seconds_left": None if seconds_left is None else round(seconds_left, 1),
    }
    return json.dumps(content)


def _plain_line(progress: Progress, speed: float, seconds_left: float | None) -> str:
    done, total = progress.nbytes_done, progress.nbytes_total
    left = "" if seconds_left is None else f", {duration(seconds_left)} left"
    label = _LABELS[progress.phase.value]
    percent = 100 * done // max(total, 1)
    return f"{label}: {percent} % ({size(done)} of {size(total)}, {size(round(speed))}/s{left})"


@contextmanager
def _bar() -> Iterator[tuple[_OnProgress, Callable[[str], None]]]:
    """Yield a callback that moves a bar, and a function that prints a line above it."""
    from rich import progress as rich
    from rich.console import Console

    bar = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(bar_width=20),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("Preparing", total=None)
    phases: list[Phase] = []

    def on_progress(progress: Progress) -> None:
        done, total = progress.nbytes_done, progress.nbytes_total
        if progress.phase not in phases:
            phases.append(progress.phase)
            bar.reset(task, total=total, description=_LABELS[progress.phase.value])
        bar.update(task, completed=done, total=total)

    with bar:
        yield on_progress, bar.console.print
