"""What a local file system and a bucket can both do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from msgspec import Struct

P = TypeVar("P", bound=Path)


class Version(Struct, frozen=True):
    """Size and modification time of a file, to notice changes; an object's ETag, to bind reads."""

    nbytes: int
    mtime_ns: int
    etag: str = ""

    def __str__(self) -> str:
        if self.etag:
            return f"{self.nbytes} bytes, ETag {self.etag}"
        return f"{self.nbytes} bytes, modified at {self.mtime_ns} ns"


class Kind(Enum):
    FILE = "file"
    FOLDER = "folder"
    OTHER = "other"


class Stat(Struct, frozen=True):
    """What a path names, links followed; an object as its folder lists it."""

    kind: Kind
    version: Version | None = None
    changed_ns: int | None = None


class Entry(Struct, frozen=True):
    """A name in a folder; ``kind`` is that of a link's target."""

    name: str
    kind: Kind
    is_link: bool = False


class OpenFile:
    """A file that several threads may use."""

    path: Any

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; closing twice does nothing."""


class InputFile(OpenFile, ABC):
    """A regular file to read."""

    @abstractmethod
    def version(self) -> Version:
        """Return the version; all reads of an object are of this one."""

    @abstractmethod
    def read(self, offset: int, part: memoryview) -> int:
        """Read bytes from ``offset`` into ``part``; return how many, 0 only at the end."""

    @abstractmethod
    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes from ``offset``, fewer only at the end."""

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce ranges (start, stop) that will each be read once, to be fetched early."""

    def forget(self) -> None:
        """Drop cached pages, so that the next read comes from the disk."""


class OutputFile(OpenFile, ABC):
    """A file to write; errors are ``OutputError``."""

    @abstractmethod
    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write ``data`` at ``offset``."""

    def reserve(self, nbytes: int) -> None:
        """Set the size, and allocate it if the file system can."""

    def sync(self) -> None:
        """Flush to the disk; does nothing once closed."""

    def complete(self) -> None:
        """Publish an object; closing it before that abandons it."""


class Storage(ABC, Generic[P]):
    """A place for files.

    Raises:
        OSError: the storage refuses; its ``filename`` is the path.
    """

    @abstractmethod
    def stat(self, path: P) -> Stat | None:
        """Return what ``path`` names, links followed; ``None`` if nothing."""

    @abstractmethod
    def entries(self, folder: P) -> list[Entry]:
        """Return the entries of a folder, in no order."""

    @abstractmethod
    def version(self, path: P) -> Version:
        """Return the version of a file, exact enough to bind reads to it."""

    @abstractmethod
    def open(self, path: P, known: Version | None) -> InputFile:
        """Open a regular file to read; refuse devices, and an object that is not ``known``."""

    @abstractmethod
    def create(self, path: P, *, is_new: bool, nbytes: int) -> OutputFile:
        """Open a file to write; see ``open_output``."""

    @abstractmethod
    def put(self, path: P, content: bytes, *, is_new: bool) -> None:
        """Write a small file durably and atomically; see ``write_durably``."""

    @abstractmethod
    def delete(self, paths: list[P]) -> None:
        """Remove files, links, and folders with their content."""

    def make_folder(self, path: P) -> None:
        """Create a folder and its parents if missing; a bucket needs none."""

    def sync(self, path: P) -> None:
        """Flush a file, or the names in a folder, to the disk."""

    def real(self, path: P) -> P:
        """Return the path with links resolved."""
        return path

    def free_nbytes(self, folder: P) -> int | None:  # noqa: ARG002
        """Return the free space; ``None`` if unlimited."""
        return None

    def refresh(self, folder: P, *, below: bool = False) -> None:
        """Forget cached listings; with ``below``, list the folder and all below it at once."""
