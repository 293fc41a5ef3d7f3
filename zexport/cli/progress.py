"""How far the work has come, on stderr: a bar for people, lines for a log, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from zexport.report.text import duration, size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from zexport.run.execute import Progress

_LINE_SECONDS = 10.0
_LINE_SECONDS_MIN = 1.0
_LINES_PER_JOB = 10
_JSON_SECONDS = 0.5
_LABEL = {"resume": "Comparing what is there", "write": "Writing", "verify": "Checking"}


class _Teller(Protocol):
    def tell(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class ProgressPrinter:
    """A context that gives the callback for ``run_export`` and its kin.

    Args:
        mode: ``auto`` (a bar on a terminal, a plain line now and then elsewhere) or ``json`` (an
            object a line).
        quiet: say nothing.
    """

    def __init__(self, mode: str = "auto", *, quiet: bool = False) -> None:
        self._mode = mode
        self._quiet = quiet
        self._teller: _Teller | None = None

    def __enter__(self) -> Callable[[Progress], None] | None:
        """The callback; ``None`` where nothing is to be said."""
        if self._quiet:
            return None
        if self._mode == "json":
            self._teller = _JsonLines()
        else:
            self._teller = _Bar() if _is_terminal() else _PlainLines()
        return self._teller.tell

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._teller is not None:
            self._teller.close()


def _is_terminal() -> bool:
    """Whether stderr can draw a line over: not in a pipe, and not on a dumb terminal."""
    if not sys.stderr.isatty():
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


class _Clock:
    """Time since the work began, and the speed that it shows."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def speed(self, progress: Progress) -> float:
        """Bytes a second."""
        return progress.nbytes_done / max(self.seconds(), 1e-9)

    def seconds_left(self, progress: Progress) -> float | None:
        speed = self.speed(progress)
        return (progress.nbytes_total - progress.nbytes_done) / speed if speed else None


class _JsonLines:
    """Objects with ``phase``, ``nbytes_done``, ``nbytes_total`` and their like."""

    def __init__(self) -> None:
        self._clock = _Clock()
        self._told_at = -_JSON_SECONDS

    def tell(self, progress: Progress) -> None:
        now = self._clock.seconds()
        is_last = progress.nbytes_done >= progress.nbytes_total
        if now - self._told_at < _JSON_SECONDS and not is_last:
            return
        self._told_at = now
        left = self._clock.seconds_left(progress)
        line = {
            "phase": progress.phase.value,
            "nbytes_done": progress.nbytes_done,
            "nbytes_total": progress.nbytes_total,
            "nbytes_resumed": progress.nbytes_resumed,
            "bytes_per_second": round(self._clock.speed(progress)),
            "seconds_left": None if left is None else round(left, 1),
        }
        print(json.dumps(line), file=sys.stderr, flush=True)  # noqa: T201 - the command line speaks

    def close(self) -> None:
        pass


class _PlainLines:
    """A line at every tenth of the work, or after ten seconds, and never two within a second."""

    def __init__(self) -> None:
        self._clock = _Clock()
        self._told_at = 0.0
        self._told_tenth = 0

    def tell(self, progress: Progress) -> None:
        now = self._clock.seconds()
        tenth = progress.nbytes_done * _LINES_PER_JOB // max(progress.nbytes_total, 1)
        waited = now - self._told_at
        if waited < (_LINE_SECONDS_MIN if tenth > self._told_tenth else _LINE_SECONDS):
            return
        self._told_at, self._told_tenth = now, tenth
        print(self._line(progress), file=sys.stderr, flush=True)  # noqa: T201

    def _line(self, progress: Progress) -> str:
        done, total = progress.nbytes_done, progress.nbytes_total
        left = self._clock.seconds_left(progress)
        rest = "" if left is None else f", {duration(left)} left"
        return (
            f"{_LABEL[progress.phase.value]}: {100 * done // max(total, 1)} % "
            f"({size(done)} of {size(total)}, {size(round(self._clock.speed(progress)))}/s{rest})"
        )

    def close(self) -> None:
        pass


class _Bar:
    """A rich progress bar; it is taken away when the work is done."""

    def __init__(self) -> None:
        self._bar: Bar = _new_bar()
        self._task: TaskID = self._bar.add_task("", total=None)
        self._bar.start()

    def tell(self, progress: Progress) -> None:
        self._bar.update(
            self._task,
            description=_LABEL[progress.phase.value],
            completed=progress.nbytes_done,
            total=progress.nbytes_total,
        )

    def close(self) -> None:
        self._bar.stop()


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
