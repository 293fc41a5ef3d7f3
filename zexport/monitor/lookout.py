"""A run's checkpoints as a watch sees them come: what lacks something, what waits for its turn."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from zexport.errors import OutputError, ZexportError
from zexport.monitor.choices import WatchOptions
from zexport.monitor.events import EventKind, WatchEvent
from zexport.monitor.ledger import Ledger
from zexport.monitor.newest import Age, newest
from zexport.monitor.pins import Pin, pin, pins_left
from zexport.monitor.sightings import Sighting, look, out_of_reach
from zexport.report.failure import Told
from zexport.storage.files import storage_of
from zexport.storage.symlink_policy import Boundary
from zexport.text import printable

_RETRY_S = 60.0
"""A full disk may have room again after so long, or the machine memory for what it has killed."""

_A_SAVE = 1.5
"""What the next save may take of a disk, for each byte of the rank files of one before."""


class Lookout:
    """What is there of a run, and what is kept of it until it is exported.

    Attributes:
        seen: all that was there at the last look, by name.
        waits: what each checkpoint lacks that is not complete.
        left_out: those whose step is none of the steps that are wanted.
    """

    def __init__(
        self, run: Path, pins: Path, ledger: Ledger, boundary: Boundary, options: WatchOptions
    ) -> None:
        self.run = run
        self.boundary = boundary
        self.seen: dict[str, Sighting] = {}
        self.waits: dict[str, str] = {}
        self.left_out: dict[str, int | None] = {}
        self._pins = pins
        self._ledger = ledger
        self._options = options
        self._line: dict[str, Pin] = {}
        self._decided: dict[str, str] = {}
        self._not_before: dict[str, float] = {}

    def take_over(self) -> None:
        """Go on with what a stopped watch has kept: the run may remove its own at any moment."""
        for left in pins_left(self._pins):
            if self._ledger.is_exported(left.seen):
                left.release()
            else:
                self._line[left.seen.name] = left

    def there(self) -> dict[str, Sighting]:
        """The checkpoints of the run, by name.

        Raises:
            CheckpointError: it cannot be read.
        """
        return {one.name: one for one in look(self.run, self.boundary)}

    def look(self, running: Collection[str]) -> Iterator[WatchEvent]:
        """See what there is, and keep what is complete and is not exported yet, nor ``running``.

        Raises:
            CheckpointError: the run cannot be read.
        """
        seen = self.there()
        for name in self.waits.keys() - seen.keys():
            del self.waits[name]
            yield self._ledger.event(
                EventKind.LOST, name, why="the run removed it before it was complete"
            )
        for one in seen.values():
            if one.name in running or self._is_handled(one):
                continue
            earlier = None if self._ledger.has_another(one) else self.seen.get(one.name)
            if lacks := one.lacks(earlier):
                self.waits[one.name] = lacks
                continue
            self.waits.pop(one.name, None)
            yield from self._keep(one)
        for name, error in out_of_reach(self.run, seen):
            if name not in self._decided:  # it is told once
                self._decided[name] = ""
                told = Told.of(error)
                yield self._ledger.event(EventKind.FAILED, printable(name), failure=told)
        self.seen = seen
        yield from self._make_room()

    def _is_handled(self, one: Sighting) -> bool:
        is_decided = one.name in self._line or self._decided.get(one.name) == one.mark
        return is_decided or self._ledger.is_exported(one) or not self._is_time_for(one.name)

    def _keep(self, one: Sighting) -> Iterator[WatchEvent]:
        """Keep a checkpoint that is to be exported."""
        self._decided[one.name] = one.mark
        step = one.step(self.boundary)
        if step is not None and step % self._options.every:
            self.left_out[one.name] = step
            return
        if self._is_overtaken(Age(one.name, step, one.written_ns)):
            return
        try:
            self._line[one.name] = pin(one, step, self._pins, self.boundary)
        except FileNotFoundError:
            why = "the run removed it before it could be kept"
            yield self._ledger.event(EventKind.LOST, one.name, step, why=why)
        except ZexportError as error:
            if error.exit_code == OutputError.exit_code:  # as where OUTS is gone for a moment
                del self._decided[one.name]
                self._not_before[one.name] = time.monotonic() + _RETRY_S
            yield self._ledger.event(EventKind.FAILED, one.name, step, failure=Told.of(error))

    def _make_room(self) -> Iterator[WatchEvent]:
        """Let go of what the run has removed, oldest first, where its disk is full without that.

        A training that is refused room for its next save ends.
        """
        for one in sorted(self._line.values(), key=lambda each: each.seen.written_ns):
            there = self.seen.get(one.seen.name)
            if one.folder is None or (there is not None and there.mark == one.seen.mark):
                continue
            with suppress(OSError):  # no run's folder, no training
                if (storage_of(self.run).free_nbytes(self.run) or 0) < one.seen.nbytes * _A_SAVE:
                    self.let_go(one.seen.name)
                    why = "the run removed it, and its disk needs the room for the next save"
                    yield self._ledger.event(EventKind.LOST, one.seen.name, one.step, why=why)

    def _is_overtaken(self, one: Age) -> bool:
        """Whether newer exports make that of a checkpoint one that would not be kept."""
        kept = 1 if self._options.newest_only else self._options.keep
        exported = [age for age in self._ledger.ages() if age.name != one.name]
        return kept is not None and one.name not in newest((*exported, one), kept)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for its turn."""
        return not self._line

    def may_settle(self, seconds: float) -> bool:
        """Whether something that lacks something was written so lately that it may be complete."""
        return any(one.age_s < seconds for one in self.seen.values() if one.name in self.waits)

    def skip(self) -> Iterator[WatchEvent]:
        """Let go of what a newer one has overtaken, where that is wanted."""
        ready = self._ready()
        ages = (Age(one.seen.name, one.step, one.seen.written_ns) for one in ready)
        kept = newest(ages, 1) if self._options.newest_only else {one.seen.name for one in ready}
        for one in ready:
            if one.seen.name not in kept:
                self.let_go(one.seen.name)
                why = "a newer one is complete"
                yield self._ledger.event(EventKind.SKIPPED, one.seen.name, one.step, why=why)

    def take(self, but: str | None) -> Pin | None:
        """What is next, which waits no more; ``but`` waits while a command is at its export."""
        ready = [one for one in self._ready() if one.seen.name != but]
        return self._line.pop(ready[0].seen.name) if ready else None

    def _ready(self) -> list[Pin]:
        """What waits for its turn, and not for room, oldest first."""
        ready = (one for name, one in self._line.items() if self._is_time_for(name))
        return sorted(ready, key=lambda one: one.seen.written_ns)

    def _is_time_for(self, name: str) -> bool:
        return time.monotonic() >= self._not_before.get(name, 0.0)

    def put_back(self, one: Pin) -> None:
        """Have it wait for room, and for its turn."""
        self._line[one.seen.name] = one
        self._not_before[one.seen.name] = time.monotonic() + _RETRY_S

    def let_go(self, name: str) -> None:
        """Keep a checkpoint no more, if it is kept."""
        if name in self._line:
            self._line.pop(name).release()
