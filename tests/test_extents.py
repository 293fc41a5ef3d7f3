"""Byte sources against plain bytes: what a window's ranges hold is what slicing would give."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zexport.extents import ByteSource, Chain, Extent, Strided, Striped, Window

FILES = {
    Path(name): bytes((i * 7 + salt) % 251 for i in range(600)) for salt, name in enumerate("abc")
}


def bytes_of(source: ByteSource, start: int = 0, stop: int | None = None) -> bytes:
    parts = list(source.extents(start, source.nbytes if stop is None else stop))
    assert all(part.nbytes > 0 for part in parts)
    return b"".join(FILES[part.path][part.offset : part.offset + part.nbytes] for part in parts)


@st.composite
def leaves(draw: st.DrawFn) -> Extent:
    offset = draw(st.integers(0, 500))
    return Extent(draw(st.sampled_from(sorted(FILES))), offset, draw(st.integers(0, 100)))


@st.composite
def windows_of(draw: st.DrawFn, source: ByteSource) -> tuple[int, int]:
    start = draw(st.integers(0, source.nbytes))
    return start, draw(st.integers(start, source.nbytes))


@given(st.data(), leaves())
def test_a_window_of_an_extent_is_a_slice_of_the_file(data: st.DataObject, extent: Extent) -> None:
    start, stop = data.draw(windows_of(extent))
    whole = FILES[extent.path][extent.offset : extent.offset + extent.nbytes]
    assert bytes_of(extent, start, stop) == whole[start:stop]


@given(st.data(), st.lists(leaves(), max_size=6))
def test_a_window_of_a_chain_is_a_slice_of_its_parts_joined(
    data: st.DataObject, parts: list[Extent]
) -> None:
    chain = Chain(tuple(parts))
    start, stop = data.draw(windows_of(chain))
    assert bytes_of(chain, start, stop) == b"".join(map(bytes_of, parts))[start:stop]


def test_chains_nest_and_may_be_empty() -> None:
    inner = Chain((Extent(Path("a"), 3, 4), Chain(())))
    outer = Chain((Chain(()), inner, Extent(Path("b"), 0, 2), inner))
    assert bytes_of(outer) == FILES[Path("a")][3:7] + FILES[Path("b")][:2] + FILES[Path("a")][3:7]
    assert Chain(()).nbytes == 0
    assert list(Chain(()).extents(0, 0)) == []


@given(st.data(), st.lists(leaves(), min_size=1, max_size=4))
def test_a_window_of_a_window_counts_from_where_the_first_begins(
    data: st.DataObject, parts: list[Extent]
) -> None:
    chain = Chain(tuple(parts))
    begin, end = data.draw(windows_of(chain))
    window = Window(chain, begin, end - begin)
    start, stop = data.draw(windows_of(window))
    assert bytes_of(window, start, stop) == bytes_of(chain)[begin:end][start:stop]


@given(st.data(), st.integers(1, 5), st.integers(0, 20), st.integers(1, 30))
def test_stripes_are_taken_from_the_sources_in_turn_and_the_tail_is_left_out(
    data: st.DataObject, count: int, offset: int, stripe: int
) -> None:
    paths = [data.draw(st.sampled_from(sorted(FILES))) for _ in range(count)]
    sources = tuple(Extent(path, 7 * i, 60) for i, path in enumerate(paths))
    nbytes = data.draw(st.integers((count - 1) * stripe + 1, count * stripe))
    striped = Striped(sources, offset, stripe, nbytes)
    start, stop = data.draw(windows_of(striped))
    naive = b"".join(bytes_of(source)[offset : offset + stripe] for source in sources)[:nbytes]
    assert bytes_of(striped, start, stop) == naive[start:stop]


@st.composite
def strided_tensors(draw: st.DrawFn) -> Strided:
    itemsize = draw(st.sampled_from([1, 2, 4]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    stride = tuple(draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
    return Strided(Path("a"), draw(st.integers(0, 40)), itemsize, shape, stride)


def naive_bytes(tensor: Strided) -> bytes:
    data, size = FILES[tensor.path], tensor.itemsize
    starts = (
        tensor.offset + size * sum(i * step for i, step in zip(index, tensor.stride, strict=True))
        for index in np.ndindex(tensor.shape)
    )
    return b"".join(data[start : start + size] for start in starts)


@given(st.data(), strided_tensors())
def test_a_window_of_a_strided_tensor_is_a_slice_of_its_elements_in_row_major_order(
    data: st.DataObject, tensor: Strided
) -> None:
    assert tensor.nbytes == len(naive_bytes(tensor))
    start, stop = data.draw(windows_of(tensor))
    assert bytes_of(tensor, start, stop) == naive_bytes(tensor)[start:stop]


@given(st.data(), strided_tensors())
def test_the_ranges_of_a_strided_tensor_are_as_long_as_they_can_be(
    data: st.DataObject, tensor: Strided
) -> None:
    start, stop = data.draw(windows_of(tensor))
    ranges = list(tensor.extents(start, stop))
    for before, after in pairwise(ranges):
        assert before.offset + before.nbytes != after.offset


def test_a_large_dense_part_of_a_strided_tensor_is_one_range() -> None:
    rows = Strided(Path("a"), 0, 4, (3, 10**6, 10**6, 1), (2 * 10**12, 10**6, 1, 7))
    assert list(rows.extents(0, rows.nbytes)) == [
        Extent(Path("a"), i * 8 * 10**12, 4 * 10**12) for i in range(3)
    ]
