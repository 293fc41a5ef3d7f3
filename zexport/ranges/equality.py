"""Whether two byte sources hold the same bytes, read side by side in two small buffers."""

from __future__ import annotations

from zexport.ranges.extents import ByteSource
from zexport.ranges.reader import SourceReader

_CHUNK_NBYTES = 1 << 20


class Equality:
    """Compares sources out of files that are open, all in the same two buffers of 1 MiB."""

    __slots__ = ("_files", "_first", "_second")

    def __init__(self, files: SourceReader) -> None:
        self._files = files
        self._first, self._second = (memoryview(bytearray(_CHUNK_NBYTES)) for _ in range(2))

    def holds(self, one: ByteSource, other: ByteSource) -> bool:
        """Whether both have the same bytes; reading ends where they differ.

        Raises:
            CheckpointError: a file cannot be read, or was changed.
        """
        if one.nbytes != other.nbytes:
            return False
        for start in range(0, one.nbytes, _CHUNK_NBYTES):
            count = min(_CHUNK_NBYTES, one.nbytes - start)
            self._files.read_into(one, start, self._first[:count])
            self._files.read_into(other, start, self._second[:count])
            if self._first[:count] != self._second[:count]:
                return False
        return True
