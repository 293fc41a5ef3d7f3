"""Split tensors are put together from their pieces, window by window."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zexport.errors import LayoutError
from zexport.ranges.source import Extent, Mosaic, Tile, row_major

_SHARDS = Path("shards")


@st.composite
def split_arrays(draw: st.DrawFn) -> tuple[np.ndarray, Mosaic, bytes]:
    """An array, its mosaic of blocks cut along every dimension, and the file they lie in."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    whole = np.arange(np.prod(shape), dtype="<i4").reshape(shape)
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    file, tiles = b"", []
    blocks = [((), ())]
    for edges in cuts:
        pairs = list(pairwise(edges))
        blocks = [((*s, a), (*n, b - a)) for s, n in blocks for a, b in pairs]
    for start, size in draw(st.permutations(blocks)):
        block = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        source = Extent(_SHARDS, len(file), block.nbytes)
        tiles.append(Tile(start, size, source, 0, row_major(size)))
        file += block.tobytes()
    return whole, Mosaic(shape, 4, tuple(tiles)), file


@given(split_arrays(), st.data())
def test_any_window_of_a_mosaic_is_that_window_of_the_whole(
    split: tuple[np.ndarray, Mosaic, bytes], data: st.DataObject
) -> None:
    whole, mosaic, file = split
    start = data.draw(st.integers(0, mosaic.nbytes))
    stop = data.draw(st.integers(start, mosaic.nbytes))
    found = b"".join(file[e.offset : e.offset + e.nbytes] for e in mosaic.extents(start, stop))
    assert found == whole.tobytes()[start:stop]


@pytest.mark.parametrize(
    ("tiles", "problem"),
    [
        ([((0, 0), (2, 2))], "leave gaps"),
        ([((0, 0), (2, 3)), ((0, 2), (2, 2))], "overlap"),
        ([((0, 0), (3, 4))], "reaches outside it"),
    ],
)
def test_pieces_that_do_not_tile_the_whole_are_refused(
    tiles: list[tuple[tuple[int, int], tuple[int, int]]], problem: str
) -> None:
    source = Extent(_SHARDS, 0, 400)
    with pytest.raises(LayoutError, match=problem):
        Mosaic((2, 4), 4, tuple(Tile(a, n, source, 0, row_major(n)) for a, n in tiles))


def test_a_piece_that_reaches_beyond_its_shard_is_refused() -> None:
    with pytest.raises(LayoutError, match="outside its shard"):
        Mosaic((2, 2), 4, (Tile((0, 0), (2, 2), Extent(_SHARDS, 0, 12), 0, (2, 1)),))
