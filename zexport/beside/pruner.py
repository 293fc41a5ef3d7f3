"""Which of a run's exported checkpoints a watch prunes next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from zexport.beside.ledger import Ledger
from zexport.beside.prunable import check_prunable, newest_of, place_of
from zexport.beside.sightings import Sighting
from zexport.checkpoint.pruned import NOTE, PREFIX, pruned_name
from zexport.errors import UsageError, ZexportError
from zexport.options import ExportOptions
from zexport.store.address import Address
from zexport.store.boundary import Boundary
from zexport.store.files import writing
from zexport.store.folders import exists, matching, remove
from zexport.store.publish import locked, workplaces

_AGAIN_S = 60.0
"""So long after nothing was found, the same checkpoints are looked at again, older by then."""


def words_of_prune(run: Path, export: ExportOptions) -> tuple[str, ...]:
    """The words by which ``zexport prune`` takes a watch's exports.

    Raises:
        UsageError: nothing of this run, or by such exports, is ever pruned.
    """
    if isinstance(run, Address):
        raise UsageError("nothing is pruned in object storage", path=run, hint="Leave --prune out")
    for is_given, option in (
        (export.exclude_frozen, "--exclude-frozen"),
        (export.allow, "--allow"),
    ):
        if is_given:
            raise UsageError(
                f"no export with {option} stands for its checkpoint, which --prune needs",
                hint=f"Leave out --prune, or {option}",
            )
    words = [f"--check={export.check.value}"]
    words += [f"--base={export.base}"] if export.base is not None else []
    config = export.adapter_config
    return (*words, *([f"--adapter-config={config}"] if config is not None else []))


def is_gone(run: Path, name: str) -> bool:
    """Whether a run has removed a checkpoint, pruned or not, as a rotation does at any moment."""
    return not (exists(run / name) or exists(pruned_name(run / name)))


class Pruner:
    """What is left to be pruned of a run, but for so many of its newest checkpoints.

    Attributes:
        words: those by which ``zexport prune`` takes the exports.
    """

    def __init__(self, ledger: Ledger, boundary: Boundary, keep: int, words: Sequence[str]) -> None:
        self.words = words
        self._ledger = ledger
        self._boundary = boundary
        self._keep = keep
        self._tried: dict[str, str] = {}
        self._seen: frozenset[tuple[str, bool]] | None = None
        self._until = 0.0

    def failed(self, name: str, seen: Mapping[str, Sighting]) -> None:
        """It is not tried again before its files change."""
        self._tried[name] = seen[name].mark if name in seen else ""

    def next(self, run: Path, seen: Mapping[str, Sighting]) -> Path | None:
        """The oldest checkpoint that may be pruned, under the name that it was saved by."""
        marks = frozenset((one.mark, self._ledger.is_exported(one)) for one in seen.values())
        if marks == self._seen and time.monotonic() < self._until:
            return None
        self._sweep(run)
        found = next(self._left(run), None) or next(self._may_go(seen), None)
        self._seen, self._until = (None, 0.0) if found else (marks, time.monotonic() + _AGAIN_S)
        return found

    def _sweep(self, run: Path) -> None:
        """Remove what killed prunings have written for checkpoints that are gone since."""
        there = matching(run, f"{PREFIX}*")
        for name in self._ledger.entries if there else ():
            target = pruned_name(run / name)
            partial, _ = workplaces(target)
            if partial in there and is_gone(run, name):
                with suppress(ZexportError), locked(target, seconds=0), writing(partial):
                    remove(partial)

    def _left(self, run: Path) -> Iterator[Path]:
        """What a pruning that was stopped has renamed already."""
        for name, entry in self._ledger.entries.items():
            target = pruned_name(run / name)
            if entry.is_done and name not in self._tried and exists(target):
                is_noted = exists(target / NOTE) or matching(target, f"*/{NOTE}")
                if not is_noted or exists(workplaces(target)[0]):
                    yield run / name

    def _may_go(self, seen: Mapping[str, Sighting]) -> Iterator[Path]:
        exported = [one for one in seen.values() if self._is_exported(one)]
        if not exported:
            return
        complete = [one for one in seen.values() if not one.lacks(one) and one.is_resumable()]
        kept = newest_of(complete, self._boundary, self._keep)
        for one in sorted(exported, key=lambda each: each.written_ns):
            if one.name not in kept and _is_prunable(one):
                yield one.folder

    def _is_exported(self, one: Sighting) -> bool:
        is_new = self._tried.get(one.name) != one.mark
        return is_new and self._ledger.is_exported(one) and self._ledger.is_ours(one.name)


def _is_prunable(one: Sighting) -> bool:
    """Whether nothing speaks against it, such as that it is the best; if it is still there.

    An older save that was pruned and is in the way is for the pruning to tell.
    """
    if exists(pruned_name(one.folder)):
        return True
    try:
        check_prunable(place_of(one.folder, None), is_pruned=False)
    except (ZexportError, FileNotFoundError):
        return False
    return True
