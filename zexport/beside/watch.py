"""Every checkpoint of a run exported, once, as soon as it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import Struct

from zexport.beside.choices import WatchOptions
from zexport.beside.events import EventKind, WatchEvent
from zexport.beside.jobs import UNTOLD, Job, start_command, start_export, start_prune, told_by
from zexport.beside.ledger import BEAT_S, Ledger, held
from zexport.beside.newest import Age, newest
from zexport.beside.pins import Pin, pin, pins_folder, pins_left
from zexport.beside.pruning import Pruner, words_of_prune
from zexport.beside.sightings import Sighting, look
from zexport.beside.words import words_of
from zexport.checkpoint.candidates import list_run_checkpoints, list_tags
from zexport.errors import CheckpointError, OutputError, UsageError, ZexportError
from zexport.options import ExportOptions
from zexport.report.failure import Told
from zexport.store.address import place
from zexport.store.boundary import Boundary
from zexport.store.folders import absolute, exists, is_folder, look_anew, make_folder, real

_SETTLE_S = 2.0
"""Between the two looks of a watch that looks once."""

_UNPROVED = "trainer_state.json is not there: only its age says that the checkpoint is complete"

_RETRY_S = 60.0
"""A full disk may have room again after so long, or the machine memory for what it has killed."""

_REST_S = 65.0
"""So long a watch that is told to end looks for what was saved last: longer than files lie still."""

_ENDED = 130  # by a signal that it answers


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
        OutputError: another watch exports to ``outs``, it has another run's exports, or it cannot
            be written.
        UsageError: ``outs`` is the run's folder or lies in it, or holds checkpoints.
    """
    run, outs = absolute(place(run)), absolute(place(outs))
    _check_places(run, outs)
    export = export or ExportOptions()
    options = options or WatchOptions()
    to_prune = words_of_prune(run, export) if options.prune else ()
    words = (*words_of(export), "--verify", verify)
    with held(outs) as own:
        pins = pins_folder(outs, own)
        make_folder(pins)
        ledger = Ledger(outs, own, real(run))
        boundary = Boundary.of(run, follow=follow_symlinks)
        work = _Work(run, pins, ledger, boundary, options, words, is_over)
        if options.prune:
            work.pruner = Pruner(ledger, boundary, options.keep_resumable)
            work.words_of_prune = to_prune
        try:
            yield from work.events()
        finally:
            work.end()


def _check_places(run: Path, outs: Path) -> None:
    """Refuse to write into a run: into this one, or, given the wrong way round, into the other."""
    if exists(run) and not is_folder(run):
        raise UsageError("is no folder", path=run, hint="Give the folder of the run's checkpoints")
    if real(outs).is_relative_to(real(run)):
        raise UsageError(
            "lies in the run, into which nothing is written",
            path=outs,
            hint="Give the exports a folder beside the run",
        )
    if exists(outs) and is_folder(outs) and (list_tags(outs) or list_run_checkpoints(outs)):
        raise UsageError(
            "holds checkpoints, and is to hold exports",
            path=outs,
            hint="The run comes first, and a folder for its exports second",
        )


class _Task(Struct, frozen=True):
    """A checkpoint's export, or the command after it, while it runs."""

    job: Job
    event: WatchEvent
    began: float
    pin: Pin | None = None


