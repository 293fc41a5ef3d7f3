"""Look at, read, write and remove files by path, in the storage that the path names.

A folder of a bucket is a common prefix of object names.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zexport.errors import OutputError
from zexport.storage.local import LOCAL
from zexport.storage.location import Address, place
from zexport.storage.os_errors import HINTS, reading, writing
from zexport.storage.storage import InputFile, Kind, OutputFile, Storage, Version

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Start of a file that ``git lfs pull`` has not replaced yet."""

_BLOCK_NBYTES = 1 << 20


def storage_of(path: Path) -> Storage[Any]:
    if not isinstance(path, Address):
        return LOCAL
    from zexport.storage.bucket import BUCKETS  # noqa: PLC0415 - imports obstore

    return BUCKETS


def is_local(path: Path) -> bool:
    """Whether a path is on this machine's file systems."""
    return not isinstance(path, Address)


def _kind(path: Path) -> Kind | None:
    found = storage_of(path).stat(path)
    return None if found is None else found.kind


def is_file(path: Path) -> bool:
    """Whether it is a regular file or an object."""
    return _kind(path) is Kind.FILE


def is_folder(path: Path) -> bool:
    """Whether it is a folder; in a bucket, whether there are objects below it."""
    return _kind(path) is Kind.FOLDER


def exists(path: Path) -> bool:
    """Whether it names anything, links followed."""
    return _kind(path) is not None


def is_link(path: Path) -> bool:
    return is_local(path) and path.is_symlink()


