"""What was read of each zip record, and its CRC-32, in whatever order it was read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from blake3 import blake3
from isal import isal_zlib

from zexport.ranges.extents import Member

Range: TypeAlias = tuple[int, int, int]
"""First byte of a file, first byte beyond, and the CRC-32 of what lies between."""


class Ledger:
    """What was read of some files: a ledger for each, made when its first byte is entered."""

    def __init__(self, members: Mapping[Path, Sequence[Member]]) -> None:
        self._members = members
        self._files: dict[Path, FileLedger] = {}
        self._lock = Lock()

    def enter(self, path: Path, offset: int, data: memoryview) -> None:
        """Note bytes of a file."""
        (self._files.get(path) or self.of(path)).enter(offset, data)

    def take(self, ranges: Mapping[Path, Iterable[Range]]) -> None:
        """Note what another ledger noted of the same files."""
        for path, found in ranges.items():
            self.of(path).take(found)

    def add(self, ranges: Mapping[Path, Iterable[Range]]) -> None:
        """Note what another ledger noted, as ``enter`` does; what is noted already stays."""
        for path, found in ranges.items():
            self.of(path).add(found)

    def ranges(self) -> dict[Path, list[Range]]:
        """Everything noted, by file."""
        return {path: self._files[path].ranges() for path in sorted(self._files)}

    def files(self) -> Iterator[tuple[Path, FileLedger]]:
        """The ledger of every file of which a byte was noted."""
        return ((path, self._files[path]) for path in sorted(self._files))

    def of(self, path: Path) -> FileLedger:
        """The ledger of one file."""
        found = self._files.get(path)
        if found is None:
            with self._lock:
                found = self._files.setdefault(path, FileLedger(self._members.get(path, ())))
        return found


class FileLedger:
    """The CRC-32 of what was read of one file's records, in as few intervals as possible."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._offsets = [member.offset for member in members]
        self._intervals: dict[Member, _Intervals] = {}
        self._taken: set[Member] = set()
        self._last = _Intervals(0)
        self._lock = Lock()

    def enter(self, offset: int, data: memoryview) -> None:
        """Note bytes of the file; those outside every record are passed over."""
        with self._lock:  # most ranges go on where the last one ended
            if self._last.goes_on(offset, data):
                return
        for member, first, last in self._within(offset, offset + data.nbytes):
            crc = isal_zlib.crc32(data[first - offset : last - offset])
            self._add(member, first, last, crc)

    def take(self, ranges: Iterable[Range]) -> None:
        """Note ranges whose CRC-32 is known; one that is not of a single record is passed over."""
        self._taken.update(self.add(ranges))

    def add(self, ranges: Iterable[Range]) -> set[Member]:
        """The same, of ranges that count for nothing but the proof; the records they are of."""
        found = set()
        for start, stop, crc in ranges:
            for member, first, last in self._within(start, stop):
                if (first, last) == (start, stop):
                    found.add(member)
                    self._add(member, start, stop, crc)
        return found

    def _within(self, start: int, stop: int) -> Iterable[tuple[Member, int, int]]:
        """The records that a range reaches into, and what of it lies in each."""
        index = max(bisect_right(self._offsets, start) - 1, 0)
        if index < len(self._members):  # most ranges lie in one record
            member = self._members[index]
            if member.offset <= start < stop <= member.offset + member.nbytes:
                return ((member, start, stop),)
        return self._reached(index, start, stop)

    def _reached(self, index: int, start: int, stop: int) -> Iterator[tuple[Member, int, int]]:
        while index < len(self._members) and self._members[index].offset < stop:
            member = self._members[index]
            first = max(start, member.offset)
            last = min(stop, member.offset + member.nbytes)
            if first < last:
                yield member, first, last
            index += 1

    def _add(self, member: Member, first: int, last: int, crc: int) -> None:
        with self._lock:
            found = self._intervals.get(member)
            if found is None:
                found = self._intervals[member] = _Intervals(member.offset + member.nbytes)
            found.add(first, last, crc)
            self._last = found

    def ranges(self) -> list[Range]:
        """Everything noted, by ascending offset; no range reaches into two records."""
        return [found for member in self.touched() for found in self._intervals[member].ranges()]

    def touched(self) -> list[Member]:
        """The records of which a byte was read, by ascending offset."""
        return sorted(self._intervals, key=lambda member: member.offset)

    def gaps(self, member: Member, limit: int) -> Iterator[tuple[int, int]]:
        """The ranges of a record that were not read, none longer than ``limit``."""
        spans = self._intervals[member].ranges()
        edges = [member.offset, *(edge for first, last, _ in spans for edge in (first, last))]
        edges.append(member.offset + member.nbytes)
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            for begin in range(start, stop, limit):
                yield begin, min(begin + limit, stop)

    def crc(self, member: Member) -> int:
        """The CRC-32 of a record; right once it has no gaps."""
        return self._intervals[member].crc()

    def digest(self) -> str | None:
        """BLAKE3 over a line ``name offset nbytes crc32`` for each record taken, by offset.

        Records that were only entered here, such as to be compared, are left out; ``None`` where
        nothing was taken. It stands for the bytes as their CRC-32 does: against every accident, not
        against malice.
        """
        if not self._taken:
            return None
        digest = blake3()
        for member in sorted(self._taken, key=lambda member: member.offset):
            line = f"{member.name} {member.offset} {member.nbytes} {self.crc(member):08x}\n"
            digest.update(line.encode(errors="backslashreplace"))  # names are what files say
        return digest.hexdigest()


class _Intervals:
    """Disjoint half-open ranges and the CRC-32 of each; neighbours are merged.

    A range that overlaps an earlier one is not entered: what it alone covers stays a gap, to be
    read again when the rest is known. It errs towards reading twice, never towards trusting a byte
    unseen.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._crcs: list[int] = []

    def goes_on(self, start: int, data: memoryview) -> bool:
        """Whether bytes follow the last range within the record; then they are entered."""
        if not self._stops or self._stops[-1] != start or start + data.nbytes > self._end:
            return False
        self._crcs[-1] = isal_zlib.crc32(data, self._crcs[-1])
        self._stops[-1] = start + data.nbytes
        return True

    def add(self, start: int, stop: int, crc: int) -> None:
        if self._stops and self._stops[-1] == start:  # read in order, as most are
            self._crcs[-1] = isal_zlib.crc32_combine(self._crcs[-1], crc, stop - start)
            self._stops[-1] = stop
            return
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

    def ranges(self) -> list[Range]:
        return list(zip(self._starts, self._stops, self._crcs, strict=True))

    def crc(self) -> int:
        """CRC-32 of the first range, the only one once there are no gaps."""
        return self._crcs[0]
