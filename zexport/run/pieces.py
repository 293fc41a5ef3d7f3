"""How a file is cut into the pieces that are moved at a time, and moving one: read and cast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from zexport.export.plan import TensorPlan
from zexport.export.proof import WeightReader
from zexport.ranges.casts import Statistics, cast_into, statistics_of
from zexport.ranges.ledger import Ledger, Range

_LEAST_NBYTES = 8
"""Room for one element of the largest type."""


class Piece(Struct, frozen=True):
    """Elements ``first`` to ``last`` (half-open) of one tensor."""

    tensor: TensorPlan
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return (self.last - self.first) * self.tensor.dtype.itemsize

    @property
    def offset(self) -> int:
        """Its first byte in the file."""
        return self.tensor.offset + self.first * self.tensor.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.first == 0 and self.last == self.tensor.numel


class Chunk(Struct, frozen=True):
    """Pieces that follow one another in the output, with room for what stands between them.

    Each is of the tensor behind that of the piece before it; ``index`` is the first one's place
    among all tensors.
    """

    pieces: tuple[Piece, ...]
    index: int
    is_last: bool

    @property
    def offset(self) -> int:
        """Its first byte in the file."""
        return self.pieces[0].offset if self.pieces else 0

    def runs(self) -> Iterator[tuple[int, int]]:
        """Where its bytes lie in the file, from one to the next that is not its own."""
        start = stop = self.offset
        for piece in self.pieces:
            if piece.offset != stop:
                yield start, stop
                start = piece.offset
            stop = piece.offset + piece.nbytes
        if start < stop:
            yield start, stop

    @property
    def nbytes(self) -> int:
        """Bytes of its pieces."""
        return sum(piece.nbytes for piece in self.pieces)


def _room(chunk_nbytes: int) -> int:
    """Bytes that a buffer for chunks of ``chunk_nbytes`` needs."""
    return max(chunk_nbytes, _LEAST_NBYTES)


def pieces(tensor: TensorPlan, chunk_nbytes: int) -> Iterator[Piece]:
    """A tensor in order, in pieces that fit a buffer as stored and as written; at least one."""
    step = _room(chunk_nbytes) // _element_nbytes(tensor)
    for first in range(0, max(tensor.numel, 1), step):
        yield Piece(tensor, first, min(first + step, tensor.numel))


def chunks(tensors: Sequence[TensorPlan], chunk_nbytes: int) -> Iterator[Chunk]:
    """Tensors in file order, each chunk full or nearly so, however small they are.

    Every tensor has at least one piece, an empty one too; there is at least one chunk.
    """
    limit = _room(chunk_nbytes)
    gathered: list[Piece] = []
    used = end = begin = 0
    for index, tensor in enumerate(tensors):
        each, first = _element_nbytes(tensor), 0
        used += tensor.offset - end if gathered else 0
        while first < tensor.numel or first == 0:
            count = max(min((limit - used) // each, tensor.numel - first), 0)
            if count or not tensor.numel:
                gathered.append(Piece(tensor, first, first + count))
                used += count * each
                first += count
            if first == tensor.numel:
                break
            if gathered:
                yield Chunk(tuple(gathered), begin, is_last=False)
            gathered, used, begin = [], 0, index
        end = tensor.offset + tensor.nbytes
    yield Chunk(tuple(gathered), begin, is_last=True)


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

    def expect(self, pieces: Iterable[Piece]) -> None:
        """Say that pieces will be read soon, each once."""
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

    def expect(self, pieces: Iterable[Piece]) -> None:
        """Have storage that is far away fetch the pieces ahead."""
        self._files.expect(
            (piece.tensor.source, piece.first * itemsize, piece.last * itemsize)
            for piece in pieces
            for itemsize in (piece.tensor.stored_dtype.itemsize,)
        )

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
    size = tensor.stored_dtype.itemsize
    is_cast = tensor.dtype is not tensor.stored_dtype
    source = stored[: (piece.last - piece.first) * size] if is_cast else out
    reader.read_into(tensor, piece.first * size, source, ledger)
    cast_into(source, tensor.stored_dtype, tensor.dtype, out)
    return statistics_of(source, tensor.stored_dtype, tensor.dtype, out)
