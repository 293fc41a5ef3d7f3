"""Byte sources: the file ranges that a tensor consists of.

A ``ByteSource`` is a description, not data. It returns, for any window of its bytes, the file
ranges in order. So a tensor of any size is streamed through a fixed buffer, and a source shared by
10,000 tensors is stored once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from zexport.errors import LayoutError
from zexport.ranges.dtypes import Shape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ByteSource(Protocol):
    """``nbytes`` bytes in files."""

    @property
    def nbytes(self) -> int: ...

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """Yield the non-empty ranges of bytes ``start`` to ``stop`` (exclusive), in order."""
        ...

    def constituents(self) -> tuple[ByteSource, ...]:
        """Return the sources it consists of; none for a range of a file."""
        ...


Read: TypeAlias = Callable[[ByteSource, int, memoryview], None]
"""Fill memory with the bytes of a source from an offset."""


class Record(Struct, frozen=True, gc=False):
    """Bytes of a file that one CRC-32 covers; ``crc32`` is ``None`` if the file records none."""

    name: str
    offset: int
    nbytes: int
    crc32: int | None


class Extent(Struct, frozen=True, gc=False):
    """A range of a file."""

    path: Path
    offset: int
    nbytes: int

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        if start < stop:
            yield Extent(self.path, self.offset + start, stop - start)

    def constituents(self) -> tuple[ByteSource, ...]:
        return ()


def overlaps(ends: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts that a window contains: number, first byte, last byte (exclusive).

    ``ends`` is where each part ends.
    """
    index = bisect_right(ends, start)
    while start < stop:
        begin = ends[index - 1] if index else 0
        end = min(stop, ends[index])
        yield index, start - begin, end - begin
        start = end
        index += 1


