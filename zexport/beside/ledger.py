"""Which checkpoints were exported: what a watch that is started again goes by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

from zexport.beside.sightings import Sighting
from zexport.errors import OutputError
from zexport.run.manifest import MANIFEST_NAME, read_manifest
from zexport.run.staging import check_content
from zexport.store.files import read_whole, version, write_durably, writing
from zexport.store.folders import exists, is_file, make_folder, matching, move, remove
from zexport.store.publish import locked_file

_LEDGER = "ledger.json"


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
    """

    mark: str
    step: int | None
    written_ns: int
    manifest: str = ""
    found: str = ""
    is_begun: bool = False
    is_owed: bool = False

    @property
    def is_done(self) -> bool:
        """Whether an export stands, or stood until it was removed."""
        return bool(self.manifest) and not self.is_begun


class _Record(Struct, frozen=True):
    run: str
    entries: dict[str, Entry]


class Ledger:
    """The entries of one folder of exports, on the disk as soon as there is room."""

    def __init__(self, outs: Path, place: Path, run: Path) -> None:
        self._outs = outs
        self._path = place / _LEDGER
        self._run = str(run)
        self._entries = self._read()

    def _read(self) -> dict[str, Entry]:
        if not is_file(self._path):
            return {}
        try:
            record = msgspec.json.decode(read_whole(self._path), type=_Record)
        except msgspec.DecodeError as cause:
            raise OutputError(
                "is not what a watch writes",
                path=self._path,
                hint="Remove it: then every checkpoint is exported anew",
            ) from cause
        if record.run != self._run:
            raise OutputError(
                "has the exports of another run",
                path=self._outs,
                found=record.run,
                expected=self._run,
                hint="Choose another folder for this run's exports",
            )
        return record.entries

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All entries, by the checkpoint's name."""
        return self._entries

    def out(self, name: str) -> Path:
        """The export of a checkpoint."""
        return self._outs / name

    def put(self, name: str, entry: Entry) -> None:
        """Keep an entry; what a full disk has no room for is written with the next one."""
        self._entries[name] = entry
        record = msgspec.json.encode(_Record(self._run, self._entries))
        with suppress(OSError):
            write_durably(self._path, msgspec.json.format(record))

    def is_ours(self, name: str) -> bool:
        """Whether the export that is there is the one that the watch has made."""
        entry = self._entries.get(name)
        return entry is not None and bool(entry.manifest) and entry.manifest == self._digest(name)

    def begin(self, seen: Sighting, step: int | None) -> None:
        """A checkpoint is about to be exported."""
        found = self._digest(seen.name)
        ours = found if self.is_ours(seen.name) else ""
        entry = Entry(seen.mark, step, seen.written_ns, ours, found, is_begun=True)
        self.put(seen.name, entry)

    def end(self, name: str, *, is_owed: bool) -> None:
        """An export stands; a command after it may be owed."""
        entry = replace(self._entries[name], manifest=self._digest(name), is_begun=False)
        self.put(name, replace(entry, is_owed=is_owed))

    def failed(self, name: str) -> None:
        """No export came of it: what appears in its place later is somebody else's."""
        self.put(name, replace(self._entries[name], mark="", is_begun=False))

    def paid(self, name: str) -> None:
        """The command after an export has ended well."""
        self.put(name, replace(self._entries[name], is_owed=False))

    def is_exported(self, seen: Sighting) -> bool:
        """Whether this very save of a checkpoint was exported.

        An export is noted that was published when the watch was stopped.
        """
        entry = self._entries.get(seen.name)
        if entry is None or entry.mark != seen.mark:
            return False
        if entry.is_begun and self._digest(seen.name) not in ("", entry.found):
            self.end(seen.name, is_owed=True)
        return self._entries[seen.name].is_done

    def remove(self, name: str) -> None:
        """Remove an export; it loses its name first, so that nothing half-removed looks whole.

        Raises:
            OutputError: it is not as it was made, or cannot be removed.
        """
        out, away = self.out(name), self._path.parent / f"removed-{name}"
        check_content(out, overwrite=True)
        if not (self.is_ours(name) and _is_untouched(out)):
            raise OutputError("was changed since it was made", path=out, hint="Remove it yourself")
        with writing(out):
            if exists(away):
                remove(away)
            move(out, away)
            remove(away)

    def _digest(self, name: str) -> str:
        path = self.out(name) / MANIFEST_NAME
        return blake3(read_whole(path)).hexdigest() if is_file(path) else ""


def _is_untouched(out: Path) -> bool:
    """Whether every file has its size, and is as old as the manifest, which is written last."""
    made = version(out / MANIFEST_NAME).mtime_ns
    for name, entry in read_manifest(out).files.items():
        if not is_file(out / name):
            return False
        now = version(out / name)
        if now.nbytes != entry.nbytes or now.mtime_ns > made:
            return False
    return True


@contextmanager
def held(outs: Path) -> Iterator[Path]:
    """The folder of a watch's own files below the exports', while no other watch works there.

    Raises:
        OutputError: another does, or it cannot be written.
    """
    place = outs / ".zexport-watch"
    with writing(place):
        make_folder(place)
    with locked_file(place / "lock", outs, "another watch exports into this folder"):
        with writing(place):
            for left in (place / "unfinished", *matching(place, "removed-*")):
                if exists(left):
                    remove(left)
        yield place
