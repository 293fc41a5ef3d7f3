"""Scattered elements arrive where they belong, and in few reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zexport.ranges import source as mosaics
from zexport.ranges.source import ByteSource, Extent, Mosaic, Tile, gather

_FILE = Path("file")


class _Reads:
    """Reads from memory, and how many there were."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        self.nbytes: list[int] = []

    def __call__(self, source: ByteSource, start: int, buffer: memoryview) -> None:
        self.nbytes.append(buffer.nbytes)
        if isinstance(source, Mosaic):
            gather(source, start, buffer, self)
            return
        parts = source.extents(start, start + buffer.nbytes)
        buffer[:] = b"".join(self.file[e.offset : e.offset + e.nbytes] for e in parts)


@st.composite
def strided_mosaics(draw: st.DrawFn) -> tuple[Mosaic, np.ndarray, bytes]:
    """A whole of one or two tiles at arbitrary strides, the whole as it should be, and the file."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    cut = draw(st.integers(1, shape[0])) if shape else 0
    file, tiles, parts = b"", [], []
    for start, stop in [(0, cut), (cut, shape[0])] if shape else [(0, 0)]:
        size = (stop - start, *shape[1:]) if shape else ()
        if 0 in size:
            continue
        stride = tuple(draw(st.lists(st.integers(0, 9), min_size=len(size), max_size=len(size))))
        offset = draw(st.integers(0, 3))
        numel = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        data = draw(st.randoms()).randbytes(numel * itemsize)
        source = Extent(_FILE, len(file), len(data))
        file += data
        tiles.append(
            Tile((start, *(0 for _ in shape[1:])) if shape else (), size, source, offset, stride)
        )
        steps = [s * itemsize for s in stride]
        parts.append(np.ndarray(size, f"V{itemsize}", data, offset * itemsize, steps))
    whole = np.concatenate(parts) if shape else parts[0].copy()
    return Mosaic(shape, itemsize, tuple(tiles)), whole, file


@given(strided_mosaics(), st.data(), st.integers(1, 40), st.integers(0, 40))
def test_any_window_of_strided_tiles_is_that_window_of_the_whole(
    made: tuple[Mosaic, np.ndarray, bytes], data: st.DataObject, span: int, gap: int
) -> None:
    mosaic, whole, file = made
    first = data.draw(st.integers(0, whole.size))
    last = data.draw(st.integers(first, whole.size))
    start, stop = first * mosaic.itemsize, last * mosaic.itemsize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaics, "_SPAN_NBYTES_MIN", span * mosaic.itemsize)
        patch.setattr(mosaics, "_GAP_NBYTES", gap * mosaic.itemsize)
        found = bytearray(stop - start)
        gather(mosaic, start, memoryview(found), _Reads(file))
    assert found == whole.tobytes()[start:stop]
    parts = mosaic.extents(start, stop)
    assert found == b"".join(file[e.offset : e.offset + e.nbytes] for e in parts)


def _transposed(whole: np.ndarray) -> Mosaic:
    source = Extent(_FILE, 0, whole.nbytes)
    rows, columns = whole.shape
    tile = Tile((0, 0), (columns, rows), source, 0, (1, columns))
    return Mosaic((columns, rows), whole.itemsize, (tile,))


def test_a_transposed_matrix_is_read_in_spans_as_long_as_the_buffer() -> None:
    whole = np.arange(512 * 512, dtype=np.uint32).reshape(512, 512)
    reads = _Reads(whole.tobytes())
    found = bytearray(whole.nbytes // 4)
    gather(_transposed(whole), 0, memoryview(found), reads)
    assert found == whole.T.tobytes()[: len(found)]
    assert len(reads.nbytes) <= 5
    assert max(reads.nbytes) <= len(found)


def test_wide_gaps_are_not_read() -> None:
    whole = np.arange(4 << 20, dtype=np.uint32).reshape(4, 1 << 20)
    reads = _Reads(whole.tobytes())
    found = bytearray(4 * 4 * 8)
    gather(_transposed(whole), 0, memoryview(found), reads)
    assert found == whole[:, :8].T.tobytes()
    assert reads.nbytes == [32] * 4
