"""Every checkpoint of a run exported, once, as soon as it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import Struct

from zexport.errors import CheckpointError, OutputError
from zexport.export.write import VerifyMode
from zexport.monitor.choices import WatchOptions
from zexport.monitor.command_line import made_with, words_of
from zexport.monitor.events import EventKind, WatchEvent
from zexport.monitor.jobs import (
    UNTOLD,
    Job,
    split_command,
    start_command,
    start_export,
    told_by,
)
from zexport.monitor.kept_exports import Shelf
from zexport.monitor.ledger import BEAT_S, Ledger, held
from zexport.monitor.lookout import Lookout
from zexport.monitor.pins import Pin, pins_folder
from zexport.monitor.places import check_places
from zexport.monitor.sightings import look
from zexport.options import ExportOptions, checks_arguments, chosen
from zexport.report.failure import Told
from zexport.storage.files import absolute, exists, make_folder, real, refresh
from zexport.storage.location import place
from zexport.storage.locks import is_being_written
from zexport.storage.symlink_policy import Boundary

_SETTLE_S = 2.0
"""Between the two looks of a watch that looks once."""

_UNPROVED = "trainer_state.json is not there: only its age says that the checkpoint is complete"

_REST_S = 65.0
"""So long a watch that is to end looks for what was saved last: longer than files lie still."""

_ENDED = 130  # by a signal that it answers


@checks_arguments
def watch(
    run: Path | str,
    outs: Path | str,
    options: WatchOptions | None = None,
    export: ExportOptions | None = None,
    *,
    follow_symlinks: bool = False,
    verify: str = "readback",
    is_over: Callable[[], bool] = lambda: False,
) -> Generator[WatchEvent]:
    """What becomes of the checkpoints of a run, as it happens; each is exported once.

    The call alone checks what it is given: the work is done while the events are iterated over.
    Each export is a process of its own at low priority, which ends when the generator is closed.
    Checkpoints that wait are kept from being removed. Nothing is ever written into the run.

    Args:
        run: the folder that checkpoints are saved to; it need not be there yet.
        outs: the folder for the exports, each under its checkpoint's name.
        options: what to export, what to do after, how long to go on.
        export: as for ``consolidate``.
        follow_symlinks: as for ``consolidate``.
        verify: as for ``consolidate``.
        is_over: asked before every look; once it is true, what is left is exported, and that is
            all.

    Raises:
        NotACheckpointError: ``run`` is not there, and it is to be looked at once.
        OutputError: another watch exports to ``outs``, it has another run's exports, or it cannot
            be written; raised by the first event that is asked for.
        UsageError: ``outs`` is the run's folder or lies in it, or holds checkpoints; ``run`` is one
            checkpoint; the command of ``then`` cannot be run.
    """
    run, outs = absolute(place(run)), absolute(place(outs))
    options, export = options or WatchOptions(), export or ExportOptions()
    check_places(run, outs, once=options.once)
    asked = _Asked(
        options=options,
        boundary=Boundary.of(run, follow=follow_symlinks),
        words=(*words_of(export), "--verify", chosen("verify", VerifyMode, verify).value),
        made_with=made_with(export),
        then=split_command(options.then),
        is_over=is_over,
    )
    return _watched(run, outs, asked)


class _Asked(Struct, frozen=True):
    """What the caller of a watch has asked for, in the words of the commands that it starts."""

    options: WatchOptions
    boundary: Boundary
    words: Sequence[str]
    made_with: str
    then: Sequence[str]
    is_over: Callable[[], bool]


def _watched(run: Path, outs: Path, asked: _Asked) -> Generator[WatchEvent]:
    """The events of a watch, which does its work while they are iterated over."""
    with held(outs) as own:
        pins = pins_folder(outs, own)
        make_folder(pins)
        there = {one.mark for one in look(run, asked.boundary)}
        ledger = Ledger(outs, own, real(run), there)
        lookout = Lookout(run, pins, ledger, asked.boundary, asked.options)
        shelf = Shelf(ledger, asked.options, asked.made_with)
        work = _Work(lookout, shelf, ledger, asked)
        try:
            yield from work.events()
        finally:
            work.end()


class _Task(Struct, frozen=True):
    """A checkpoint's export, or the command after it, while it runs."""

    job: Job
    event: WatchEvent
    began: float
    pin: Pin | None = None


