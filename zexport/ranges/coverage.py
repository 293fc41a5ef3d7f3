"""Coverage: which ranges of each record were read, in any order, and their CRC-32."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from blake3 import blake3
from isal import isal_zlib

from zexport.ranges.source import Record

Range: TypeAlias = tuple[int, int, int]
"""Start and stop (exclusive) in a file, and the CRC-32 of the bytes."""

_NEW_MIN = 256
"""Ranges collected before they are sorted; there may be 1,000 files."""


class Ranges:
    """Ranges in three arrays, 24 bytes each: there may be a million."""

    __slots__ = ("crcs", "starts", "stops")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.starts, self.stops, self.crcs = array("Q"), array("Q"), array("Q")
        for one in ranges:
            self.append(*one)

    def append(self, start: int, stop: int, crc: int) -> None:
        self.starts.append(start)
        self.stops.append(stop)
        self.crcs.append(crc)

    def __iter__(self) -> Iterator[Range]:
        return zip(self.starts, self.stops, self.crcs, strict=True)

    def __len__(self) -> int:
        return len(self.starts)

    def between(self, first: int, last: int) -> list[Range]:
        """Return the ranges that begin from ``first`` to before ``last``; they must be sorted."""
        here = slice(bisect_left(self.starts, first), bisect_left(self.starts, last))
        return [*zip(self.starts[here], self.stops[here], self.crcs[here], strict=True)]


class Coverage:
    """Ranges that were read of some files."""

    def __init__(self, records: Mapping[Path, Sequence[Record]]) -> None:
        self._records = records
        self._files: dict[Path, FileCoverage] = {}
        self._lock = Lock()

    def add(self, ranges: Mapping[Path, Iterable[Range]], *, in_digest: bool = False) -> None:
        """Add ranges of another coverage; existing ones stay.

        ``in_digest`` includes their records in ``FileCoverage.digest``.
        """
        for path, found in ranges.items():
            self.of(path).add(found, in_digest=in_digest)

    def ranges(self) -> dict[Path, Ranges]:
        """Return all ranges by file."""
        return {path: file.ranges() for path, file in self.files()}

    def files(self) -> Iterator[tuple[Path, FileCoverage]]:
        """Yield the coverage of every file that was read, by path."""
        return ((path, self._files[path]) for path in sorted(self._files))

    def of(self, path: Path) -> FileCoverage:
        """Return the coverage of one file."""
        try:
            return self._files[path]
        except KeyError:
            with self._lock:
                return self._files.setdefault(path, FileCoverage(self._records.get(path, ())))


class FileCoverage:
    """Ranges that were read of one file's records, in as few ranges as possible.

    A range that overlaps an earlier one is dropped, so its other bytes stay a gap and are read
    again later. That reads some bytes twice, but never trusts an unread one.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._offsets = [record.offset for record in records]
        self._begins = frozenset(self._offsets)
        self._bounds = 0, 0  # of the last record
        self._new = array("Q")  # three numbers per range
        self._room = 3 * _NEW_MIN
        self._ranges = Ranges()
        self._digested: set[Record] = set()
        self._lock = Lock()

    def enter(self, offset: int, data: memoryview) -> None:
        """Add bytes of the file; those outside of records are ignored."""
        stop = offset + data.nbytes
        begin, end = self._bounds
        if begin <= offset < stop <= end:  # as usual
            self._append(offset, stop, isal_zlib.crc32(data))
            return
        for record, first, last in self._within(offset, stop):
            self._bounds = record.offset, record.offset + record.nbytes
            self._append(first, last, isal_zlib.crc32(data[first - offset : last - offset]))

    def add(self, ranges: Iterable[Range], *, in_digest: bool) -> None:
        """Add ranges that are within one record."""
        self.ranges()  # existing ranges stay
        with self._lock:
            for one in ranges:
                for record, *edges in self._within(*one[:2]):
                    if (*edges,) == one[:2]:
                        self._new.extend(one)
                        if in_digest:
                            self._digested.add(record)
        self.ranges()  # to free memory

    def _within(self, start: int, stop: int) -> Iterator[tuple[Record, int, int]]:
        """Yield the records that a range overlaps, and the overlaps."""
        index = max(bisect_right(self._offsets, start) - 1, 0)
        while index < len(self._records) and self._records[index].offset < stop:
            record = self._records[index]
            first = max(start, record.offset)
            last = min(stop, record.offset + record.nbytes)
            if first < last:
                yield record, first, last
            index += 1

    def _append(self, start: int, stop: int, crc: int) -> None:
        with self._lock:
            self._new.extend((start, stop, crc))
            if len(self._new) >= self._room:
                self._merge()

    def ranges(self) -> Ranges:
        """Return all ranges, sorted; each is within one record."""
        with self._lock:
            if self._new:
                self._merge()
            return self._ranges

    def _merge(self) -> None:
        """Sort new ranges into the others and join neighbors."""
        numbers = iter(self._new)
        old, merged = self._ranges, Ranges()
        found = [*old]
        for one in zip(numbers, numbers, numbers, strict=True):
            at = bisect_left(old.starts, one[1])
            if not at or old.stops[at - 1] <= one[0]:
                found.append(one)
        found.sort()
        begin, end, crc = -1, -1, 0
        for start, stop, own in found:
            if start == end and start not in self._begins:
                end, crc = stop, isal_zlib.crc32_combine(crc, own, stop - start)
            elif start >= end:
                if end >= 0:
                    merged.append(begin, end, crc)
                begin, end, crc = start, stop, own
        merged.append(begin, end, crc)
        self._ranges, self._new = merged, array("Q")
        self._room = 3 * max(_NEW_MIN, len(merged))

    def touched(self) -> list[Record]:
        """Return the records that were read at least in part, by offset."""
        overlaps = (self._within(start, stop) for start, stop, _ in self.ranges())
        return list(dict.fromkeys(record for found in overlaps for record, _, _ in found))

    def gaps(self, record: Record, limit: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a record that were not read, each at most ``limit`` bytes."""
        end = record.offset + record.nbytes
        spans = self.ranges().between(record.offset, end)
        edges = [record.offset, *(edge for start, stop, _ in spans for edge in (start, stop)), end]
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            for begin in range(start, stop, limit):
                yield begin, min(begin + limit, stop)

    def crc(self, record: Record) -> int:
        """Return the CRC-32 of a record without gaps."""
        return self.ranges().between(record.offset, record.offset + record.nbytes)[0][2]

    def digest(self) -> str | None:
        """Return BLAKE3 over ``name offset nbytes crc32`` of records; ``None`` if there are none.

        It detects every accident, but not malice, like CRC-32.
        """
        if not self._digested:
            return None
        digest = blake3()
        for record in sorted(self._digested, key=lambda record: record.offset):
            line = f"{record.name} {record.offset} {record.nbytes} {self.crc(record):08x}\n"
            digest.update(line.encode(errors="backslashreplace"))
        return digest.hexdigest()
