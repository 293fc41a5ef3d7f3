"""Which checkpoints were exported: what a watch that is started again goes by.

In object storage there are no locks. There the ledger is written only where it is as this watch has
left it, so that of two watches one finds that out before it exports anything.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

from zexport.errors import OutputError
from zexport.export.overwrite import check_content
from zexport.filenames import MANIFEST_NAME
from zexport.monitor.events import EventKind, WatchEvent
from zexport.monitor.newest import Age
from zexport.monitor.sightings import Sighting
from zexport.report.failure import Told
from zexport.storage.contents import read_edition, read_whole, rewrite
from zexport.storage.files import (
    child_folders,
    exists,
    is_file,
    is_local,
    make_folder,
    matching,
    refresh,
    remove,
    write_durably,
)
from zexport.storage.local import rename
from zexport.storage.location import place
from zexport.storage.locks import locked_file
from zexport.storage.os_errors import reading, writing

if TYPE_CHECKING:
    from zexport.storage.requests import Edition

OWN_FOLDER = ".zexport-watch"
"""Of a watch, in the folder of its exports."""

_LEDGER = "ledger.json"

BEAT_S = 10.0
"""While it exports into a bucket, a watch shows that it works as often as this."""


class Entry(Struct, frozen=True):
    """One checkpoint that was exported, or is about to be.

    Attributes:
        mark: the checkpoint's files, as they were; empty where no export came of them.
        step: the optimizer steps that it records.
        written_ns: when the last of its files was written.
        manifest: digest of the manifest of the export that the watch has made last.
        found: that of the one which lay in the export's place when this one was begun.
        is_begun: whether it is being made.
        is_owed: whether the command after it has not ended well yet.
        made_with: the words of the export's options; ``None`` where they were not noted.
        is_removed: whether a watch has removed the export since.
    """

    mark: str
    step: int | None
    written_ns: int
    manifest: str = ""
    found: str = ""
    is_begun: bool = False
    is_owed: bool = False
    made_with: str | None = None
    is_removed: bool = False

    @property
    def is_done(self) -> bool:
        """Whether an export stands, or stood until it was removed."""
        return bool(self.manifest) and not self.is_begun


class _Record(Struct, frozen=True):
    run: str
    entries: dict[str, Entry]
    beat: int = 0
    """How often it was written: while a watch works in a bucket, it goes on counting."""


class Ledger:
    """The entries of one folder of exports, on the disk as soon as there is room."""

    def __init__(self, outs: Path, place: Path, run: Path, marks: Collection[str] = ()) -> None:
        """Read it; a run that has one of its ``marks`` still, and none in its place, was moved."""
        self._outs = outs
        self._path = place / _LEDGER
        self._run = str(run)
        self._marks = marks
        self._known: Edition | None = None
        self._sent = b""
        record = self._read()
        if any(one.is_begun for one in record.entries.values()):
            self._check_stopped()
        self._entries, self._beat = record.entries, record.beat

    def _read(self) -> _Record:
        if not is_file(self._path):
            return _Record(self._run, {})
        content, self._known = read_edition(self._path)
        try:
            record = msgspec.json.decode(content, type=_Record)
        except msgspec.DecodeError as cause:
            raise OutputError(
                "is not what a watch writes",
                path=self._path,
                hint="Choose another folder; or remove it and the exports, which are all made anew",
            ) from cause
        is_known = any(one.mark in self._marks for one in record.entries.values())
        is_moved = is_known and not exists(place(record.run))
        if record.run != self._run and not is_moved:
            raise OutputError(
                "has the exports of another run",
                path=self._outs,
                found=record.run,
                expected=self._run,
                hint="Choose another folder for this run's exports",
            )
        return record

    def _check_stopped(self) -> None:
        """Refuse to begin where another watch exports: it counts on meanwhile."""
        end = time.monotonic() + 2.5 * BEAT_S
        while not is_local(self._path) and time.monotonic() < end:
            time.sleep(BEAT_S / 10)
            if read_edition(self._path)[1] != self._known:
                raise self._other()

    def _other(self) -> OutputError:
        hint = "Wait for it, or choose another folder"
        return OutputError("another watch exports into this folder", path=self._outs, hint=hint)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All entries, by the checkpoint's name."""
        return self._entries

    def out(self, name: str) -> Path:
        """The export of a checkpoint."""
        return self._outs / name

    def event(
        self,
        event: EventKind,
        name: str,
        step: int | None = None,
        *,
        why: str = "",
        failure: Told | None = None,
    ) -> WatchEvent:
        """What a watch tells of a checkpoint, and of where its export lies."""
        return WatchEvent(event, name, step, self.out(name), failure=failure, why=why)

    def standing(self) -> set[str]:
        """Names of all folders beside it, which one request tells."""
        with reading(self._outs):
            return {folder.name for folder, _ in child_folders(self._outs)}

    def put(self, name: str, entry: Entry) -> None:
        """Keep an entry; what a full disk has no room for is written with the next one."""
        self._entries[name] = entry
        self._write()

    def beat(self) -> None:
        """Show other watches that this one works."""
        if not is_local(self._path):
            self._write()

    def _write(self) -> None:
        self._beat += 1
        record = msgspec.json.encode(_Record(self._run, self._entries, self._beat))
        before, self._sent = self._sent, msgspec.json.format(record)
        with suppress(OSError):
            try:
                self._known = rewrite(self._path, self._sent, self._known)
            except FileExistsError as cause:
                there, self._known = read_edition(self._path)
                if there != before:
                    raise self._other() from cause
                # what was written before had seemed to fail
                self._known = rewrite(self._path, self._sent, self._known)

    def is_ours(self, name: str) -> bool:
        """Whether the export that is there is the one that the watch has made."""
        entry = self._entries.get(name)
        return entry is not None and bool(entry.manifest) and entry.manifest == self._digest(name)

    def ages(self) -> Iterator[Age]:
        """Those of what was exported."""
        for name, entry in self._entries.items():
            if entry.is_done:
                yield Age(name, entry.step, entry.written_ns)

    def begin(self, seen: Sighting, step: int | None, made_with: str) -> None:
        """A checkpoint is about to be exported."""
        found, before = self._digest(seen.name), self._entries.get(seen.name)
        ours = found if self.is_ours(seen.name) else ""
        if before is not None and before.is_begun:  # that one may still publish, or just has
            found = before.found
        entry = Entry(seen.mark, step, seen.written_ns, ours, found, is_begun=True)
        self.put(seen.name, replace(entry, made_with=made_with))

    def end(self, name: str, *, is_owed: bool) -> None:
        """An export stands; a command after it may be owed."""
        entry = replace(self._entries[name], manifest=self._digest(name), is_begun=False)
        self.put(name, replace(entry, is_owed=is_owed))

    def failed(self, name: str, *, is_changed: bool) -> None:
        """No export came of it: what appears in its place later is somebody else's.

        With ``is_changed`` because another save took its place.
        """
        entry = self._entries[name]
        mark = entry.mark if is_changed else ""
        self.put(name, replace(entry, mark=mark, is_begun=False))

    def paid(self, name: str) -> None:
        """The command after an export has ended well."""
        self.put(name, replace(self._entries[name], is_owed=False))

    def is_published(self, name: str) -> bool:
        """Whether an export that was begun stands, which its process may not have told any more."""
        entry = self._entries[name]
        return entry.is_begun and self._digest(name) not in ("", entry.found)

    def is_exported(self, seen: Sighting) -> bool:
        """Whether this very save of a checkpoint was exported."""
        entry = self._entries.get(seen.name)
        return entry is not None and entry.mark == seen.mark and entry.is_done

    def has_another(self, seen: Sighting) -> bool:
        """Whether another save of a checkpoint was exported, or went as it was."""
        entry = self._entries.get(seen.name)
        return entry is not None and entry.mark not in ("", seen.mark)

    def remove(self, name: str) -> None:
        """Remove an export; it loses its name first, so that nothing half-removed looks whole.

        Raises:
            OutputError: it is not as it was made, or cannot be removed.
        """
        out, away = self.out(name), self._path.parent / f"removed-{name}"
        check_content(out, overwrite=True, is_checkpoint=False)
        if not self.is_ours(name):
            raise OutputError("was changed since it was made", path=out, hint="Remove it yourself")
        before = self._entries[name]
        self.put(name, replace(before, is_removed=True))
        try:
            with writing(out):
                _remove_by(away, out)
        except OutputError:
            self.put(name, before)
            raise

    def _digest(self, name: str) -> str:
        path = self.out(name) / MANIFEST_NAME
        return blake3(read_whole(path)).hexdigest() if is_file(path) else ""


def _remove_by(away: Path, out: Path) -> None:
    """Remove an export, which has another name meanwhile; an object beside a bucket's says so."""
    if not is_local(away):
        write_durably(away, b"")
        _remove_object_folder(out)
    else:
        if exists(away):
            remove(away)
        rename(out, away)
    remove(away)


def _remove_object_folder(out: Path) -> None:
    """Remove an export from a bucket: its manifest first, without which it is none."""
    if is_file(out / MANIFEST_NAME):
        remove(out / MANIFEST_NAME)
    if exists(out):
        remove(out)


@contextmanager
def held(outs: Path) -> Iterator[Path]:
    """The folder of a watch's own files below the exports', while no other watch works there.

    Raises:
        OutputError: another does, or it cannot be written.
    """
    place = outs / OWN_FOLDER
    with writing(place):
        make_folder(place)
    if not is_local(place):
        with writing(place):
            refresh(place)
            for left in matching(place, "removed-*"):
                _remove_object_folder(outs / left.name.removeprefix("removed-"))
                remove(left)
        yield place
        return
    with locked_file(place / "lock", outs, "another watch exports into this folder"):
        with writing(place):
            for left in (place / "unfinished", *matching(place, "removed-*")):
                if exists(left):
                    remove(left)
        yield place
