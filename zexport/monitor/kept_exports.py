"""The exports of a run side by side: which older ones go, and what is to be known of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zexport.errors import OutputError, ZexportError
from zexport.monitor.best import best_names
from zexport.monitor.choices import WatchOptions
from zexport.monitor.events import EventKind, WatchEvent
from zexport.monitor.ledger import Ledger
from zexport.monitor.newest import Age, newest
from zexport.monitor.prunable import link_to, newest_of
from zexport.monitor.sightings import Sighting
from zexport.report.failure import Told
from zexport.storage.files import exists
from zexport.storage.symlink_policy import Boundary
from zexport.text import some


class Shelf:
    """The exports that a watch, or another before it, has made.

    Args:
        ledger: what is known of them.
        options: how many stay, and what is done with them.
        made_with: the words of the options by which this watch makes them.
    """

    def __init__(self, ledger: Ledger, options: WatchOptions, made_with: str) -> None:
        self._ledger = ledger
        self._options = options
        self.made_with = made_with
        self._stay: set[str] = set()
        self._meant: dict[str, str] = {}

    def news(self, there: Mapping[str, Sighting]) -> Iterator[WatchEvent]:
        """What is not made again of a run's checkpoints, though somebody may expect it."""
        done = {n: one for n, one in self._ledger.entries.items() if one.is_done}
        stands = self._ledger.standing() & done.keys()
        gone = [n for n in done if n in there and n not in stands and not done[n].is_removed]
        gone = [n for n in gone if done[n].made_with is not None]  # else nothing says who did
        if gone and not self._options.then:  # which may have moved them
            why = "its export was removed, which zexport consolidate makes again"
            yield self._not_again(gone, why)
        others: dict[str, list[str]] = {}
        for name in stands:
            if done[name].made_with not in (None, self.made_with):
                others.setdefault(done[name].made_with or "", []).append(name)
        for made_with, names in others.items():
            why = f"it was made with {made_with or 'no options'}, this watch exports with "
            yield self._not_again(names, f"{why}{self.made_with or 'none'}")

    def _not_again(self, names: list[str], why: str) -> WatchEvent:
        """One event for the newest of them, which tells of the others, too."""
        first, *more = sorted(names, key=lambda name: -self._ledger.entries[name].written_ns)
        why += f"; the same is true of {some(more, 3)}" if more else ""
        step = self._ledger.entries[first].step
        return self._ledger.event(EventKind.NOT_AGAIN, first, step, why=why)

    def retire(self, there: Mapping[str, Sighting], boundary: Boundary) -> Iterator[WatchEvent]:
        """Remove exports beyond those that are kept, if they are as they were made.

        That of the best checkpoint stays, and one that a link leads to.
        """
        if self._options.keep is None:
            return
        done = [age for age in self._ledger.ages() if exists(self._ledger.out(age.name))]
        kept = newest(done, self._options.keep) | self._stay | self._owed()
        older = [one for one in done if one.name not in kept]
        older.sort(key=lambda one: one.written_ns)
        try:
            best = _best(there, boundary) if older else set[str]()
            links = {one.name: link_to(self._ledger.out(one.name)) for one in older}
        except (ZexportError, FileNotFoundError):
            return  # one of the run is just going: the next export brings us here again
        for one in older:
            link = links[one.name]
            why = "it is the best, says the training" if one.name in best else ""
            why = f"the link `{link.name}` leads to it" if link is not None else why
            if not why:
                yield self._removed(one)
            elif self._meant.get(one.name) != why:
                self._meant[one.name] = why
                yield self._ledger.event(EventKind.LEFT, one.name, one.step, why=why)

    def _owed(self) -> set[str]:
        """Those that a command is still to be run on."""
        owed = {name for name, entry in self._ledger.entries.items() if entry.is_owed}
        return owed if self._options.then else set()

    def _removed(self, one: Age) -> WatchEvent:
        try:
            self._ledger.remove(one.name)
        except OutputError as error:
            self._stay.add(one.name)
            told = Told.of(error)
            return self._ledger.event(EventKind.LEFT, one.name, one.step, failure=told)
        return self._ledger.event(EventKind.REMOVED, one.name, one.step)


def _best(there: Mapping[str, Sighting], boundary: Boundary) -> set[str]:
    complete = [one for one in there.values() if not one.lacks(one)]
    if not complete:
        return set()
    last = newest_of(complete, boundary, 1)
    return best_names(complete[0].run, [one for one in complete if one.name in last])
