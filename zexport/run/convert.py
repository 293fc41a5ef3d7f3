"""One piece of a tensor, from the checkpoint's bytes to the output's bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from mmap import mmap
from pathlib import Path
from typing import Protocol

from zexport.plan.plan import TensorPlan
from zexport.ranges.casts import Statistics, cast_into, statistics_of
from zexport.ranges.ledger import Ledger, Range
from zexport.run.chunks import Piece, room
from zexport.weights.proof import WeightReader


class TensorReader(Protocol):
    """Where the stored bytes of a plan's tensors come from; may be called from any thread."""

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far."""
        ...

    def new_ledger(self) -> Ledger:
        """An empty ledger, for a shard or another part of the work."""
        ...

    def read_into(self, tensor: TensorPlan, start: int, buffer: memoryview, ledger: Ledger) -> None:
        """Fill ``buffer`` with the stored bytes of ``tensor`` from ``start`` on, and note them."""
        ...

    def take(self, ranges: Mapping[Path, Iterable[Range]]) -> None:
        """Count what a ledger has noted, in this run or before a stop."""
        ...

    def finish(self) -> dict[Path, str]:
        """Check whatever can only be checked when everything has been read and taken.

        Returns:
            For each file, a digest of what was read of it.
        """
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
        self.stored = memoryview(mmap(-1, room(chunk_nbytes)))
        self.out = memoryview(mmap(-1, room(chunk_nbytes)))


def convert(
    piece: Piece, reader: TensorReader, stored: memoryview, out: memoryview, ledger: Ledger
) -> Statistics:
    """Fill ``out`` with a piece's bytes as they belong into the output; ``stored`` is scratch room.

    What is read is noted in ``ledger``.

    Returns:
        What was seen among its values.
    """
    tensor = piece.tensor
    source = out if tensor.dtype is tensor.stored_dtype else stored[: piece.stored_nbytes]
    reader.read_into(tensor, piece.first * tensor.stored_dtype.itemsize, source, ledger)
    cast_into(source, tensor.stored_dtype, tensor.dtype, out)
    return statistics_of(source, tensor.stored_dtype, tensor.dtype, out)
