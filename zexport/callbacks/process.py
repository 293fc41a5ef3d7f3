"""The watch process that a callback starts, feeds and waits for."""

from __future__ import annotations

import atexit
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from zexport.errors import NotACheckpointError, ZexportError
from zexport.model.hub_cache import model_folder
from zexport.monitor.jobs import Job, arguments_of, split_command, start_watch
from zexport.monitor.policy import EventKind, WatchEvent, WatchOptions
from zexport.monitor.snapshot import is_run
from zexport.options import ExportOptions
from zexport.report.json import Failure
from zexport.report.monitor import describe_event
from zexport.storage.files import absolute, is_folder
from zexport.storage.json import decoded
from zexport.storage.location import place

LOG = logging.getLogger("zexport.callbacks")
_WATCH_OPTIONS = frozenset(("keep", "every"))


class Exports:
    """Exports of one run, for a callback of any framework; it never raises into training.

    One process exports complete checkpoints and keeps waiting ones from being deleted. It ends once
    it has exported the rest, after ``collect`` or the end of this process.

    Args:
        out: folder for the exports; each has the name of its checkpoint.
        dtype: dtype of the weights; ``auto`` for that of the module weights.
        then: a command to run after each export, without a shell; the word ``{}`` is its folder,
            the word ``{step}`` its step.
        newest_only: skip a checkpoint if a newer one is complete.
        interval_s: seconds between two scans of the run.
        collect_s: how many seconds the end of training (with several ranks: the exit of rank 0)
            waits for the last export, which continues after that.
        more: other fields of ``zexport.WatchOptions`` and ``zexport.ExportOptions``.

    Raises:
        UsageError: an option is invalid.
        NotACheckpointError: the base model does not exist.
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
        for_watch = {key: more.pop(key) for key in [*more] if key in _WATCH_OPTIONS}
        watch = WatchOptions(then=then, newest_only=newest_only, interval_s=interval_s, **for_watch)
        export = ExportOptions(**{"dtype": dtype, **more})
        split_command(then)
        if export.base is not None and not is_folder(model_folder(export.base)):
            hint = "Pass a model folder, or the Hub id of a cached model"
            raise NotACheckpointError("is not a base model folder", path=export.base, hint=hint)
        self._out = absolute(place(out))
        self._arguments = (*arguments_of(watch), *arguments_of(export))
        self._collect_s = collect_s
        self._run: Path | None = None
        self._job: Job | None = None
        self._codes: set[int] = set()

    def begin(self, run: Path) -> None:
        """Start the process for this run, if it is not running."""
        self._run = absolute(run)
        self._read_events(0)
        if self._job is None:
            try:
                self._job = start_watch(self._run, self._out, self._arguments)
            except OSError as error:
                LOG.warning("exports to %s did not start: %s", self._out, error)

    def end(self, ranks: int) -> None:
        """Wait for the last export: now, or with several ranks when this process exits.

        The other ranks continue, for example with saving the model: if one waits here, they time
        out.
        """
        if ranks == 1:
            self.collect()
        else:
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)

    def collect(self) -> None:
        """Wait for the remaining exports, and log what happened."""
        if self._run is not None:
            self.begin(self._run)  # if it was killed
        if self._job is not None:
            self._job.close_input()
        self._read_events(self._collect_s)
        if self._job is not None:
            LOG.warning("exports to %s continue in the background", self._out)
        elif self._run is not None:
            with suppress(ZexportError, OSError):
                if not is_run(self._run):
                    LOG.warning("nothing was exported: %s contains no checkpoint", self._run)
        self._run = None
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is not None:  # the other ranks wait for this failure
            self._collect_s = 0.0
        self.collect()

    def _read_events(self, seconds: float) -> None:
        """Log events; wait up to ``seconds`` for the end of the process."""
        if (job := self._job) is None:
            return
        code = job.wait(seconds)
        self._codes.update(_log(line, job) for line in job.lines())
        if code is None:
            return
        if code not in (0, *self._codes):  # no event explains it
            why = job.stderr_tail()
            LOG.warning("exports to %s ended with code %d: %s", self._out, code, why)
        job.end()
        self._job, self._codes = None, set()


def _log(line: str, job: Job) -> int:
    """Log one line of a watch; return the exit code that it leads to."""
    with suppress(ValueError, msgspec.ValidationError):
        error = decoded(line, Failure).error
        LOG.warning("%s", error.message)
        return error.code
    with suppress(ValueError, msgspec.ValidationError):
        event = decoded(line, WatchEvent)
        is_news = event.event in (EventKind.EXPORTED, EventKind.SKIPPED, EventKind.RAN)
        LOG.log(logging.INFO if is_news else logging.WARNING, "%s", describe_event(event))
        for warning in event.warnings:
            LOG.warning("%s: %s", event.checkpoint, warning)
        if event.event is EventKind.COMMAND_FAILED:
            LOG.warning("%s", job.stderr_tail())
        return event.code
    LOG.warning("%s", line)  # the process was killed while it wrote
    return 0
