"""What was read of each zip record, and its CRC-32, in whatever order it was read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from threading import Lock

from isal import isal_zlib

from zexport.torchfile.archive import Member


class FileLedger:
    """The CRC-32 of what was read of one file's records, in as few intervals as possible."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._offsets = [member.offset for member in members]
        self._intervals: dict[Member, _Intervals] = {}
        self._lock = Lock()

    def enter(self, offset: int, data: memoryview) -> None:
        """Note bytes of the file; those outside every record are passed over."""
        stop = offset + data.nbytes
        index = max(bisect_right(self._offsets, offset) - 1, 0)
        while index < len(self._members) and self._members[index].offset < stop:
            member = self._members[index]
            first = max(offset, member.offset)
            last = min(stop, member.offset + member.nbytes)
            if first < last:
                crc = isal_zlib.crc32(data[first - offset : last - offset])
                with self._lock:
                    self._intervals.setdefault(member, _Intervals()).add(first, last, crc)
            index += 1

    def touched(self) -> list[Member]:
        """The records of which a byte was read, by ascending offset."""
        return sorted(self._intervals, key=lambda member: member.offset)

    def gaps(self, member: Member, limit: int) -> Iterator[tuple[int, int]]:
        """The ranges of a record that were not read, none longer than ``limit``."""
        spans = self._intervals[member].spans()
        edges = [member.offset, *(edge for span in spans for edge in span)]
        edges.append(member.offset + member.nbytes)
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            for begin in range(start, stop, limit):
                yield begin, min(begin + limit, stop)

    def crc(self, member: Member) -> int:
        """The CRC-32 of a record; right once it has no gaps."""
        return self._intervals[member].crc()


class _Intervals:
    """Disjoint half-open ranges and the CRC-32 of each; neighbours are merged.

    A range that overlaps an earlier one is not entered: what it alone covers stays a gap, to be
    read again when the rest is known. It errs towards reading twice, never towards trusting a byte
    unseen.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._crcs: list[int] = []

    def add(self, start: int, stop: int, crc: int) -> None:
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] < stop:
            return
        if at > 0 and self._stops[at - 1] > start:
            return
        if at < len(self._starts) and self._starts[at] == stop:
            crc = isal_zlib.crc32_combine(crc, self._crcs[at], self._stops[at] - stop)
            stop = self._stops[at]
            del self._starts[at], self._stops[at], self._crcs[at]
        if at > 0 and self._stops[at - 1] == start:
            self._crcs[at - 1] = isal_zlib.crc32_combine(self._crcs[at - 1], crc, stop - start)
            self._stops[at - 1] = stop
            return
        self._starts.insert(at, start)
        self._stops.insert(at, stop)
        self._crcs.insert(at, crc)

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))

    def crc(self) -> int:
        """CRC-32 of the first range, the only one once there are no gaps."""
        return self._crcs[0]
