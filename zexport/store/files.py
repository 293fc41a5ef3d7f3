"""Opening files that others made: regular files alone, and without ever waiting for one."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from zexport.store.retries import read_some, steadily, synced


@dataclass(frozen=True, slots=True)
class Version:
    """What tells whether a file is still as it was: its size, and when it was last modified."""

    nbytes: int
    mtime_ns: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes, modified at {self.mtime_ns} ns"


def version(path: Path) -> Version:
    """The version of a file."""
    status = steadily(path.stat)
    return Version(status.st_size, status.st_mtime_ns)


def changed_ns(path: Path) -> int | None:
    """When anything of a file last changed, which no copy can set; ``None`` if it is not there."""
    try:
        return steadily(path.stat).st_ctime_ns
    except OSError:
        return None


def version_of(descriptor: int) -> Version:
    """The version of an open file."""
    status = os.fstat(descriptor)
    return Version(status.st_size, status.st_mtime_ns)


class InputFile:
    """A file that is being read by range, from any number of threads.

    A storage that falters is tried again (``zexport.store.retries``).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = steadily(lambda: open_descriptor(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def version(self) -> Version:
        """What it is now."""
        return version_of(self._descriptor)

    def read(self, offset: int, part: memoryview) -> int:
        """How many bytes from ``offset`` on were read into ``part``: 0 only at the end."""
        return read_some(self.path, self._descriptor, offset, part)

    def forget(self) -> None:
        """Put the file on the disk and have the system forget it: the next reading starts there.

        Linux forgets what is clean and unlocked at once; a file system may refuse, which is no
        error.
        """
        synced(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_at(file: FileIO, offset: int, nbytes: int) -> bytes:
    """Bytes of an open file, or what there is of them; its position stays where it is."""
    return os.pread(file.fileno(), nbytes, offset)


def read_range(path: Path, offset: int, nbytes: int) -> bytes:
    """Bytes of a file, or what there is of them."""
    buffer = memoryview(bytearray(nbytes))
    done = 0
    with InputFile(path) as file:
        while done < nbytes and (count := file.read(offset + done, buffer[done:])):
            done += count
    return bytes(buffer[:done])


def open_regular(path: Path) -> FileIO:
    """The file, open for reading, without a buffer.

    A pipe, a device or a socket in its place is refused at once: to open a pipe that nobody writes
    to would wait for ever, and a device may give bytes without end.
    """
    return FileIO(path, opener=lambda name, _: open_descriptor(Path(name)))


def open_descriptor(path: Path) -> int:
    """The same as a descriptor, which is the caller's to close."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


def read_whole(path: Path) -> bytes:
    """The content of a file of our own, however large."""
    with open_regular(path) as file:
        return file.readall()


def read_regular(path: Path, nbytes_max: int) -> bytes | None:
    """The content of the file; ``None`` where it has more than ``nbytes_max`` bytes."""
    with open_regular(path) as file:
        content = file.read(nbytes_max + 1)
        while content and len(content) <= nbytes_max and (more := file.read(nbytes_max)):
            content += more
    return content if len(content) <= nbytes_max else None
