"""Tensors laid together from boxes of others, as a tensor-parallel weight is from its shards.

Still a byte source: any window of the whole can be asked for, and no more than the ranges of that
window are ever named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from zexport.extents import ByteSource, Extent
from zexport.layouts import LayoutError

Shape = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Shape:
    """Strides, in elements, of a densely stored tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of the whole and where its elements lie in a source.

    Attributes:
        start: its first index in the whole, for each dimension.
        shape: its size in each dimension.
        source: the bytes of the tensor it is cut from.
        offset: element of ``source`` that holds the box's first.
        stride: elements of ``source`` between neighbours, for each dimension.
    """

    start: Shape
    shape: Shape
    source: ByteSource
    offset: int
    stride: Shape

    def holds(self, index: Sequence[int]) -> bool:
        """Whether the element of the whole at ``index`` is in this box."""
        return all(a <= i < a + n for a, i, n in zip(self.start, index, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Mosaic:
    """A row-major tensor of ``shape`` made of tiles that cover it, each element once.

    Raises:
        LayoutError: on construction, where the tiles leave a gap, overlap, or reach outside.
    """

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
        position = tile.offset + sum(i * s for i, s in zip(local, tile.stride, strict=True))
        dense = run = 1
        for dim in range(len(self.shape) - 1, -1, -1):
            if tile.stride[dim] != dense and tile.shape[dim] != 1:
                break
            run += (tile.shape[dim] - 1 - local[dim]) * dense
            dense *= tile.shape[dim]
            if tile.shape[dim] != self.shape[dim]:
                break
        return position, run


def _check_cover(shape: Shape, tiles: Sequence[Tile], itemsize: int) -> None:
    for tile in tiles:
        inside = len(tile.start) == len(tile.shape) == len(tile.stride) == len(shape) and all(
            a >= 0 and n > 0 and a + n <= size
            for a, n, size in zip(tile.start, tile.shape, shape, strict=True)
        )
        if not inside:
            raise LayoutError("a piece of a split tensor reaches outside it", tile.shape, shape)
        last = tile.offset + sum((n - 1) * s for n, s in zip(tile.shape, tile.stride, strict=True))
        if min(tile.offset, *tile.stride, 0) < 0 or (last + 1) * itemsize > tile.source.nbytes:
            raise LayoutError(
                "a piece of a split tensor reaches outside its shard",
                f"element {last}",
                f"less than {tile.source.nbytes // itemsize}",
            )
    for number, tile in enumerate(tiles):
        if any(_overlap(tile, other) for other in tiles[:number]):
            raise LayoutError("two pieces of a split tensor overlap", tile.start, "apart")
    covered = sum(prod(tile.shape) for tile in tiles)
    if covered != prod(shape):
        raise LayoutError("the pieces of a split tensor leave gaps", covered, prod(shape))


def _overlap(one: Tile, other: Tile) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.start, one.shape, other.start, other.shape, strict=True)
    )
