"""Byte sources against plain bytes: what a window's ranges hold is what slicing would give."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from zexport.ranges.source import ByteSource, Chain, Extent, Striped, Window

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
