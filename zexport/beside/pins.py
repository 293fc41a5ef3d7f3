"""Checkpoints kept while they wait for their export, whatever a rotation removes meanwhile.

A pin is a second folder of the same names: hard links to the files, or, on another file system,
links to them as this process has them open. Nothing is written into the checkpoint's own folder,
whose time is what a rotation goes by (transformers 5.23, ``trainer_utils.py``).
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from zexport.beside.sightings import Sighting, sighting
from zexport.errors import ZexportError
from zexport.store.boundary import Boundary
from zexport.store.files import writing
from zexport.store.folders import (
    children,
    exists,
    is_file,
    is_folder,
    leaves,
    make_folder,
    real,
    remove,
)

_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What a system says that cannot link one file twice."""

_OPEN_FILES = Path(f"/proc/{os.getpid()}/fd")


class Pin(Struct, frozen=True):
    """A checkpoint that stays until it is exported.

    Attributes:
        seen: the checkpoint.
        step: the optimizer steps that it records.
        folder: the pin's own folder; without one the checkpoint is read where it lies.
        descriptors: the files that are open for it.
    """

    seen: Sighting
    step: int | None
    folder: Path | None = None
    descriptors: tuple[int, ...] = ()

    @property
    def path(self) -> Path:
        """The folder to export."""
        if self.folder is None:
            return self.seen.folder
        return self.folder / self.seen.run.name / self.seen.name

    def release(self) -> None:
        """Let go of the files."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        if self.folder is not None and exists(self.folder):
            with writing(self.folder):
                remove(self.folder)


def pin(seen: Sighting, step: int | None, place: Path, boundary: Boundary) -> Pin:
    """Keep a checkpoint of that step, with the files beside it in the run, in ``place``.

    Raises:
        FileNotFoundError: it was removed meanwhile.
        UnsafeError: a link leads outside the run.
        OutputError: ``place`` cannot be written.
    """
    folder, unfinished = place / seen.name, place / f"{seen.name}.new"
    descriptors: list[int] = []
    try:
        for path in _files(seen):
            boundary.check(path)
            target = unfinished / seen.run.name / path.relative_to(seen.run)
            with writing(place):
                make_folder(target.parent)
            _link(real(path), target, descriptors)
        with writing(place):
            unfinished.rename(folder)
    except _NoPinError:
        _undo(unfinished, descriptors)
        return Pin(seen, step)
    except BaseException:
        _undo(unfinished, descriptors)
        raise
    return Pin(seen, step, folder, tuple(descriptors))


def pins_left(place: Path) -> Iterator[Pin]:
    """The pins that a watch which was stopped has left; what is not whole is removed."""
    for folder in children(place) if is_folder(place) else ():
        run = next(iter(children(folder)), folder)
        within = Boundary.of(run)
        try:
            left = sighting(run, folder.name, within)
            yield Pin(left, left.step(within), folder)
        except (ZexportError, FileNotFoundError):
            with writing(folder):
                remove(folder)


class _NoPinError(Exception):
    """The system can keep no file of a folder that is removed."""


def _files(seen: Sighting) -> Iterator[Path]:
    """The files of a checkpoint, and those that lie in the run beside it."""
    yield from (path for path in leaves(seen.folder) if is_file(path))
    yield from (path for path in children(seen.run) if is_file(path) and path.name != "latest")


def _link(path: Path, target: Path, descriptors: list[int]) -> None:
    """Give a file a second name, or this process's open one."""
    try:
        os.link(path, target)
    except OSError as cause:
        if cause.errno not in _NO_LINKS:
            raise
        _link_open(path, target, descriptors)


def _link_open(path: Path, target: Path, descriptors: list[int]) -> None:
    if not is_folder(_OPEN_FILES):
        raise _NoPinError
    _let_open_more(len(descriptors))
    try:
        descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as cause:
        if cause.errno == errno.EMFILE:
            raise _NoPinError from cause
        raise
    target.symlink_to(_OPEN_FILES / str(descriptors[-1]))


def _let_open_more(count: int) -> None:
    """Take as many open files as the system allows, once some are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count == 0 and soft < hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _undo(unfinished: Path, descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(OSError):
        remove(unfinished)