@dataclass
class _Work:
    """One watch: what waits, what runs, and what was told."""

    lookout: Lookout
    shelf: Shelf
    ledger: Ledger
    asked: _Asked
    ends: bool = False
    """Whether it ends when nothing is left to do."""
    ends_at: float = 0.0
    last_looks: int = 0
    """Looks since it is to end."""
    begun: Sequence[str] = ()
    """Exports that a watch which was killed had begun."""
    orphans: Sequence[str] = ()
    """Those of them that are still at work."""
    owed: list[str] = field(default_factory=list)
    """Exports whose command is to be run."""
    task: _Task | None = None
    """The export that runs."""
    command: _Task | None = None
    """The command that runs, which no export waits for."""

    @property
    def options(self) -> WatchOptions:
        """What the caller has chosen."""
        return self.asked.options

    def events(self) -> Iterator[WatchEvent]:
        """All that happens, until nothing is left to do or for ever."""
        yield from self._take_over()
        while True:
            if not self.ends and (self.options.once or self.asked.is_over()):
                self.ends, self.ends_at = True, time.monotonic() + _REST_S
            yield from self._look()
            yield from self._settle()
            yield from self._begin()
            if self.ends and self._is_done():
                yield from self._left()
                return
            yield from self._wait()

    def end(self) -> None:
        """Stop what runs; what waits is kept for the next watch, where links can keep it."""
        for task in self._tasks():
            task.job.end()

    def _tasks(self) -> list[_Task]:
        return [task for task in (self.task, self.command) if task is not None]

    def _take_over(self) -> Iterator[WatchEvent]:
        """Go on with what a stopped watch has left."""
        entries = self.ledger.entries
        self.owed = [name for name, entry in entries.items() if entry.is_owed]
        self.begun = [name for name, entry in entries.items() if entry.is_begun]
        yield from self._settle()
        self.lookout.take_over()
        yield from self.shelf.news(self.lookout.there())

    def _settle(self) -> Iterator[WatchEvent]:
        """Take over what exports have made that a killed watch has left at work."""
        running = [task.event.checkpoint for task in self._tasks()]
        begun = [name for name in self.begun if name not in running]
        self.orphans = [name for name in begun if is_being_written(self.ledger.out(name))]
        for name in begun:
            if name not in self.orphans and self.ledger.is_published(name):
                self._stands(name, is_owed=True)
                self.lookout.let_go(name)
                yield self.ledger.event(EventKind.EXPORTED, name, self.ledger.entries[name].step)

    def _stands(self, name: str, *, is_owed: bool) -> None:
        """Note an export that is there now."""
        self.ledger.end(name, is_owed=is_owed)
        self.owed += [name] * bool(self.options.then)

    def _look(self) -> Iterator[WatchEvent]:
        """See what there is; storage that falters is looked at again."""
        running = [task.event.checkpoint for task in self._tasks()]
        try:
            yield from self.lookout.look((*running, *self.orphans))
            self.last_looks += self.ends
        except CheckpointError:
            if self.ends and self._is_time_over():
                raise

    def _is_time_over(self) -> bool:
        return self.options.once or time.monotonic() > self.ends_at

    def _is_done(self) -> bool:
        """Whether nothing is left; what was saved last has had the time to lie still."""
        if self._tasks() or self.orphans or not self.lookout.is_idle or not self.last_looks:
            return False
        may_settle = not self._is_time_over() and self.lookout.may_settle(_REST_S)
        return not self.lookout.waits or (self.last_looks > 1 and not may_settle)

    def _left(self) -> Iterator[WatchEvent]:
        """What is not exported at the end, and why."""
        for name, why in self.lookout.waits.items():
            seen = self.lookout.seen.get(name)
            step = None if seen is None else seen.step(self.lookout.boundary)
            yield self.ledger.event(EventKind.WAITING, name, step, why=why)
        if self.lookout.left_out and not any(self.ledger.ages()):
            *others, last = self.lookout.left_out
            why = f"--every {self.options.every} leaves it out"
            why += f", and {len(others):,} more" if others else ""
            step = self.lookout.left_out[last]
            yield self.ledger.event(EventKind.SKIPPED, last, step, why=why)

    def _begin(self) -> Iterator[WatchEvent]:
        """Start what is next, if nothing runs."""
        while self.owed and self.options.then and self.command is None:
            yield from self._command(self.owed.pop(0))
        if self.task is None and not self.orphans:
            yield from self.lookout.skip()
            running = None if self.command is None else self.command.event.checkpoint
            if (one := self.lookout.take(but=running)) is not None:
                self._export(one)

    def _export(self, one: Pin) -> None:
        name, step = one.seen.name, one.step
        self.owed = [other for other in self.owed if other != name]  # that one is replaced
        again = ("--overwrite",) if self.ledger.is_ours(name) and self._is_there(name) else ()
        links = ("--follow-symlinks",) if self.lookout.boundary.follow else ()
        seen = ("--as-seen", one.seen.mark)
        self.ledger.begin(one.seen, step, self.shelf.made_with)
        job = start_export(
            one.path, self.ledger.out(name), (*self.asked.words, *again, *links, *seen)
        )
        event = self.ledger.event(EventKind.EXPORTED, name, step)
        self.task = _Task(job, event, time.monotonic(), one)

    def _is_there(self, name: str) -> bool:
        return exists(self.ledger.out(name))

    def _command(self, name: str) -> Iterator[WatchEvent]:
        if not self._is_there(name):
            return
        event = self.ledger.event(EventKind.RAN, name, self.ledger.entries[name].step)
        try:
            job = start_command(self.asked.then, event.out, event.step)
        except OSError as error:  # such as a script without a #! line
            yield self._command_failed(event, f"cannot be run: {error.strerror}")
            return
        self.command = _Task(job, event, time.monotonic())

    def _wait(self) -> Iterator[WatchEvent]:
        """Let time pass, until what runs has ended or the next look is due."""
        seconds = _SETTLE_S if self.ends else self.options.interval_s
        if not (tasks := self._tasks()):
            time.sleep(seconds)
            return
        tasks[0].job.wait(min(self.options.interval_s, BEAT_S))
        for task in tasks:
            if (code := task.job.wait(0)) is not None:
                yield from self._finish(task, code)
        self.ledger.beat()

    def _finish(self, task: _Task, code: int) -> Iterator[WatchEvent]:
        """Note how what ran has ended, and make room for the next."""
        if task is self.command:
            self.command = None
        else:
            self.task = None
        refresh(task.event.out)
        if task.pin is not None:
            ended = self._exported(task, task.pin, code)
        else:
            ended = self._ran(task.event, code)
        yield replace(ended, seconds=time.monotonic() - task.began)
        task.job.end()
        yield from self.shelf.retire(self.lookout.seen, self.lookout.boundary)

    def _exported(self, task: _Task, kept: Pin, code: int) -> WatchEvent:
        """Note how an export has ended."""
        event, told = task.event, told_by(task.job, code)
        may_stand = (
            told.error is None or told.error.kind == UNTOLD or event.checkpoint in self.begun
        )
        if told.error is None or (may_stand and self.ledger.is_published(event.checkpoint)):
            self._stands(event.checkpoint, is_owed=bool(self.options.then))
            kept.release()
            age = (_UNPROVED,) if kept.is_unproved else ()
            return replace(event, warnings=(*age, *told.warnings))
        if event.checkpoint in self.begun and is_being_written(event.out):
            self.lookout.put_back(kept)
            why = "an export that a killed watch has left writes it"
            return replace(event, event=EventKind.WAITING, why=why)
        mark = kept.mark_now(self.lookout.boundary)
        is_same, is_killed = mark == kept.seen.mark, code < 0 or code == _ENDED
        self.ledger.failed(event.checkpoint, is_changed=not is_same)
        if not is_same or not (is_killed or told.error.code == OutputError.exit_code):
            kept.release()
        elif not self.ends:
            self.lookout.put_back(kept)
        elif not is_killed:  # else the next watch goes on with it
            kept.release()
        if not mark:
            why = "the run removed it before it was exported"
            return replace(event, event=EventKind.LOST, why=why)
        if not is_same:
            why = "the run saved it anew meanwhile; it is exported again when that is complete"
            self.lookout.waits[event.checkpoint] = why
            return replace(event, event=EventKind.CHANGED, why=why)
        return replace(event, event=EventKind.FAILED, failure=kept.named(told.error))

    def _ran(self, event: WatchEvent, code: int) -> WatchEvent:
        """Note how a command has ended."""
        if code == 0:
            self.ledger.paid(event.checkpoint)
            return event
        return self._command_failed(event, f"ended with code {code}")

    def _command_failed(self, event: WatchEvent, how: str) -> WatchEvent:
        message = f"the command after the export {how}; it is run again when the watch is started "
        message += "again"
        message += ", and the export stays until then" if self.options.keep is not None else ""
        told = Told(OutputError.exit_code, "command", None, message, "")
        return replace(event, event=EventKind.COMMAND_FAILED, failure=told)
