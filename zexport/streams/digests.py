"""BLAKE3 of files and of ranges of files, in one pass through one small buffer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

_CHUNK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileDigests:
    """BLAKE3 digests, as 64 hexadecimal digits: of a whole file, and of ranges of it."""

    whole: str
    ranges: tuple[str, ...]


def digest_file(
    path: Path,
    *,
    ranges: Sequence[tuple[int, int]] = (),
    on_bytes: Callable[[int], None] | None = None,
) -> FileDigests:
    """The digest of a file and of some ranges of it; every byte is read once.

    Args:
        path: the file.
        ranges: half-open, ascending, apart from each other, within the file.
        on_bytes: told the count of each run of bytes after it was taken in.

    Raises:
        OSError: the file cannot be read.
    """
    whole = blake3()
    parts = _Ranges(ranges)
    buffer = memoryview(bytearray(min(_CHUNK_NBYTES, max(path.stat().st_size, 1))))
    position = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            whole.update(buffer[:count])
            parts.take(position, buffer[:count])
            position += count
            if on_bytes is not None:
                on_bytes(count)
    return FileDigests(whole.hexdigest(), parts.finish())


class _Ranges:
    """The digests of ranges of a stream, of which one at a time is unfinished."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges = ranges
        self._digests: list[str] = []
        self._current = blake3()

    def take(self, position: int, data: memoryview) -> None:
        """Take in the stream's bytes from ``position`` on."""
        end = position + data.nbytes
        while len(self._digests) < len(self._ranges):
            start, stop = self._ranges[len(self._digests)]
            if start < end:
                self._current.update(data[max(start - position, 0) : max(stop - position, 0)])
            if stop > end:
                return
            self._close()

    def finish(self) -> tuple[str, ...]:
        """All digests; ranges that the stream has not reached are those of no bytes."""
        while len(self._digests) < len(self._ranges):
            self._close()
        return tuple(self._digests)

    def _close(self) -> None:
        self._digests.append(self._current.hexdigest())
        self._current = blake3()


def drop_from_cache(path: Path) -> None:
    """Put a file on the disk and have the system forget it: the next reading starts there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