def children(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted."""
    return sorted(folder / entry.name for entry in storage_of(folder).entries(folder))


def child_folders(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders and links in a folder, unsorted, each with whether it is a link."""
    for entry in storage_of(folder).entries(folder):
        if entry.is_link or entry.kind is Kind.FOLDER:
            yield folder / entry.name, entry.is_link


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder that match a pattern, sorted; none if there is no folder."""
    first, _, rest = pattern.partition("/")
    names = (one.name for one in storage_of(folder).entries(folder)) if is_folder(folder) else ()
    found = sorted(folder / name for name in names if fnmatchcase(name, first))
    return [p for one in found for p in matching(one, rest)] if rest else found


def subfolders(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield a folder and all below it, each with whether it has content; links are not followed."""
    found = storage_of(folder).entries(folder)
    yield folder, bool(found)
    for name in sorted(e.name for e in found if e.kind is Kind.FOLDER and not e.is_link):
        yield from subfolders(folder / name)


def leaves(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder except folders with content; links are not followed.

    Some stores list folders of a versioned bucket in which everything is deleted: skipped.
    """
    storage = storage_of(folder)
    for entry in sorted(storage.entries(folder), key=lambda one: one.name):
        path = folder / entry.name
        is_inner = entry.kind is Kind.FOLDER and not entry.is_link
        if is_inner and (not is_local(path) or storage.entries(path)):
            yield from leaves(path)
        else:
            yield path


def names_below(folder: Path) -> set[str]:
    """Return the paths of ``leaves``, relative to the folder."""
    return {path.relative_to(folder).as_posix() for path in leaves(folder)}


def real(path: Path) -> Path:
    """Return the path with links resolved."""
    found: Path = storage_of(path).real(path)
    return found


def absolute(path: Path) -> Path:
    """Return the absolute path with links; a relative one if the working directory was removed."""
    try:
        return place(path.absolute()) if is_local(path) else path
    except FileNotFoundError:
        return path


def refresh(folder: Path, *, below: bool = False) -> None:
    """Forget cached listings of a bucket; with ``below``, list the folder and all below it."""
    storage_of(folder).refresh(folder, below=below)


def make_folder(path: Path) -> None:
    """Create a folder and its parents if missing."""
    storage_of(path).make_folder(path)


def remove(*paths: Path) -> None:
    """Remove files, links, and folders with their content, of one storage; objects together."""
    if paths:
        storage_of(paths[0]).delete([*paths])


def remove_durably(folder: Path) -> None:
    """Remove a folder and flush that, before its lock goes, which marks the folder as ours."""
    remove(folder)
    sync_path(folder.parent)


def version(path: Path) -> Version:
    return storage_of(path).version(path)


def listed_version(path: Path) -> Version:
    """Return the version of a file; of an object as listed, comparable only with such."""
    found = storage_of(path).stat(path)
    if found is None or found.version is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such file", path)
    return found.version


def changed_ns(path: Path) -> int | None:
    """Return when a file last changed in any way, which no copy can set; ``None`` if missing."""
    try:
        found = storage_of(path).stat(path)
    except OSError:
        return None
    return None if found is None else found.changed_ns


def identity(path: Path) -> str:
    """Return a text that differs once a file is changed or touched."""
    return f"{version(path)} {changed_ns(path)}" if is_local(path) else str(version(path))


def open_input(path: Path, known: Version | None = None) -> InputFile:
    """Open a regular file to read; refuse devices, and an object that is not ``known``."""
    return storage_of(path).open(path, known)


def open_output(path: Path, *, is_new: bool, nbytes: int = 0) -> OutputFile:
    """Open a file of at most ``nbytes`` to write; a local one must not exist if ``is_new``."""
    with writing(path):
        return storage_of(path).create(path, is_new=is_new, nbytes=nbytes)


def write_durably(path: Path, content: bytes, *, is_new: bool = False) -> None:
    """Write a small file durably and atomically.

    Raises:
        FileExistsError: an object exists with other content, and ``is_new``.
    """
    storage_of(path).put(path, content, is_new=is_new)


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    storage_of(path).sync(path)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise unless the file system of a folder has ``nbytes`` bytes free."""
    with writing(folder):
        free = storage_of(folder).free_nbytes(folder)
    if free is not None and free < nbytes:
        raise OutputError(
            "not enough disk space",
            path=folder,
            found=f"{free} bytes free",
            expected=f"at least {nbytes}",
            hint=HINTS[errno.ENOSPC],
        )


def read_whole(path: Path) -> bytes:
    """Return the content of a file, however large."""
    with open_input(path) as file:
        return file.read_at(0, file.version().nbytes)


def read_regular(path: Path, nbytes_max: int) -> bytes | None:
    """Return the content of a file; ``None`` if it has more than ``nbytes_max`` bytes."""
    content = read_range(path, 0, nbytes_max + 1)
    return content if len(content) <= nbytes_max else None


def read_range(path: Path, offset: int, nbytes: int) -> bytes:
    """Return ``nbytes`` bytes of a file from ``offset``, fewer only at its end."""
    with open_input(path) as file:
        return file.read_at(offset, nbytes)


class FileBytes:
    """A file to read like ``bytes``, mostly forward; a megabyte is in memory."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._start = 0
        self._held = b""

    def __len__(self) -> int:
        return self._file.version().nbytes

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self._read(place.start, place.stop)
        return self._read(place, place + 1)[0]

    def find(self, wanted: bytes, start: int, stop: int) -> int:
        """Find a single byte."""
        while start < stop and self._read(start, start + 1):
            at = self._held.find(wanted, start - self._start, stop - self._start)
            if at >= 0:
                return self._start + at
            start = self._start + len(self._held)
        return -1

    def _read(self, start: int, stop: int) -> bytes:
        if start < self._start or stop > self._start + len(self._held):
            self._start = start
            self._held = self._file.read_at(start, max(stop - start, _BLOCK_NBYTES))
        return self._held[start - self._start : stop - self._start]


def same_bytes(one: Path, other: Path) -> bool:
    with reading(other), open_input(one) as left, open_input(other) as right:
        nbytes = left.version().nbytes
        return nbytes == right.version().nbytes and all(
            left.read_at(at, _BLOCK_NBYTES) == right.read_at(at, _BLOCK_NBYTES)
            for at in range(0, nbytes, _BLOCK_NBYTES)
        )
