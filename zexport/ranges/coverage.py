"""What was read of each zip record, and its CRC-32, in whatever order it was read."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from blake3 import blake3
from isal import isal_zlib

from zexport.ranges.source import Member

Range: TypeAlias = tuple[int, int, int]
"""First byte of a file, first byte beyond, and the CRC-32 of what lies between."""

_NEW_MIN = 256
"""Ranges that are noted, in an array, before they are put in order: there may be a thousand files.
"""


class Ranges:
    """Ranges in the order in which they were put, in 24 bytes each: there may be a million."""

    __slots__ = ("crcs", "starts", "stops")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.starts, self.stops, self.crcs = array("Q"), array("Q"), array("Q")
        self.extend(ranges)

    def extend(self, ranges: Iterable[Range]) -> None:
        """Put these behind the rest."""
        for one in ranges:
            self.append(*one)

    def append(self, start: int, stop: int, crc: int) -> None:
        """Put one behind the rest."""
        self.starts.append(start)
        self.stops.append(stop)
        self.crcs.append(crc)

    def __iter__(self) -> Iterator[Range]:
        return zip(self.starts, self.stops, self.crcs, strict=True)

    def __len__(self) -> int:
        return len(self.starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def between(self, first: int, last: int) -> list[Range]:
        """Of ranges by ascending offset, those that begin from ``first`` on and before ``last``."""
        here = slice(bisect_left(self.starts, first), bisect_left(self.starts, last))
        return [*zip(self.starts[here], self.stops[here], self.crcs[here], strict=True)]

    def is_free(self, start: int, stop: int) -> bool:
        """Whether none of them, which are by ascending offset and apart, overlaps a range."""
        at = bisect_left(self.starts, stop)
        return not at or self.stops[at - 1] <= start


class Ledger:
    """What was read of some files: a ledger for each, made when its first byte is entered."""

    def __init__(self, members: Mapping[Path, Sequence[Member]]) -> None:
        self._members = members
        self._files: dict[Path, FileLedger] = {}
        self._lock = Lock()

    def take(self, ranges: Mapping[Path, Iterable[Range]]) -> None:
        """Note what another ledger noted of the same files."""
        for path, found in ranges.items():
            self.of(path).take(found)

    def add(self, ranges: Mapping[Path, Iterable[Range]]) -> None:
        """Note what another ledger noted, as ``enter`` does; what is noted already stays."""
        for path, found in ranges.items():
            self.of(path).add(found)

    def ranges(self) -> dict[Path, Ranges]:
        """Everything noted, by file."""
        return {path: self._files[path].ranges() for path in sorted(self._files)}

    def files(self) -> Iterator[tuple[Path, FileLedger]]:
        """The ledger of every file of which a byte was noted."""
        return ((path, self._files[path]) for path in sorted(self._files))

    def of(self, path: Path) -> FileLedger:
        """The ledger of one file."""
        try:
            return self._files[path]
        except KeyError:
            with self._lock:
                return self._files.setdefault(path, FileLedger(self._members.get(path, ())))


class FileLedger:
    """The CRC-32 of what was read of one file's records, in as few ranges as possible.

    A range that overlaps an earlier one is not kept: what it alone covers stays a gap, to be read
    again when the rest is known. It errs towards reading twice, never towards trusting a byte
    unseen.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._offsets = [member.offset for member in members]
        self._begins = frozenset(self._offsets)
        self._bounds = 0, 0  # of the record that was read last
        self._new = array("Q")  # three numbers for each
        self._room = 3 * _NEW_MIN
        self._ranges = Ranges()
        self._taken: set[Member] = set()
        self._lock = Lock()

    def enter(self, offset: int, data: memoryview) -> None:
        """Note bytes of the file; those outside every record are passed over."""
        stop = offset + data.nbytes
        begin, end = self._bounds
        if begin <= offset < stop <= end:  # as most ranges do
            self._add(offset, stop, isal_zlib.crc32(data))
            return
        for member, first, last in self._within(offset, stop):
            self._bounds = member.offset, member.offset + member.nbytes
            self._add(first, last, isal_zlib.crc32(data[first - offset : last - offset]))

    def take(self, ranges: Iterable[Range]) -> None:
        """Note ranges whose CRC-32 is known; one that is not of a single record is passed over."""
        self._taken.update(self.add(ranges))

    def add(self, ranges: Iterable[Range]) -> set[Member]:
        """The same, of ranges that count for nothing but the proof; the records they are of."""
        self.ranges()  # what is noted already stays
        members: set[Member] = set()
        with self._lock:
            for one in ranges:
                for member, *edges in self._within(*one[:2]):
                    if (*edges,) == one[:2]:
                        self._new.extend(one)
                        members.add(member)
        self.ranges()  # those of many files are not kept until all are noted
        return members

    def _within(self, start: int, stop: int) -> Iterator[tuple[Member, int, int]]:
        """The records that a range reaches into, and what of it lies in each."""
        index = max(bisect_right(self._offsets, start) - 1, 0)
        while index < len(self._members) and self._members[index].offset < stop:
            member = self._members[index]
            first = max(start, member.offset)
            last = min(stop, member.offset + member.nbytes)
            if first < last:
                yield member, first, last
            index += 1

    def _add(self, start: int, stop: int, crc: int) -> None:
        with self._lock:
            self._new.extend((start, stop, crc))
            if len(self._new) >= self._room:
                self._settle()

    def ranges(self) -> Ranges:
        """Everything noted, by ascending offset; no range reaches into two records."""
        with self._lock:
            if self._new:
                self._settle()
            return self._ranges

    def _settle(self) -> None:
        """Put what is new among the rest, where there is room; neighbours become one range."""
        numbers = iter(self._new)
        new = zip(numbers, numbers, numbers, strict=True)
        old, kept = self._ranges, Ranges()
        free = (one for one in new if old.is_free(*one[:2])) if old else new
        at, end, crc = -1, -1, 0
        for start, stop, own in sorted([*old, *free]):
            if start == end and start not in self._begins:
                end, crc = stop, isal_zlib.crc32_combine(crc, own, stop - start)
            elif start >= end:
                if end >= 0:
                    kept.append(at, end, crc)
                at, end, crc = start, stop, own
        kept.append(at, end, crc)
        self._ranges, self._new = kept, array("Q")
        self._room = 3 * max(_NEW_MIN, len(kept))

    def touched(self) -> list[Member]:
        """The records of which a byte was read, by ascending offset."""
        reached = (self._within(start, stop) for start, stop, _ in self.ranges())
        return list(dict.fromkeys(member for found in reached for member, _, _ in found))

    def gaps(self, member: Member, limit: int) -> Iterator[tuple[int, int]]:
        """The ranges of a record that were not read, none longer than ``limit``."""
        spans = self._of(member)
        edges = [member.offset, *(edge for first, last, _ in spans for edge in (first, last))]
        edges.append(member.offset + member.nbytes)
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            for begin in range(start, stop, limit):
                yield begin, min(begin + limit, stop)

    def _of(self, member: Member) -> list[Range]:
        return self.ranges().between(member.offset, member.offset + member.nbytes)

    def crc(self, member: Member) -> int:
        """The CRC-32 of a record; right once it has no gaps."""
        return self._of(member)[0][2]

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
