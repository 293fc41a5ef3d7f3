"""The exports of one training: a process beside it, started at a save, and told of in the log."""

from __future__ import annotations

import atexit
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from zexport.checkpoint.resolve import list_run_checkpoints, list_tags
from zexport.errors import NotACheckpointError, ZexportError
from zexport.model.hub_cache import model_folder
from zexport.monitor.choices import WatchOptions
from zexport.monitor.command_line import words_of
from zexport.monitor.events import EventKind, WatchEvent
from zexport.monitor.jobs import Job, split_command, start_watch
from zexport.options import ExportOptions
from zexport.report.failure import Failure
from zexport.storage.files import absolute, is_folder
from zexport.storage.json import decoded
from zexport.storage.location import place

_LOG = logging.getLogger("zexport.callbacks")
_NEWS = (EventKind.EXPORTED, EventKind.SKIPPED)


class Exports:
    """What a callback of any framework does; it never raises into the training.

    One process exports what is complete, and keeps what waits from being rotated away. It ends when
    it is told that no more comes, or the training is gone, and nothing is left.

    Args:
        out: the folder for the exports, each under its checkpoint's name.
        dtype: element type of the weights; ``auto`` for the one that the module trains in.
        then: a command after each export, run without a shell; the word ``{}`` is its folder, the
            word ``{step}`` its step.
        newest_only: leave out what a newer checkpoint has overtaken.
        interval_s: seconds between two looks at the run.
        collect_s: so long, at the most, the end of the training, or of rank 0's process where there
            are several ranks, waits for the last export, which goes on by itself after that.
        more: other fields of ``zexport.WatchOptions`` and ``zexport.options.ExportOptions``.

    Raises:
        UsageError: an option cannot be meant.
        NotACheckpointError: there is no such base.
    """

    def __init__(
        self,
        out: Path | str,
        dtype: str = "fp32",
        *,
        then: str = "",
        newest_only: bool = True,
        interval_s: float = 2.0,
        collect_s: float = 600.0,
        **more: Any,
    ) -> None:
        of_watch = {key: more.pop(key) for key in [*more] if key in _OF_WATCH}
        watch = WatchOptions(then=then, newest_only=newest_only, interval_s=interval_s, **of_watch)
        export = ExportOptions(**{"dtype": dtype, **more})
        split_command(then)
        if export.base is not None and not is_folder(model_folder(export.base)):
            hint = "Give a model folder, or the hub's name of one in its cache"
            raise NotACheckpointError("is no folder of a base", path=export.base, hint=hint)
        self._out = absolute(place(out))
        self._words = (*words_of(watch), *words_of(export))
        self._collect_s = collect_s
        self._run: Path | None = None
        self._job: Job | None = None
        self._codes: set[int] = set()
        self._is_at_exit = False

    def begin(self, run: Path) -> None:
        """A training begins, or goes on: checkpoints will be saved to this folder."""
        self._run = absolute(run)
        self._note(0)
        if self._job is None:
            self._start()

    def end(self, ranks: int) -> None:
        """The training of so many ranks has ended: wait for what is left where nobody waits for us.

        The other ranks go on into what all of them do next, such as saving the model: a rank that
        waits would have them run into the timeout of their group. It waits when its process ends.
        """
        if ranks == 1:
            self.collect()
        elif not self._is_at_exit:
            self._is_at_exit = True
            atexit.register(self._at_exit)

    def collect(self) -> None:
        """Wait for what is left, and tell of it."""
        self._note(0)  # one that was killed is begun again
        if self._run is not None and self._job is None:
            self._start()
        if self._job is not None:
            self._job.no_more()
        self._note(self._collect_s)
        if self._job is not None:
            _LOG.warning("exports to %s go on by themselves", self._out)
        elif self._run is not None:
            _warn_of_none(self._run)
        self._run = None
        atexit.unregister(self._at_exit)
        self._is_at_exit = False

    def _at_exit(self) -> None:
        """Wait, unless an error ends the process, of which the other ranks are to hear at once."""
        if getattr(sys, "last_value", None) is not None:
            self._collect_s = 0.0
        self.collect()

    def _start(self) -> None:
        try:
            self._job = start_watch(self._run or Path(), self._out, self._words)
        except OSError as error:
            _LOG.warning("no export was started to %s: %s", self._out, error)

    def _note(self, seconds: float) -> None:
        """Tell what has happened, and that what runs has ended, for which it has so long."""
        job = self._job
        if job is None:
            return
        code = job.wait(seconds)
        self._codes.update(_tell(line, job) for line in job.lines())
        if code is None:
            return
        self._job, known, self._codes = None, self._codes, set()
        if code not in (0, *known):  # what it told is not why
            why = job.complaint().strip()
            _LOG.warning("exports to %s ended with code %d: %s", self._out, code, why)
        job.end()


def _warn_of_none(run: Path) -> None:
    with suppress(ZexportError, OSError):  # storage that falters is no reason to warn, or to raise
        if not (list_tags(run) or list_run_checkpoints(run)):
            _LOG.warning("nothing was exported: %s holds no ZeRO checkpoint", run)


_OF_WATCH = frozenset(("keep", "every"))


def _tell(line: str, job: Job) -> int:
    """Put what a process told into the log; the exit code that comes of it."""
    try:
        if '"error": ' in line:
            error = decoded(line, Failure).error
            _LOG.warning("%s", error.message)
            return error.code
        event = decoded(line, WatchEvent)
    except (ValueError, msgspec.ValidationError):  # the process was ended while it wrote
        _LOG.warning("%s", line)
        return 0
    if event.failure is not None:
        said = job.complaint().strip() if event.event is EventKind.COMMAND_FAILED else ""
        _LOG.warning("%s: %s", event.checkpoint, "\n".join((event.failure.message, said)).strip())
    elif event.event in _NEWS:
        _LOG.info("%s: %s %s", event.checkpoint, event.event.value, event.why or event.out)
    elif event.why:
        _LOG.warning("%s: %s: %s", event.checkpoint, event.event.value, event.why)
    for warning in event.warnings:
        _LOG.warning("%s: %s", event.checkpoint, warning)
    return event.code
