"""How a shard is cut into the pieces that are moved at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zexport.plan.plan import FilePlan, TensorPlan

_LEAST_NBYTES = 8
"""Room for one element of the largest type."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``first`` to ``last`` (half-open) of one tensor."""

    tensor: TensorPlan
    first: int
    last: int

    @property
    def stored_nbytes(self) -> int:
        """Bytes in the checkpoint."""
        return (self.last - self.first) * self.tensor.stored_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return (self.last - self.first) * self.tensor.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.first == 0 and self.last == self.tensor.numel


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pieces that lie side by side in the output, ``nbytes`` from byte ``offset`` of the file."""

    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


def room(chunk_nbytes: int) -> int:
    """Bytes that a buffer for chunks of ``chunk_nbytes`` needs."""
    return max(chunk_nbytes, _LEAST_NBYTES)


def pieces(tensor: TensorPlan, chunk_nbytes: int) -> Iterator[Piece]:
    """A tensor in order, in pieces that fit a buffer as stored and as written; at least one."""
    step = room(chunk_nbytes) // _element_nbytes(tensor)
    for first in range(0, max(tensor.numel, 1), step):
        yield Piece(tensor, first, min(first + step, tensor.numel))


def chunks(shard: FilePlan, chunk_nbytes: int) -> Iterator[Chunk]:
    """A shard's data in file order, each chunk full or nearly so, however small its tensors are.

    Every tensor has at least one piece, an empty one too; a shard has at least one chunk.
    """
    limit = room(chunk_nbytes)
    offset = len(shard.head)
    gathered: list[Piece] = []
    used = 0
    for tensor in shard.tensors:
        first = 0
        each = _element_nbytes(tensor)
        while first < tensor.numel or first == 0:
            count = min((limit - used) // each, tensor.numel - first)
            if count or not tensor.numel:
                gathered.append(Piece(tensor, first, first + count))
                used += count * each
                first += count
            if first == tensor.numel:
                break
            offset, chunk = _closed(offset, gathered)
            yield chunk
            gathered, used = [], 0
    yield _closed(offset, gathered)[1]


def _closed(offset: int, gathered: list[Piece]) -> tuple[int, Chunk]:
    nbytes = sum(piece.nbytes for piece in gathered)
    return offset + nbytes, Chunk(offset, nbytes, tuple(gathered))


def _element_nbytes(tensor: TensorPlan) -> int:
    return max(tensor.dtype.itemsize, tensor.stored_dtype.itemsize)
