"""How a file is cut into the pieces that are moved at a time, and moving one: read and cast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from mmap import mmap
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from zexport.plan.plan import FilePlan, TensorPlan
from zexport.ranges.casts import Statistics, cast_into, statistics_of
from zexport.ranges.ledger import Ledger, Range
from zexport.weights.proof import WeightReader

_LEAST_NBYTES = 8
"""Room for one element of the largest type."""


class Piece(Struct, frozen=True):
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


class Chunk(Struct, frozen=True):
    """Pieces that lie side by side in the output, ``nbytes`` from byte ``offset`` of the file."""

    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


def _room(chunk_nbytes: int) -> int:
    """Bytes that a buffer for chunks of ``chunk_nbytes`` needs."""
    return max(chunk_nbytes, _LEAST_NBYTES)


def pieces(tensor: TensorPlan, chunk_nbytes: int) -> Iterator[Piece]:
    """A tensor in order, in pieces that fit a buffer as stored and as written; at least one."""
    step = _room(chunk_nbytes) // _element_nbytes(tensor)
    for first in range(0, max(tensor.numel, 1), step):
        yield Piece(tensor, first, min(first + step, tensor.numel))


def chunks(file: FilePlan, chunk_nbytes: int) -> Iterator[Chunk]:
    """A file's data in order, each chunk full or nearly so, however small its tensors are.

    Every tensor has at least one piece, an empty one too; a file has at least one chunk.
    """
    limit = _room(chunk_nbytes)
    offset = len(file.head)
    gathered: list[Piece] = []
    used = 0
    for tensor in file.tensors:
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


class TensorReader(Protocol):
    """Where the stored bytes of a plan's tensors come from; may be called from any thread."""

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far."""
        ...

    def new_ledger(self) -> Ledger:
        """An empty ledger, for a file or another part of the work."""
        ...

    def read_into(self, tensor: TensorPlan, start: int, buffer: memoryview, ledger: Ledger) -> None:
        """Fill ``buffer`` with the stored bytes of ``tensor`` from ``start`` on, and note them."""
        ...

    def take(self, ranges: Mapping[Path, Iterable[Range]]) -> None:
        """Count what a ledger has noted, in this run or before a stop."""
        ...

    def finish(self) -> dict[Path, str]:
        """A digest of what was read of each file, when what remains to be checked was checked."""
        ...


class FileReader:
    """The checkpoint's files as a ``TensorReader``."""

    def __init__(self, files: WeightReader) -> None:
        self._files = files
        self.new_ledger = files.new_ledger
        self.take = files.take
        self.finish = files.finish

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far, those read again for a CRC included."""
        return self._files.nbytes_read

    def read_into(self, tensor: TensorPlan, start: int, buffer: memoryview, ledger: Ledger) -> None:
        """Fill ``buffer`` with the stored bytes of ``tensor`` from ``start`` on."""
        self._files.read_into(tensor.source, start, buffer, ledger)


class Buffers:
    """Room for one chunk: the bytes of a piece as stored, and the chunk as written."""

    def __init__(self, chunk_nbytes: int) -> None:
        self.stored = memoryview(mmap(-1, _room(chunk_nbytes)))
        self.out = memoryview(mmap(-1, _room(chunk_nbytes)))


def convert(
    piece: Piece, reader: TensorReader, stored: memoryview, out: memoryview, ledger: Ledger
) -> Statistics:
    """Fill ``out`` with a piece's bytes as written, and say what was seen of its values."""
    tensor = piece.tensor
    source = out if tensor.dtype is tensor.stored_dtype else stored[: piece.stored_nbytes]
    reader.read_into(tensor, piece.first * tensor.stored_dtype.itemsize, source, ledger)
    cast_into(source, tensor.stored_dtype, tensor.dtype, out)
    return statistics_of(source, tensor.stored_dtype, tensor.dtype, out)
