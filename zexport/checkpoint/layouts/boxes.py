"""Tensor parallelism: each rank holds boxes of a tensor, and the boxes say where they belong.

Source: DeepSpeed 0.19.8, ``checkpoint/affine.py`` (a piece is a block of equal arrangement in the
whole and in the shard, both given as offset and strides in elements) and
``checkpoint/ds_to_universal.py`` (``merge_tp_slices``: shards laid end to end along a dimension, as
one or for each of several fused sub-parameters).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod

from msgspec import Struct

from zexport.errors import LayoutError
from zexport.ranges.dtypes import Shape


class Piece(Struct, frozen=True):
    """A box that a rank's shard shares with the whole: its first index in either, and its size."""

    rank: int
    start: Shape
    origin: Shape
    shape: Shape


class Joined(Struct, frozen=True):
    """A whole tensor made of its ranks' pieces: one for each box, and pairs that hold the same."""

    shape: Shape
    pieces: tuple[Piece, ...]
    copies: tuple[tuple[Piece, Piece], ...]


def replicated(shards: Sequence[Shape]) -> Joined:
    """A tensor that every rank holds whole."""
    shape = shards[0]
    if any(other != shape for other in shards):
        raise LayoutError("the copies of a tensor differ in shape", list(shards), shape)
    zero = (0,) * len(shape)
    return placed(shape, shards, (Piece(rank, zero, zero, shape) for rank in range(len(shards))))


def concatenated(shards: Sequence[Shape], dim: int) -> Joined:
    """The shards end to end along ``dim``; they may be of different lengths."""
    _check_dim(shards, dim)
    return interleaved(shards, dim, [[shard[dim] for shard in shards]])


def interleaved(shards: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> Joined:
    """Fused sub-parameters, each split by itself: ``widths`` has a row of ranks for each."""
    _check_dim(shards, dim)
    held = [sum(of_rank) for of_rank in zip(*widths, strict=False)]
    found = [shard[dim] for shard in shards]
    if held != found or any(len(row) != len(shards) or min(row) < 0 for row in widths):
        raise LayoutError(
            "the recorded widths of a tensor's parts are not those of its shards", found, held
        )
    shape = _resized(shards[0], dim, sum(held))
    zero = (0,) * len(shape)
    ends = [0, *accumulate(width for row in widths for width in row)]
    origins = [0] * len(shards)
    pieces = []
    for number, row in enumerate(widths):
        for rank, width in enumerate(row):
            start = _resized(zero, dim, ends[number * len(row) + rank])
            origin = _resized(zero, dim, origins[rank])
            pieces.append(Piece(rank, start, origin, _resized(shape, dim, width)))
            origins[rank] += width
    return placed(shape, shards, pieces)


def placed(shape: Shape, shards: Sequence[Shape], pieces: Iterable[Piece]) -> Joined:
    """The whole of ``shape``, each of its boxes from the first piece that holds it."""
    kept: dict[tuple[Shape, Shape], Piece] = {}
    copies: list[tuple[Piece, Piece]] = []
    held = [0] * len(shards)
    for piece in pieces:
        held[piece.rank] += prod(piece.shape)
        first = kept.setdefault((piece.start, piece.shape), piece) if prod(piece.shape) else piece
        if first is not piece:
            copies.append((first, piece))
    expected = [prod(shard) for shard in shards]
    if held != expected:
        raise LayoutError(
            "the pieces of a split tensor do not add up to its shards", held, expected
        )
    return Joined(shape, tuple(kept.values()), tuple(copies))


def box_start(box: Shape, whole: Shape, offset: int, strides: Sequence[int]) -> Shape | None:
    """Where a strided block begins in a dense tensor, or ``None`` if it is no box of it.

    A block without elements, as a rank has where there are fewer heads than ranks, begins at 0:
    its recorded offset is the end of the ranks before it, which need not be in the tensor.
    """
    dense = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    if not len(box) == len(whole) == len(strides) or offset < 0:
        return None
    if not prod(box):
        return (0,) * len(box)
    if any(n > 1 and a != b for n, a, b in zip(box, strides, dense, strict=True)):
        return None
    start = []
    for step in dense:
        at, offset = divmod(offset, step) if step else (0, offset)
        start.append(at)
    fits = all(a + n <= size for a, n, size in zip(start, box, whole, strict=True))
    return tuple(start) if fits and not offset else None


def _check_dim(shards: Sequence[Shape], dim: int) -> None:
    """Refuse shards that cannot be laid end to end along ``dim``."""
    if any(not 0 <= dim < len(shard) for shard in shards):
        raise LayoutError(
            "a tensor is split along a dimension it does not have", dim, f"one of {shards[0]}"
        )
    rests = {_resized(shard, dim, 0) for shard in shards}
    if len(rests) > 1:
        raise LayoutError(
            "the shards of a tensor do not fit together", list(shards), f"alike but for dim {dim}"
        )


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
