"""Byte sources against slices of plain bytes, and boxes against NumPy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zexport.errors import LayoutError
from zexport.ranges import source as sources
from zexport.ranges.computed import ComputedExtent, Partition, Partitions
from zexport.ranges.source import (
    ByteSource,
    Chain,
    Extent,
    Mosaic,
    Partitioned,
    Tile,
    Window,
    gather,
    row_major,
)

_FILE = Path("file")
_CONTENT = bytes(i * 7 % 251 + 1 for i in range(600))


def bytes_of(source: ByteSource, start: int, stop: int, content: bytes = _CONTENT) -> bytes:
    parts = list(source.extents(start, stop))
    assert all(part.nbytes > 0 for part in parts)
    return b"".join(
        bytes(part.nbytes)
        if isinstance(part, ComputedExtent)
        else content[part.offset : part.offset + part.nbytes]
        for part in parts
    )


@st.composite
def leaves(draw: st.DrawFn) -> Extent:
    return Extent(_FILE, draw(st.integers(0, 500)), draw(st.integers(0, 100)))


@st.composite
def windows_of(draw: st.DrawFn, nbytes: int) -> tuple[int, int]:
    start = draw(st.integers(0, nbytes))
    return start, draw(st.integers(start, nbytes))


@given(st.data(), st.lists(leaves(), min_size=1, max_size=4))
def test_window_of_a_chain_is_a_slice(data: st.DataObject, parts: list[Extent]) -> None:
    chain = Chain(tuple(parts))
    whole = b"".join(bytes_of(part, 0, part.nbytes) for part in parts)
    begin, end = data.draw(windows_of(chain.nbytes))
    window = Window(chain, begin, end - begin)
    start, stop = data.draw(windows_of(window.nbytes))
    assert bytes_of(window, start, stop) == whole[begin:end][start:stop]


@given(st.data(), st.integers(1, 5), st.integers(0, 20), st.integers(1, 30))
def test_zero3_parameter_is_joined_from_partitions(
    data: st.DataObject, count: int, offset: int, partition: int
) -> None:
    parts = tuple(Extent(_FILE, 7 * i, 60) for i in range(count))
    nbytes = data.draw(st.integers((count - 1) * partition + 1, count * partition))
    partitioned = Partitioned(parts, offset, partition, nbytes)
    start, stop = data.draw(windows_of(nbytes))
    whole = b"".join(bytes_of(one, 0, 60)[offset : offset + partition] for one in parts)[:nbytes]
    assert bytes_of(partitioned, start, stop) == whole[start:stop]


@given(
    lengths=st.lists(st.integers(0, 40), max_size=5),
    world_size=st.integers(1, 5),
    data=st.data(),
)
def test_partition_is_a_padded_slice_of_each_source(
    lengths: list[int], world_size: int, data: st.DataObject
) -> None:
    runs = [Extent(_FILE, 3 * index, length) for index, length in enumerate(lengths)]
    sizes = [-(-length // world_size) for length in lengths]
    for rank in range(world_size):
        whole = b"".join(
            bytes_of(run, 0, run.nbytes).ljust(size * world_size, b"\0")[rank * size :][:size]
            for run, size in zip(runs, sizes, strict=True)
        )
        partition = Partition(Partitions(tuple(runs), tuple(sizes)), rank)
        assert partition.nbytes == len(whole)
        start, stop = data.draw(windows_of(len(whole)))
        assert bytes_of(partition, start, stop) == whole[start:stop]


@st.composite
def grids(draw: st.DrawFn) -> tuple[np.ndarray, Mosaic, bytes]:
    """An array, its mosaic of boxes cut along every dimension, and their file."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    whole = np.arange(np.prod(shape), dtype="<i4").reshape(shape)
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    file, tiles = b"", []
    boxes = [((), ())]
    for edges in cuts:
        pairs = list(pairwise(edges))
        boxes = [((*s, a), (*n, b - a)) for s, n in boxes for a, b in pairs]
    for start, size in draw(st.permutations(boxes)):
        box = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        source = Extent(_FILE, len(file), box.nbytes)
        tiles.append(Tile(start, size, source, 0, row_major(size)))
        file += box.tobytes()
    return whole, Mosaic(shape, 4, tuple(tiles)), file


@given(grids(), st.data())
def test_window_of_a_mosaic_is_a_slice(
    grid: tuple[np.ndarray, Mosaic, bytes], data: st.DataObject
) -> None:
    whole, mosaic, file = grid
    start, stop = data.draw(windows_of(mosaic.nbytes))
    assert bytes_of(mosaic, start, stop, file) == whole.tobytes()[start:stop]


@pytest.mark.parametrize(
    ("tiles", "nbytes", "problem"),
    [
        ([((0, 0), (2, 2))], 400, "leave gaps"),
        ([((0, 0), (2, 3)), ((0, 2), (2, 2))], 400, "overlap"),
        ([((0, 0), (3, 4))], 400, "exceeds it"),
        ([((0, 0), (2, 4))], 28, "exceeds its storage"),
    ],
)
def test_boxes_that_do_not_cover_a_tensor_are_refused(
    tiles: list[tuple[tuple[int, int], tuple[int, int]]], nbytes: int, problem: str
) -> None:
    source = Extent(_FILE, 0, nbytes)
    with pytest.raises(LayoutError, match=problem):
        Mosaic((2, 4), 4, tuple(Tile(a, n, source, 0, row_major(n)) for a, n in tiles))


@given(
    shape=st.lists(st.integers(1, 5), max_size=4),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    data=st.data(),
    span=st.integers(1, 40),
    gap=st.integers(0, 40),
)
def test_strided_tensor_is_gathered(
    shape: list[int], itemsize: int, data: st.DataObject, span: int, gap: int
) -> None:
    size = tuple(shape)
    stride = tuple(data.draw(st.integers(0, 9)) for _ in size)
    numel = 4 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    file = data.draw(st.randoms()).randbytes(numel * itemsize)
    tile = Tile((0,) * len(size), size, Extent(_FILE, 0, len(file)), 3, stride)
    mosaic = Mosaic(size, itemsize, (tile,))
    steps = [step * itemsize for step in stride]
    whole = np.ndarray(size, f"V{itemsize}", file, 3 * itemsize, steps)
    start, stop = (itemsize * at for at in data.draw(windows_of(whole.size)))

    def read(source: ByteSource, begin: int, buffer: memoryview) -> None:
        buffer[:] = bytes_of(source, begin, begin + buffer.nbytes, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_SPAN_NBYTES_MIN", span * itemsize)
        patch.setattr(sources, "_GAP_NBYTES", gap * itemsize)
        found = bytearray(stop - start)
        gather(mosaic, start, memoryview(found), read)
    assert found == whole.tobytes()[start:stop] == bytes_of(mosaic, start, stop, file)
