"""Where bytes are: ranges of files, and the tensors made by laying ranges end to end.

A ``ByteSource`` is a description, not data. It answers one question for any window of its bytes:
which ranges of which files, in order. Because every source can be asked about any window, a tensor
of any size is streamed through a buffer of fixed size, and a source shared by ten thousand
tensors is stored once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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


def row_major(shape: Sequence[int]) -> Shape:
    """Strides, in elements, of a densely stored tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


class Tile(Struct, frozen=True):
    """A box of the whole, by its first index and size, and where its elements lie in a source.

    The element that holds the first, and how many apart neighbours are in each dimension.
    """

    start: Shape
    shape: Shape
    source: ByteSource
    offset: int
    stride: Shape

    def holds(self, index: Sequence[int]) -> bool:
        """Whether the element of the whole at ``index`` is in this box."""
        return all(a <= i < a + n for a, i, n in zip(self.start, index, self.shape, strict=True))


class Box(Struct, frozen=True):
    """Elements of one tile that lie within a window of the whole.

    Where they are in its source, and where they belong in the window, by first element and stride.
    """

    shape: Shape
    source: ByteSource
    offset: int
    stride: Shape
    out_offset: int
    out_stride: Shape


@dataclass(frozen=True, slots=True)
class Mosaic:
    """A row-major tensor of ``shape`` made of tiles that cover it, each element once."""

    shape: Shape
    itemsize: int
    tiles: tuple[Tile, ...]
    _strides: Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_strides", row_major(self.shape))
        _check_cover(self.shape, self.tiles, self.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return prod(self.shape) * self.itemsize

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The ranges of a window, run after run along the rows of the tiles."""
        while start < stop:
            element, within = divmod(start, self.itemsize)
            index = self._index(element)
            tile = next(tile for tile in self.tiles if tile.holds(index))
            position, run = self._run(tile, index)
            begin = position * self.itemsize + within
            count = min(run * self.itemsize - within, stop - start)
            yield from tile.source.extents(begin, begin + count)
            start += count

    def constituents(self) -> tuple[ByteSource, ...]:
        """The sources that the tiles are cut from."""
        return tuple(tile.source for tile in self.tiles)

    def boxes(self, first: int, last: int) -> Iterator[Box]:
        """What elements ``first`` to ``last`` (half-open) of the whole are made of; in no order."""
        for start, shape in _boxes_of_window(self.shape, first, last):
            for tile in self.tiles:
                begin = tuple(map(max, start, tile.start))
                end = tuple(min(a + n, b + m) for a, n, b, m in _zip(start, shape, tile))
                size = tuple(b - a for a, b in zip(begin, end, strict=True))
                if all(n > 0 for n in size):
                    local = (a - b for a, b in zip(begin, tile.start, strict=True))
                    yield Box(
                        shape=size,
                        source=tile.source,
                        offset=tile.offset + _dot(local, tile.stride),
                        stride=tile.stride,
                        out_offset=_dot(begin, self._strides) - first,
                        out_stride=self._strides,
                    )

    def _index(self, element: int) -> Shape:
        index = []
        for stride in self._strides:
            at, element = divmod(element, stride)
            index.append(at)
        return tuple(index)

    def _run(self, tile: Tile, index: Shape) -> tuple[int, int]:
        """Position in the tile's source of the element at ``index``, and how many follow densely.

        A run goes on into the next row as long as the tile spans whole rows of the whole, and the
        source stores them densely.
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


def _boxes_of_window(shape: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """A row-major window of a tensor as boxes, each by its start and its shape, in order."""
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


def _zip(start: Shape, shape: Shape, tile: Tile) -> Iterator[tuple[int, int, int, int]]:
    return zip(start, shape, tile.start, tile.shape, strict=True)


def _dot(index: Iterable[int], stride: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, stride, strict=True))


def _check_cover(shape: Shape, tiles: Sequence[Tile], itemsize: int) -> None:
    for tile in tiles:
        inside = len(tile.shape) == len(tile.stride) and all(n > 0 for n in tile.shape)
        if not inside:
            raise LayoutError("a piece of a split tensor reaches outside it", tile.shape, shape)
        last = tile.offset + _dot((n - 1 for n in tile.shape), tile.stride)
        if min(tile.offset, *tile.stride, 0) < 0 or (last + 1) * itemsize > tile.source.nbytes:
            raise LayoutError(
                "a piece of a split tensor reaches outside its shard",
                f"element {last}",
                f"less than {tile.source.nbytes // itemsize}",
            )
    check_cover("a split tensor", shape, [(tile.start, tile.shape) for tile in tiles])


def check_cover(name: str, shape: Shape, boxes: Iterable[tuple[Shape, Shape]]) -> None:
    """Raise unless boxes (first index, size) cover a tensor, each element exactly once.

    The boxes are swept along the dimension in which they start at the most indices: each is
    compared with those only that reach its start, which are few for the chunks of thousands of
    ranks.

    Raises:
        LayoutError: a box reaches outside the tensor, two overlap, or they leave gaps.
    """
    filled = []
    for start, size in boxes:
        fits = len(start) == len(size) == len(shape) and all(
            a >= 0 and a + n <= whole for a, n, whole in zip(start, size, shape, strict=True)
        )
        if not fits:
            raise LayoutError(f"a piece of {name} reaches outside it", (start, size), shape)
        if prod(size):
            filled.append((start, size))
    starts = [len(set(indices)) for indices in zip(*(start for start, _ in filled), strict=True)]
    dim = starts.index(max(starts)) if starts else None
    reaching: list[tuple[Shape, Shape]] = []
    for box in filled if dim is None else sorted(filled, key=lambda one: one[0][dim]):
        reaching = [
            one for one in reaching if dim is None or one[0][dim] + one[1][dim] > box[0][dim]
        ]
        if other := next((one for one in reaching if _overlap(one, box)), None):
            raise LayoutError(f"two pieces of {name} overlap", other, box)
        reaching.append(box)
    covered = sum(prod(size) for _, size in filled)
    if covered != prod(shape):
        raise LayoutError(f"the pieces of {name} leave gaps", f"{covered} elements", prod(shape))


def _overlap(one: tuple[Shape, Shape], other: tuple[Shape, Shape]) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(*one, *other, strict=True))