@dataclass
class _Work:
    """One watch: what waits, what runs, and what was told."""

    run: Path
    pins: Path
    ledger: Ledger
    boundary: Boundary
    options: WatchOptions
    words: Sequence[str]
    is_over: Callable[[], bool]
    ends: bool = False
    """Whether it ends when nothing is left to do."""
    ends_at: float = 0.0
    last_looks: int = 0
    """Looks since it is to end."""
    seen: dict[str, Sighting] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    """What each checkpoint lacks that is not complete."""
    queue: dict[str, Pin] = field(default_factory=dict)
    """Checkpoints that are kept until it is their turn."""
    over: dict[str, str] = field(default_factory=dict)
    """The marks of checkpoints that were decided on."""
    owed: list[str] = field(default_factory=list)
    """Exports whose command is to be run."""
    stay: set[str] = field(default_factory=set)
    """Older exports that cannot be removed."""
    task: _Task | None = None
    not_before: dict[str, float] = field(default_factory=dict)
    """When an export that had no room is tried again."""
    pruner: Pruner | None = None
    words_of_prune: Sequence[str] = ()

    def events(self) -> Iterator[WatchEvent]:
        """All that happens, until nothing is left to do or for ever."""
        self._take_over()
        while True:
            if not self.ends and (self.options.once or self.is_over()):
                self.ends, self.ends_at = True, time.monotonic() + _REST_S
            yield from self._look()
            yield from self._begin()
            if self.ends and self._is_done():
                yield from (self._event(EventKind.WAITING, n, why=w) for n, w in self.waits.items())
                return
            yield from self._wait()

    def end(self) -> None:
        """Stop what runs; what waits is kept for the next watch, where links can keep it."""
        if self.task is not None:
            self.task.job.end()

    def _is_done(self) -> bool:
        """Whether nothing is left; what was saved last has had the time to lie still."""
        if self.task is not None or self.queue or not self.last_looks:
            return False
        return not self.waits or (self.last_looks > 1 and not self._may_settle())

    def _is_time_over(self) -> bool:
        return self.options.once or time.monotonic() > self.ends_at

    def _may_settle(self) -> bool:
        """Whether something that waits was written so late that it may be complete soon."""
        late = (one for one in self.seen.values() if one.name in self.waits)
        return not self._is_time_over() and any(one.age_s < _REST_S for one in late)

    def _take_over(self) -> None:
        """Go on with what a stopped watch has kept, if the run has removed it since."""
        self.ledger.settle()
        self.owed = [n for n, entry in self.ledger.entries.items() if entry.is_owed]
        there = {one.name: one.mark for one in look(self.run, self.boundary)}
        for left in pins_left(self.pins):
            name = left.seen.name
            if self.ledger.is_exported(left.seen) or there.get(name) == left.seen.mark:
                left.release()
            else:
                self.queue[name] = left

    def _look(self) -> Iterator[WatchEvent]:
        """See what there is, and keep what is complete; storage that falters is looked at again."""
        try:
            seen = {one.name: one for one in look(self.run, self.boundary)}
        except CheckpointError:
            if self.ends and self._is_time_over():
                raise
            return
        for name in self.waits.keys() - seen.keys():
            del self.waits[name]
            yield self._event(EventKind.LOST, name, why="the run removed it before it was complete")
        for one in seen.values():
            if self._is_handled(one):
                continue
            earlier = None if self.ledger.has_another(one) else self.seen.get(one.name)
            if lacks := one.lacks(earlier):
                self.waits[one.name] = lacks
                continue
            self.waits.pop(one.name, None)
            yield from self._keep(one)
        self.seen = seen
        self.last_looks += self.ends

    def _is_handled(self, one: Sighting) -> bool:
        is_queued = one.name in self.queue or self._is_running(one.name)
        return is_queued or self.over.get(one.name) == one.mark or self.ledger.is_exported(one)

    def _is_running(self, name: str) -> bool:
        return self.task is not None and self.task.event.checkpoint == name

    def _keep(self, one: Sighting) -> Iterator[WatchEvent]:
        """Keep a checkpoint that is to be exported."""
        self.over[one.name] = one.mark
        step = one.step(self.boundary)
        is_due = step is None or step % self.options.every == 0
        if not is_due or self._is_overtaken(Age(one.name, step, one.written_ns)):
            return
        try:
            self.queue[one.name] = pin(one, step, self.pins, self.boundary)
        except FileNotFoundError:
            why = "the run removed it before it could be kept"
            yield self._event(EventKind.LOST, one.name, step, why=why)
        except ZexportError as error:
            yield self._event(EventKind.FAILED, one.name, step, failure=Told.of(error))

    def _is_overtaken(self, one: Age) -> bool:
        """Whether newer exports make that of a checkpoint one that would not be kept."""
        kept = 1 if self.options.newest_only else self.options.keep
        exported = [age for age in self._ages() if age.name != one.name]
        return kept is not None and one.name not in newest((*exported, one), kept)

    def _ages(self) -> Iterator[Age]:
        """Those of what was exported."""
        for name, entry in self.ledger.entries.items():
            if entry.is_done:
                yield Age(name, entry.step, entry.written_ns)

    def _begin(self) -> Iterator[WatchEvent]:
        """Start what is next, if nothing runs."""
        while self.owed and self.options.then and not self._is_busy():
            self._command(self.owed.pop(0))
        if not self._is_busy() and (ready := self._ready()):
            if self.options.newest_only:
                ages = (Age(one.seen.name, one.step, one.seen.written_ns) for one in ready)
                kept = newest(ages, 1)
                yield from (self._skipped(one) for one in ready if one.seen.name not in kept)
                ready = [one for one in ready if one.seen.name in kept]
            self._export(self.queue.pop(ready[0].seen.name))
        if self.pruner is not None and not self._is_busy():
            self._prune(self.pruner.next(self.run, self.seen))

    def _is_busy(self) -> bool:
        return self.task is not None

    def _ready(self) -> list[Pin]:
        """What waits for its turn, and not for room, oldest first."""
        now = time.monotonic()
        ready = (one for name, one in self.queue.items() if now >= self.not_before.get(name, 0))
        return sorted(ready, key=lambda one: one.seen.written_ns)

    def _skipped(self, one: Pin) -> WatchEvent:
        del self.queue[one.seen.name]
        one.release()
        return self._event(EventKind.SKIPPED, one.seen.name, why="a newer one is complete")

    def _export(self, one: Pin) -> None:
        name, step = one.seen.name, one.step
        again = ("--overwrite",) if self.ledger.is_ours(name) and self._is_there(name) else ()
        links = ("--follow-symlinks",) if self.boundary.follow or one.descriptors else ()
        seen = ("--as-seen", one.seen.mark)
        self.ledger.begin(one.seen, step)
        job = start_export(one.path, self.ledger.out(name), (*self.words, *again, *links, *seen))
        event = self._event(EventKind.EXPORTED, name, step)
        self.task = _Task(job, event, time.monotonic(), one)

    def _is_there(self, name: str) -> bool:
        return exists(self.ledger.out(name))

    def _command(self, name: str) -> None:
        if self._is_there(name):
            entry = self.ledger.entries[name]
            job = start_command(self.options.then, self.ledger.out(name), entry.step)
            event = self._event(EventKind.RAN, name, entry.step)
            self.task = _Task(job, event, time.monotonic())

    def _prune(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            name = checkpoint.name
            job = start_prune(checkpoint, self.ledger.out(name), self.words_of_prune)
            event = self._event(EventKind.PRUNED, name, self.ledger.entries[name].step)
            self.task = _Task(job, event, time.monotonic())

    def _wait(self) -> Iterator[WatchEvent]:
        """Let time pass, until what runs has ended or the next look is due."""
        seconds = _SETTLE_S if self.ends else self.options.interval_s
        if self.task is None:
            time.sleep(seconds)
        elif (code := self.task.job.wait(min(self.options.interval_s, BEAT_S))) is None:
            self.ledger.beat()
        else:
            task, self.task = self.task, None
            look_anew(self.ledger.out(task.event.checkpoint))
            took = time.monotonic() - task.began
            ended = (
                self._exported(task.event, task.job, task.pin, code)
                if task.pin
                else self._pruned(task.event, task.job, code)
                if task.event.event is EventKind.PRUNED
                else self._ran(task.event, code)
            )
            yield replace(ended, seconds=took)
            task.job.end()
            yield from self._retire()

    def _exported(self, event: WatchEvent, job: Job, kept: Pin, code: int) -> WatchEvent:
        """Note how an export has ended."""
        name, told = event.checkpoint, told_by(job, code)
        is_silent = told.error is not None and told.error.kind == UNTOLD
        if told.error is None or (is_silent and self.ledger.is_published(name)):
            self.ledger.end(name, is_owed=bool(self.options.then))
            self.owed += [name] * bool(self.options.then)
            kept.release()
            age = (_UNPROVED,) if kept.is_unproved else ()
            return replace(event, warnings=(*age, *told.warnings))
        mark = kept.mark_now(self.boundary)
        is_same, is_killed = mark == kept.seen.mark, code < 0 or code == _ENDED
        self.ledger.failed(name, is_changed=not is_same)
        if not is_same or not (is_killed or told.error.code == OutputError.exit_code):
            kept.release()
        elif not self.ends:
            self.queue[name] = kept
            self.not_before[name] = time.monotonic() + _RETRY_S
        elif not is_killed:  # else the next watch goes on with it
            kept.release()
        if not mark:
            why = "the run removed it before it was exported"
            return replace(event, event=EventKind.LOST, why=why)
        if not is_same:
            why = "the run saved it anew meanwhile; it is exported again when that is complete"
            self.waits[name] = why
            return replace(event, event=EventKind.CHANGED, why=why)
        return replace(event, event=EventKind.FAILED, failure=self._named(kept, told.error))

    def _named(self, kept: Pin, error: Told) -> Told:
        """An error about the checkpoint where the run has it."""
        if kept.folder is None:
            return error
        inner, outer = str(kept.folder / kept.seen.run.name), str(kept.seen.run)
        path = Path(str(error.path).replace(inner, outer)) if error.path is not None else None
        message, hint = error.message.replace(inner, outer), error.hint.replace(inner, outer)
        return Told(error.code, error.kind, path, message, hint)

    def _pruned(self, event: WatchEvent, job: Job, code: int) -> WatchEvent:
        """Note how a pruning has ended."""
        told = told_by(job, code)
        if told.error is None:
            return replace(event, nbytes_freed=told.nbytes_freed)
        if self.pruner is not None:
            self.pruner.failed(event.checkpoint, self.seen)
        return replace(event, event=EventKind.NOT_PRUNED, failure=told.error)

    def _ran(self, event: WatchEvent, code: int) -> WatchEvent:
        """Note how a command has ended."""
        if code == 0:
            self.ledger.paid(event.checkpoint)
            return event
        message = f"the command after the export ended with code {code}; it is run again when "
        message += "the watch is started again"
        told = Told(OutputError.exit_code, "command", None, message, "")
        return replace(event, event=EventKind.COMMAND_FAILED, failure=told)

    def _retire(self) -> Iterator[WatchEvent]:
        """Remove exports beyond those that are kept, if they are as they were made."""
        if self.options.keep is None:
            return
        done = sorted(
            (age for age in self._ages() if self._is_there(age.name)),
            key=lambda one: one.written_ns,
        )
        kept = newest(done, self.options.keep) | self.stay
        for name in (one.name for one in done if one.name not in kept):
            is_owed = self.ledger.entries[name].is_owed and self.options.then
            if not (is_owed or self._is_running(name)):
                yield self._removed(name)

    def _removed(self, name: str) -> WatchEvent:
        step = self.ledger.entries[name].step
        try:
            self.ledger.remove(name)
        except OutputError as error:
            self.stay.add(name)
            return self._event(EventKind.LEFT, name, step, failure=Told.of(error))
        return self._event(EventKind.REMOVED, name, step)

    def _event(
        self,
        event: EventKind,
        name: str,
        step: int | None = None,
        *,
        why: str = "",
        failure: Told | None = None,
    ) -> WatchEvent:
        return WatchEvent(event, name, step, self.ledger.out(name), failure=failure, why=why)
