"""Opening files that others made: regular files alone, and without ever waiting for one."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from zexport.store.retries import steadily


@dataclass(frozen=True, slots=True)
class Version:
    """What tells whether a file is still as it was: its size, and when it was last modified."""

    nbytes: int
    mtime_ns: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes, modified at {self.mtime_ns} ns"


def version(path: Path) -> Version:
    """The version of a file.

    Raises:
        OSError: it cannot be told.
    """
    status = steadily(path.stat)
    return Version(status.st_size, status.st_mtime_ns)


def version_of(descriptor: int) -> Version:
    """The version of an open file.

    Raises:
        OSError: it cannot be told.
    """
    status = os.fstat(descriptor)
    return Version(status.st_size, status.st_mtime_ns)


def open_regular(path: Path) -> FileIO:
    """The file, open for reading, without a buffer.

    A pipe, a device or a socket in its place is refused at once: to open a pipe that nobody writes
    to would wait for ever, and a device may give bytes without end.

    Raises:
        OSError: it cannot be opened, or is not a regular file (``EINVAL``).
    """
    return FileIO(path, opener=lambda name, _: open_descriptor(Path(name)))


def open_descriptor(path: Path) -> int:
    """The same as a descriptor, which is the caller's to close.

    Raises:
        OSError: as ``open_regular``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


def read_whole(path: Path) -> bytes:
    """The content of a file of our own, however large.

    Raises:
        OSError: as ``open_regular``.
    """
    with open_regular(path) as file:
        return file.readall()


def read_regular(path: Path, nbytes_max: int) -> bytes | None:
    """The content of the file; ``None`` where it has more than ``nbytes_max`` bytes.

    Raises:
        OSError: as ``open_regular``.
    """
    with open_regular(path) as file:
        content = file.read(nbytes_max + 1)
        while content and len(content) <= nbytes_max and (more := file.read(nbytes_max)):
            content += more
    return content if len(content) <= nbytes_max else None
