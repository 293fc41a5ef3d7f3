"""Where bytes are: ranges of files, and the tensors made by laying ranges end to end.

A ``ByteSource`` is a description, not data. It answers one question for any window of its bytes:
which ranges of which files, in order. Because every source can be asked about any window, a tensor
of any size is streamed through a buffer of fixed size, and a source shared by ten thousand
tensors is stored once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeAlias

from msgspec import Struct


class ByteSource(Protocol):
    """A run of ``nbytes`` bytes that lie somewhere in files."""

    @property
    def nbytes(self) -> int:
        """Length of the run."""
        ...

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The ranges that hold bytes ``start`` to ``stop`` (half-open), in order, none empty."""
        ...

    def constituents(self) -> tuple[ByteSource, ...]:
        """The sources it is made of; nothing for a range of a file."""
        ...


Read: TypeAlias = Callable[[ByteSource, int, memoryview], None]
"""Fills memory with the bytes of a source, from one of them on."""


class Member(Struct, frozen=True, gc=False):
    """One record: bytes ``offset`` to ``offset + nbytes`` (half-open) of the file.

    ``crc32`` is what the file says of them; ``None`` where it says nothing.
    """

    name: str
    offset: int
    nbytes: int
    crc32: int | None


class Extent(Struct, frozen=True, gc=False):
    """Bytes ``offset`` to ``offset + nbytes`` (half-open) of one file."""

    path: Path
    offset: int
    nbytes: int

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The window of this range, as one range."""
        if start < stop:
            yield Extent(self.path, self.offset + start, stop - start)

    def constituents(self) -> tuple[ByteSource, ...]:
        """Nothing: it is a range of a file."""
        return ()


@dataclass(frozen=True, slots=True)
class Chain:
    """Several sources laid end to end, such as one flat group's partitions in rank order."""

    parts: tuple[ByteSource, ...]
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", tuple(accumulate(part.nbytes for part in self.parts)))

    @property
    def nbytes(self) -> int:
        """Sum of the parts."""
        return self._ends[-1] if self._ends else 0

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The ranges of a window, part after part."""
        index = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[index] - self.parts[index].nbytes
            end = min(stop, self._ends[index])
            yield from self.parts[index].extents(start - begin, end - begin)
            start = max(start, end)
            index += 1

    def constituents(self) -> tuple[ByteSource, ...]:
        """The parts."""
        return self.parts


class Window(Struct, frozen=True, gc=False):
    """Bytes ``start`` to ``start + nbytes`` of a larger source."""

    source: ByteSource
    start: int
    nbytes: int

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The ranges of a window within this window."""
        return self.source.extents(self.start + start, self.start + stop)

    def constituents(self) -> tuple[ByteSource, ...]:
        """The larger source."""
        return (self.source,)


class Striped(Struct, frozen=True, gc=False):
    """A run cut into equal stripes, stripe ``i`` lying at the same ``offset`` of source ``i``.

    This is how ZeRO-3 stores a parameter: every rank holds ``stripe_nbytes`` of it at the same
    place of its own flat group, and the last ranks' tail is padding, which is not part of the run.
    """

    sources: tuple[ByteSource, ...]
    offset: int
    stripe_nbytes: int
    nbytes: int

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The ranges of a window, stripe after stripe."""
        while start < stop:
            index, within = divmod(start, self.stripe_nbytes)
            count = min(self.stripe_nbytes - within, stop - start)
            source, begin = self.sources[index], self.offset + within
            if isinstance(source, Extent):  # as most are; a generator takes as long as the reading
                yield Extent(source.path, source.offset + begin, count)
            else:
                yield from source.extents(begin, begin + count)
            start += count

    def constituents(self) -> tuple[ByteSource, ...]:
        """The sources of the stripes."""
        return self.sources


def paths_of(sources: Iterable[ByteSource]) -> set[Path]:
    """The files that hold bytes of ``sources``; bytes that are in no file have none."""
    found: set[Path] = set()
    for source in all_within(sources):
        if not source.constituents():
            first = source.extents(0, min(1, source.nbytes))
            found.update(extent.path for extent in first if type(extent) is Extent)
    return found


def all_within(sources: Iterable[ByteSource]) -> Iterator[ByteSource]:
    """``sources`` and all that they are made of, each once.

    What many share is looked into once: a source such as a flat group, and a tuple of them such as
    the ranks below every tensor of ZeRO-3.
    """
    seen: set[int] = set()
    shared: dict[int, tuple[ByteSource, ...]] = {}  # with the tuple, so that its id stays
    waiting = list(sources)
    while waiting:
        source = waiting.pop()
        if id(source) in seen:
            continue
        seen.add(id(source))
        yield source
        parts = source.constituents()
        if len(parts) > 1:
            if id(parts) in shared:
                continue
            shared[id(parts)] = parts
        waiting.extend(parts)


class Places:
    """The ranges of some sources, by file: which of them a byte of a file is in."""

    def __init__(self, sources: Iterable[ByteSource]) -> None:
        found: dict[Path, list[Extent]] = {}
        for source in sources:
            for extent in source.extents(0, source.nbytes):
                found.setdefault(extent.path, []).append(extent)
        for ranges in found.values():
            ranges.sort(key=lambda one: (one.offset, one.nbytes))
        self.ranges = found

    def find(self, extent: Extent) -> Extent | None:
        """The range that some bytes begin in; ``None`` where that is none."""
        ranges = self.ranges.get(extent.path, [])
        at = bisect_right(ranges, extent.offset, key=lambda one: one.offset) - 1
        is_within = at >= 0 and extent.offset < ranges[at].offset + ranges[at].nbytes
        return ranges[at] if is_within else None
