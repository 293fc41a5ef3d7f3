"""Checkpoints kept while they wait for their export, whatever a rotation removes meanwhile.

A pin is a second folder of hard links under the same names. On another file system, and in a
bucket, checkpoints are read in place: a rotation can remove them meanwhile. Nothing is written into
the checkpoint's own folder, whose time is what a rotation goes by (transformers 5.23,
``trainer_utils.py``).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

from zexport.errors import CheckpointError, ZexportError
from zexport.monitor.sightings import Sighting, sighting
from zexport.report.failure import Told
from zexport.storage.files import (
    children,
    exists,
    is_file,
    is_folder,
    is_link,
    is_local,
    leaves,
    make_folder,
    real,
    refresh,
    remove,
)
from zexport.storage.local import hard_link, rename, symlink
from zexport.storage.location import cache_folder
from zexport.storage.os_errors import writing
from zexport.storage.symlink_policy import Boundary


class Pin(Struct, frozen=True):
    """A checkpoint that stays until it is exported.

    Attributes:
        seen: the checkpoint.
        step: the optimizer steps that it records.
        folder: the pin's own folder; without one the checkpoint is read where it lies.
        is_unproved: whether nothing but its age says that it is complete.
    """

    seen: Sighting
    step: int | None
    folder: Path | None = None
    is_unproved: bool = False

    @property
    def path(self) -> Path:
        """The folder to export."""
        if self.folder is None:
            return self.seen.folder
        return self.folder / self.seen.run.name / self.seen.name

    def named(self, error: Told) -> Told:
        """An error about the checkpoint where the run has it."""
        if self.folder is None:
            return error
        inner, outer = str(self.folder / self.seen.run.name), str(self.seen.run)
        path = Path(str(error.path).replace(inner, outer)) if error.path is not None else None
        message, hint = error.message.replace(inner, outer), error.hint.replace(inner, outer)
        return replace(error, path=path, message=message, hint=hint)

    def mark_now(self, boundary: Boundary) -> str:
        """The mark of what is there now, which a link shows, too; empty where nothing is."""
        if self.folder is not None:
            boundary = Boundary.of(self.path.parent)
        try:
            refresh(self.path)
            return sighting(self.path.parent, self.path.name, boundary).mark
        except (CheckpointError, OSError):  # in doubt nothing has changed: this may be all of it
            is_there = exists(self.path / self.seen.tag_dir.relative_to(self.seen.folder))
            return self.seen.mark if is_there else ""

    def release(self) -> None:
        """Let go of the files."""
        if self.folder is not None and exists(self.folder):
            with writing(self.folder):
                remove(self.folder)


def pins_folder(outs: Path, own: Path) -> Path:
    """Where pins for exports to ``outs`` are kept: with the watch's ``own`` files, or on a disk."""
    if is_local(outs):
        return own / "pins"
    name = blake3(str(outs).encode()).hexdigest()[:16]
    return cache_folder() / "zexport" / f"watch-{name}" / "pins"


def pin(seen: Sighting, step: int | None, place: Path, boundary: Boundary) -> Pin:
    """Keep a checkpoint of that step, with the files beside it in the run, in ``place``.

    A link that leads out of the run stays one, which the export refuses if it needs it.

    Raises:
        FileNotFoundError: it was removed meanwhile.
        OutputError: ``place`` cannot be written.
    """
    folder, unfinished = place / seen.name, place.with_name("unfinished")
    unkept = Pin(seen, step, is_unproved=seen.is_unproved)
    if not is_local(seen.run):
        return unkept
    try:
        _fill(unfinished, seen, boundary)
        with writing(place):
            make_folder(place)  # anew, where somebody has removed all exports
            rename(unfinished, folder)
    except BaseException as error:
        with suppress(OSError):
            remove(unfinished)
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            return unkept  # what cannot be kept is read where it lies
        raise
    return replace(unkept, folder=folder)


def _fill(unfinished: Path, seen: Sighting, boundary: Boundary) -> None:
    kept: list[Path] = []
    for path in _files(seen):
        target = unfinished / seen.run.name / path.relative_to(seen.run)
        with writing(unfinished):
            make_folder(target.parent)
        kept.append(path)
        if boundary.holds(path):
            hard_link(real(path), target)
        else:
            symlink(real(path), target)
    there = {*kept}
    wanted = [*kept, *(seen.tag_dir / name for name in seen.versions)]
    if gone := next((one for one in wanted if one not in there or not exists(one)), None):
        raise FileNotFoundError(errno.ENOENT, "was removed meanwhile", str(gone))


def pins_left(place: Path) -> Iterator[Pin]:
    """The pins that a watch which was stopped has left; what is not whole is removed."""
    for folder in children(place) if is_folder(place) else ():
        run = next(iter(children(folder)), folder)
        within = Boundary.of(run)
        try:
            left = sighting(run, folder.name, within)
        except (ZexportError, FileNotFoundError):
            left = None
        if left is not None and left.versions:
            yield Pin(left, left.step(within), folder, is_unproved=left.is_unproved)
        else:
            with writing(folder):
                remove(folder)


def _files(seen: Sighting) -> Iterator[Path]:
    """The files of a checkpoint, and those that lie in the run beside it."""
    yield from filter(_is_wanted, leaves(seen.folder))
    if is_link(seen.tag_dir):
        yield from filter(_is_wanted, leaves(seen.tag_dir))
    yield from (path for path in children(seen.run) if is_file(path) and path.name != "latest")


def _is_wanted(path: Path) -> bool:
    """Whether it is a file, or was one a moment ago."""
    return is_file(path) or not (exists(path) or is_link(path))