class Chain(Struct, frozen=True, dict=True):
    """Several sources one after another, such as the partitions of a flat group."""

    parts: tuple[ByteSource, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each part ends."""
        return tuple(accumulate(part.nbytes for part in self.parts))

    @property
    def nbytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        for index, first, last in overlaps(self.ends, start, stop):
            yield from self.parts[index].extents(first, last)

    def constituents(self) -> tuple[ByteSource, ...]:
        return self.parts


class Window(Struct, frozen=True, gc=False):
    """Bytes ``start`` to ``start + nbytes`` of a larger source."""

    source: ByteSource
    start: int
    nbytes: int

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        return self.source.extents(self.start + start, self.start + stop)

    def constituents(self) -> tuple[ByteSource, ...]:
        return (self.source,)


class Partitioned(Struct, frozen=True, gc=False):
    """A ZeRO-3 parameter: partition ``i`` is at the same ``offset`` of source ``i``.

    ``nbytes`` excludes the padding of the last partitions.
    """

    sources: tuple[ByteSource, ...]
    offset: int
    partition_nbytes: int
    nbytes: int

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        while start < stop:
            index, within = divmod(start, self.partition_nbytes)
            count = min(self.partition_nbytes - within, stop - start)
            source, begin = self.sources[index], self.offset + within
            if isinstance(source, Extent):  # most are; a generator would take as long as the read
                yield Extent(source.path, source.offset + begin, count)
            else:
                yield from source.extents(begin, begin + count)
            start += count

    def constituents(self) -> tuple[ByteSource, ...]:
        return self.sources


class Unread(Struct, frozen=True, dict=True, eq=False):
    """A source whose place in its files is read once it is needed."""

    nbytes: int
    read: Callable[[], ByteSource]

    @cached_property
    def source(self) -> ByteSource:
        return self.read()

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        return self.source.extents(start, stop)

    def constituents(self) -> tuple[ByteSource, ...]:
        return (self.source,)


def paths_of(sources: Iterable[ByteSource]) -> set[Path]:
    """Return the files that contain bytes of ``sources``."""
    found: set[Path] = set()
    for source in all_within(sources):
        if not source.constituents():
            first = source.extents(0, min(1, source.nbytes))
            found.update(extent.path for extent in first if type(extent) is Extent)
    return found


def all_within(sources: Iterable[ByteSource]) -> Iterator[ByteSource]:
    """Yield ``sources`` and everything they consist of, each once.

    Shared tuples, such as the ranks of all ZeRO-3 parameters, are visited once too.
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


class ExtentIndex:
    """The ranges of some sources by file, sorted, to find which one contains a byte."""

    def __init__(self, sources: Iterable[ByteSource]) -> None:
        self.ranges: dict[Path, list[Extent]] = {}
        for source in sources:
            for extent in source.extents(0, source.nbytes):
                self.ranges.setdefault(extent.path, []).append(extent)
        for ranges in self.ranges.values():
            ranges.sort(key=lambda one: (one.offset, one.nbytes))

    def find(self, extent: Extent) -> Extent | None:
        """Return the range that contains the first byte of ``extent``, if any."""
        ranges = self.ranges.get(extent.path, [])
        at = bisect_right(ranges, extent.offset, key=lambda one: one.offset) - 1
        is_within = at >= 0 and extent.offset < ranges[at].offset + ranges[at].nbytes
        return ranges[at] if is_within else None


def row_major(shape: Sequence[int]) -> Shape:
    """Return the strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


class Tile(Struct, frozen=True):
    """A box of a tensor from index ``start``; its elements are in ``source``.

    The first is element ``offset``; neighbors are ``stride`` elements apart in each dimension.
    """

    start: Shape
    shape: Shape
    source: ByteSource
    offset: int
    stride: Shape


class Box(Struct, frozen=True):
    """The elements of a tile within a window: strided in the source and in the window."""

    shape: Shape
    source: ByteSource
    offset: int
    stride: Shape
    out_offset: int
    out_stride: Shape


class Mosaic(Struct, frozen=True, dict=True):
    """A row-major tensor of ``shape``; tiles cover each element once.

    Raises:
        LayoutError: tiles exceed the tensor or their source, overlap, or leave gaps.
    """

    shape: Shape
    itemsize: int
    tiles: tuple[Tile, ...]

    def __post_init__(self) -> None:
        for tile in self.tiles:
            if any(n < 1 for n in tile.shape) or len(tile.shape) != len(tile.stride):
                raise LayoutError("a box exceeds its tensor", tile.shape, self.shape)
            last = tile.offset + _dot((n - 1 for n in tile.shape), tile.stride)
            needed = (last + 1) * self.itemsize
            if min(tile.offset, *tile.stride, 0) < 0 or needed > tile.source.nbytes:
                found, expected = f"{needed} bytes", f"at most {tile.source.nbytes}"
                raise LayoutError("a box of a tensor exceeds its storage", found, expected)
        check_cover("a tensor", self.shape, [(tile.start, tile.shape) for tile in self.tiles])

    @cached_property
    def strides(self) -> Shape:
        return row_major(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """Yield the ranges of a window, row by row of the tiles."""
        while start < stop:
            element, within = divmod(start, self.itemsize)
            index = []
            for stride in self.strides:
                at, element = divmod(element, stride)
                index.append(at)
            tile = next(tile for tile in self.tiles if _contains(tile, index))
            position, run = self._run(tile, index)
            begin = position * self.itemsize + within
            count = min(run * self.itemsize - within, stop - start)
            yield from tile.source.extents(begin, begin + count)
            start += count

    def constituents(self) -> tuple[ByteSource, ...]:
        return tuple(tile.source for tile in self.tiles)

    def boxes(self, first: int, last: int) -> Iterator[Box]:
        """Yield elements ``first`` to ``last`` (exclusive) as boxes, in no order."""
        for start, shape in _boxes_of_window(self.shape, first, last):
            for tile in self.tiles:
                begin = tuple(map(max, start, tile.start))
                both = zip(start, shape, tile.start, tile.shape, strict=True)
                end = tuple(min(a + n, b + m) for a, n, b, m in both)
                size = tuple(b - a for a, b in zip(begin, end, strict=True))
                if all(n > 0 for n in size):
                    local = (a - b for a, b in zip(begin, tile.start, strict=True))
                    offset = tile.offset + _dot(local, tile.stride)
                    out_offset = _dot(begin, self.strides) - first
                    yield Box(size, tile.source, offset, tile.stride, out_offset, self.strides)

    def _run(self, tile: Tile, index: Sequence[int]) -> tuple[int, int]:
        """Return the position of ``index`` in a tile's source, and how many elements follow it.

        A run continues in the next row if the tile has whole rows and its source is contiguous.
        """
        local = [i - a for i, a in zip(index, tile.start, strict=True)]
        position = tile.offset + _dot(local, tile.stride)
        dense = run = 1
        for dim in range(len(self.shape) - 1, -1, -1):
            if tile.stride[dim] != dense and tile.shape[dim] != 1:
                break
            run += (tile.shape[dim] - 1 - local[dim]) * dense
            dense *= tile.shape[dim]
            if tile.shape[dim] != self.shape[dim]:
                break
        return position, run


def _contains(tile: Tile, index: Sequence[int]) -> bool:
    return all(a <= i < a + n for a, i, n in zip(tile.start, index, tile.shape, strict=True))


def _dot(index: Iterable[int], stride: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, stride, strict=True))


def _boxes_of_window(shape: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield a row-major window of a tensor as boxes (start, shape), in order."""
    if not shape:
        if first < last:
            yield (), ()
        return
    row = prod(shape[1:])
    while first < last:
        index, within = divmod(first, row)
        whole = (last - first) // row if not within else 0
        if whole:
            yield (index, *(0 for _ in shape[1:])), (whole, *shape[1:])
            first += whole * row
            continue
        stop = min(row, within + last - first)
        for start, size in _boxes_of_window(shape[1:], within, stop):
            yield (index, *start), (1, *size)
        first += stop - within


def check_cover(name: str, shape: Shape, boxes: Iterable[tuple[Shape, Shape]]) -> None:
    """Raise unless boxes (start, shape) cover a tensor, each element exactly once.

    Boxes are sorted by the dimension with the most different starts. Each is compared only with
    those that reach its start, which are few even for the chunks of thousands of ranks.

    Raises:
        LayoutError: a box exceeds the tensor, two overlap, or they leave gaps.
    """
    filled = []
    for start, size in boxes:
        fits = len(start) == len(size) == len(shape) and all(
            a >= 0 and a + n <= whole for a, n, whole in zip(start, size, shape, strict=True)
        )
        if not fits:
            raise LayoutError(f"a box of {name} exceeds it", (start, size), shape)
        if prod(size):
            filled.append((start, size))
    starts = [len(set(indices)) for indices in zip(*(start for start, _ in filled), strict=True)]
    dim = starts.index(max(starts)) if starts else 0
    reaching: list[tuple[Shape, Shape]] = []
    for start, size in sorted(filled, key=lambda one: one[0][dim]) if shape else ():
        reaching = [one for one in reaching if one[0][dim] + one[1][dim] > start[dim]]
        for other in reaching:
            if all(a < b + m and b < a + n for a, n, b, m in zip(*other, start, size, strict=True)):
                raise LayoutError(f"two boxes of {name} overlap", other, (start, size))
        reaching.append((start, size))
    covered = sum(prod(size) for _, size in filled)
    if covered != prod(shape):
        raise LayoutError(f"boxes of {name} leave gaps", f"{covered} elements", prod(shape))


_GAP_NBYTES = 64 << 10
"""Reading a gap of this size takes as long as another read."""

_SPAN_NBYTES_MIN = 64 << 10


def gather(mosaic: Mosaic, start: int, buffer: memoryview, read: Read) -> None:
    """Fill ``buffer`` with the bytes of ``mosaic`` from ``start``, both in whole elements.

    Elements that are close together are read as one span, including gaps, and moved to their places
    in memory; a transposed matrix would otherwise take a read per element. A span has at most
    ``buffer.nbytes`` or 64 KiB, which is allocated once for each level of nested mosaics.
    """
    itemsize = mosaic.itemsize
    first = start // itemsize
    limit = max(buffer.nbytes, _SPAN_NBYTES_MIN) // itemsize
    for box in mosaic.boxes(first, first + buffer.nbytes // itemsize):
        for part in _split(box, limit, itemsize):
            begin, nbytes = part.offset * itemsize, _span(part) * itemsize
            if _is_run(part):
                out = part.out_offset * itemsize
                read(part.source, begin, buffer[out : out + nbytes])
            else:
                scratch = memoryview(bytearray(nbytes))
                read(part.source, begin, scratch)
                placed = _array(buffer, itemsize, part.shape, part.out_offset, part.out_stride)
                placed[...] = _array(scratch, itemsize, part.shape, 0, part.stride)


def _array(
    memory: memoryview, itemsize: int, shape: Shape, offset: int, stride: Shape
) -> npt.NDArray[np.void | np.unsignedinteger[Any]]:
    import numpy as np  # noqa: PLC0415 - most exports gather nothing

    kind = "u" if itemsize in (1, 2, 4, 8) else "V"
    steps = tuple(step * itemsize for step in stride)
    return np.ndarray(shape, np.dtype(f"{kind}{itemsize}"), memory, offset * itemsize, steps)


def _split(box: Box, limit: int, itemsize: int) -> Iterator[Box]:
    """Yield parts of a box that each span at most ``limit`` elements, without wide gaps."""
    if _is_run(box):
        yield box
        return
    dim = max(range(len(box.shape)), key=lambda d: (box.shape[d] > 1, box.stride[d]))
    step, count = box.stride[dim], box.shape[dim]
    within = _span(box) - (count - 1) * step
    is_wide = (step - within) * itemsize > _GAP_NBYTES
    if not is_wide and _span(box) <= limit:
        yield box
        return
    each = 1 if is_wide else max(1, (limit - within) // step + 1)
    for index in range(0, count, each):
        part = replace(
            box,
            shape=(*box.shape[:dim], min(each, count - index), *box.shape[dim + 1 :]),
            offset=box.offset + index * step,
            out_offset=box.out_offset + index * box.out_stride[dim],
        )
        yield from _split(part, limit, itemsize)


def _span(box: Box) -> int:
    """Return the number of source elements from the first to the last of a box."""
    return 1 + sum((n - 1) * step for n, step in zip(box.shape, box.stride, strict=True))


def _is_run(box: Box) -> bool:
    """Whether its elements are contiguous, in the source and in the window."""
    dense = 1
    for count, step, out_step in zip(
        reversed(box.shape), reversed(box.stride), reversed(box.out_stride), strict=True
    ):
        if count > 1:
            if not step == out_step == dense:
                return False
            dense *= count
    return True
