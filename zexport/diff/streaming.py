"""Pairs of tensors read side by side, in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from threading import local

from msgspec import Struct

from zexport.checkpoint.state import StoredTensor, source_of
from zexport.diff.roundings import Rounding, possible_roundings
from zexport.diff.values import PairSums, compare
from zexport.ranges.ahead import announced, in_order
from zexport.ranges.reader import SourceReader
from zexport.ranges.source import ByteSource

_CHUNK_NUMEL = 1 << 17
"""Elements read together."""
_PIECE_NUMEL = 1 << 22
"""Elements of one task, so that one large tensor keeps every thread busy."""
_ITEMSIZE_MAX = 8
_AHEAD = 4
"""Tasks a thread that may wait for their turn."""


class Pair(Struct, frozen=True):
    """A tensor of A and what B has of it."""

    a: StoredTensor
    b: StoredTensor

    @property
    def numel(self) -> int:
        """Elements that both have in one order: all, or those of the rows that both have."""
        a, b = self.a.shape, self.b.shape
        return min(prod(a), prod(b)) if a == b or (a and b and a[1:] == b[1:]) else 0

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        """What may explain it."""
        return possible_roundings(self.a.dtype, self.b.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of both that are compared."""
        return self.numel * (self.a.dtype.itemsize + self.b.dtype.itemsize)


def sums_of(
    pairs: Iterable[Pair],
    reader: SourceReader,
    jobs: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[Pair, PairSums]:
    """What is seen of every pair; ``on_bytes`` is told how many bytes were compared since."""
    sums = {pair: PairSums(frozenset(pair.roundings)) for pair in pairs}
    for piece, seen in _compared(_pieces(sums), reader, jobs):
        sums[piece.pair] += seen
        on_bytes(piece.nbytes)
    return sums


class _Piece(Struct, frozen=True):
    """The elements ``start`` to ``stop`` of a pair."""

    pair: Pair
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.pair.nbytes * (self.stop - self.start) // self.pair.numel

    @property
    def windows(self) -> Iterator[tuple[ByteSource, int, int]]:
        for side in (self.pair.a, self.pair.b):
            size = side.dtype.itemsize
            yield source_of(side), self.start * size, self.stop * size


def _pieces(pairs: Iterable[Pair]) -> Iterator[_Piece]:
    for pair in pairs:
        for start in range(0, pair.numel, _PIECE_NUMEL):
            yield _Piece(pair, start, min(start + _PIECE_NUMEL, pair.numel))


def _compared(
    pieces: Iterable[_Piece], reader: SourceReader, jobs: int
) -> Iterator[tuple[_Piece, PairSums]]:
    """What is seen of every piece, in order; few are under way at a time."""
    buffers = _Buffers()

    def seen(piece: _Piece) -> PairSums:
        return _seen(piece, reader, buffers)

    ahead = announced(pieces, lambda one: one.nbytes, lambda one: one.windows, reader.expect)
    workers = ThreadPoolExecutor(jobs)
    try:
        yield from in_order(workers, seen, ahead, ahead=jobs * _AHEAD)
    finally:
        workers.shutdown(cancel_futures=True)


class _Buffers(local):
    """Room for a chunk of either side, in each thread its own."""

    def __init__(self) -> None:
        self.a = memoryview(bytearray(_CHUNK_NUMEL * _ITEMSIZE_MAX))
        self.b = memoryview(bytearray(_CHUNK_NUMEL * _ITEMSIZE_MAX))


def _seen(piece: _Piece, reader: SourceReader, buffers: _Buffers) -> PairSums:
    a, b = piece.pair.a, piece.pair.b
    sums = PairSums(frozenset(piece.pair.roundings))
    for start in range(piece.start, piece.stop, _CHUNK_NUMEL):
        numel = min(_CHUNK_NUMEL, piece.stop - start)
        a_part = buffers.a[: numel * a.dtype.itemsize]
        b_part = buffers.b[: numel * b.dtype.itemsize]
        reader.read_into(source_of(a), start * a.dtype.itemsize, a_part)
        reader.read_into(source_of(b), start * b.dtype.itemsize, b_part)
        sums += compare(a_part, a.dtype, b_part, b.dtype, start=start, tried=sums.roundings)
    return sums