_GAP_NBYTES = 64 << 10
"""A gap that is read costs about as much time as one more read."""

_SPAN_NBYTES_MIN = 64 << 10


def gather(mosaic: Mosaic, start: int, buffer: memoryview, read: Read) -> None:
    """Fill ``buffer`` with the bytes of ``mosaic`` from ``start`` on, both in whole elements.

    Read run by run, a transposed matrix would take a read for each element. So whatever lies close
    together is read as one span, gaps and all, and its elements are put in their places in memory.
    No span is longer than ``buffer``, or than 64 KiB where that is short; that much memory is held
    besides it for each level of mosaics within mosaics.
    """
    itemsize = mosaic.itemsize
    first = start // itemsize
    limit = max(buffer.nbytes, _SPAN_NBYTES_MIN) // itemsize
    for box in mosaic.boxes(first, first + buffer.nbytes // itemsize):
        for span in _spans(box, limit, itemsize):
            _fill(span, itemsize, buffer, read)


def _fill(box: Box, itemsize: int, buffer: memoryview, read: Read) -> None:
    """Read the span that a box lies in, and put its elements in their places."""
    begin, nbytes = box.offset * itemsize, _span(box) * itemsize
    if _is_run(box):
        out = box.out_offset * itemsize
        read(box.source, begin, buffer[out : out + nbytes])
        return
    scratch = memoryview(bytearray(nbytes))
    read(box.source, begin, scratch)
    placed = _array(buffer, itemsize, box.shape, box.out_offset, box.out_stride)
    placed[...] = _array(scratch, itemsize, box.shape, 0, box.stride)


def _array(
    memory: memoryview, itemsize: int, shape: Shape, offset: int, stride: Shape
) -> npt.NDArray[np.void | np.unsignedinteger[Any]]:
    import numpy as np  # noqa: PLC0415 - most exports gather nothing

    kind = "u" if itemsize in (1, 2, 4, 8) else "V"
    steps = tuple(step * itemsize for step in stride)
    return np.ndarray(shape, np.dtype(f"{kind}{itemsize}"), memory, offset * itemsize, steps)


def _spans(box: Box, limit: int, itemsize: int) -> Iterator[Box]:
    """The box in parts that each lie in a span of ``limit`` elements, without wide gaps."""
    if _is_run(box):
        yield box
        return
    dim = max(range(len(box.shape)), key=lambda d: (box.shape[d] > 1, box.stride[d]))
    step, count = box.stride[dim], box.shape[dim]
    within = _span(box) - (count - 1) * step
    wide = (step - within) * itemsize > _GAP_NBYTES
    if not wide and _span(box) <= limit:
        yield box
        return
    each = 1 if wide else max(1, (limit - within) // step + 1)
    for index in range(0, count, each):
        size = min(each, count - index)
        part = replace(
            box,
            shape=(*box.shape[:dim], size, *box.shape[dim + 1 :]),
            offset=box.offset + index * step,
            out_offset=box.out_offset + index * box.out_stride[dim],
        )
        yield from _spans(part, limit, itemsize)


def _span(box: Box) -> int:
    """Elements of the source from the box's first to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(box.shape, box.stride, strict=True))


def _is_run(box: Box) -> bool:
    """Whether its elements lie one after another, both where they are and where they belong."""
    dims = [d for d, count in enumerate(box.shape) if count > 1]
    dense = 1
    for dim in reversed(dims):
        if not box.stride[dim] == box.out_stride[dim] == dense:
            return False
        dense *= box.shape[dim]
    return dense == prod(box.shape)
