"""Where tensors are in the rank files: flat groups as strips that are cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from msgspec import Struct

from zexport.checkpoint.state import FileKind, Role, StoredTensor, TrainingState
from zexport.ranges.source import ByteSource, Extent, ExtentIndex, Mosaic

_POINTS = 1000
"""Width of the longest strip in a drawing; narrower pieces are joined with their neighbors."""
_PIECES_MAX = 12_000
"""Of all strips together."""


class Fill(Enum):
    """What the bytes of a piece are."""

    TRAINABLE = "trainable"
    EXPERT = "trainable, experts"
    FROZEN = "frozen"
    BUFFER = "buffers"
    COPY = "replicas"
    PADDING = "padding"


class Piece(Struct, frozen=True):
    """Bytes of one tensor, or of consecutive tensors.

    ``first`` and ``last`` are indexes into the checkpoint's tensors; -1 for none.
    """

    fill: Fill
    first: int
    last: int
    nbytes: int


class Strip(Struct, frozen=True):
    """One rank's partition of a flat group, or the tensors that a file stores whole.

    Attributes:
        file: file name below the tag folder; the kind of file if each tensor has its own.
        offset: of a flat group in the file; else ``None``.
        pieces: all its bytes, in order.
    """

    file: str
    offset: int | None
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def strips(checkpoint: TrainingState) -> tuple[Strip, ...]:
    """Return the bytes that an export reads, by file, flat groups first; the rest is padding."""
    files = {file.path: (number, file) for number, file in enumerate(checkpoint.files)}
    flats = ExtentIndex(flat.source for flat in checkpoint.flats)
    runs = [run for found in flats.ranges.values() for run in found]
    total = sum(tensor.source.nbytes for tensor in checkpoint.tensors if tensor.source is not None)
    longest = max((run.nbytes for run in runs), default=total)
    narrow = max(longest // _POINTS, total // _PIECES_MAX)
    cuts = {run: _Cut(run.offset, run.nbytes, narrow) for run in runs}
    whole: dict[str, tuple[int, _Cut]] = {}
    numbers = {}
    for number, tensor in enumerate(checkpoint.tensors):
        numbers[tensor.name] = number
        for extent in _extents(tensor.source):
            if (run := flats.find(extent)) is not None:
                cut = cuts[run]
            else:
                order, file = files.get(extent.path, (len(files), None))
                name = extent.path.name if file is None else file.name
                if file is not None and file.kind is FileKind.PARAMETER:
                    name = file.kind.value
                _, cut = whole.setdefault(name, (order, _Cut(None, 0, narrow)))
            cut.add(extent, fill_of(tensor), number)
    for replica in checkpoint.replicas:
        for extent in _extents(replica.other):
            if (run := flats.find(extent)) is not None:
                cuts[run].add(extent, Fill.COPY, numbers.get(replica.name, -1))
    found = [
        (files[run.path][0] if run.path in files else len(files), 0, run.path.name, cut)
        for run, cut in cuts.items()
    ]
    found += [(order, 1, name, cut) for name, (order, cut) in whole.items()]
    found.sort(key=lambda one: one[:2])
    return tuple(Strip(name, cut.offset, cut.pieces()) for _, _, name, cut in found)


def fill_of(tensor: StoredTensor) -> Fill:
    """Return the fill of a tensor; experts are recognized by the name of their module."""
    if tensor.role is Role.TRAINABLE:
        return Fill.EXPERT if "experts" in tensor.name.split(".") else Fill.TRAINABLE
    return Fill.FROZEN if tensor.role is Role.FROZEN else Fill.BUFFER


def _extents(source: ByteSource | None) -> Iterator[Extent]:
    """Yield where a tensor is; of a mosaic, each source of tiles as a whole."""
    if isinstance(source, Mosaic):
        for part in dict.fromkeys(source.constituents()):
            yield from _extents(part)
    elif source is not None:
        yield from source.extents(0, source.nbytes)


class _Cut:
    """Pieces of one strip, added in any order.

    Pieces are joined as they are added, so that a strip of 100,000 tensors needs little memory.
    """

    def __init__(self, offset: int | None, nbytes: int, narrow: int) -> None:
        self.offset = offset
        self._begin = self._at = offset or 0
        self._end = self._begin + nbytes
        self._narrow = narrow
        self._pieces: list[tuple[int, Piece]] = []

    def add(self, extent: Extent, fill: Fill, number: int) -> None:
        begin = self._at if self.offset is None else extent.offset
        if self._pieces and begin == self._at:
            before, last = self._pieces[-1]
            if self._joins(last, fill, number, extent.nbytes):
                nbytes = last.nbytes + extent.nbytes
                self._pieces[-1] = (before, Piece(fill, last.first, number, nbytes))
                self._at = begin + extent.nbytes
                return
        self._pieces.append((begin, Piece(fill, number, number, extent.nbytes)))
        self._at = begin + extent.nbytes

    def _joins(self, last: Piece, fill: Fill, number: int, nbytes: int) -> bool:
        """Return whether bytes continue the last piece: same tensor, or narrow and of its kind."""
        if last.fill is not fill or number < 0:
            return False
        is_narrow = max(last.nbytes, nbytes) < self._narrow
        return number == last.last or (number == last.last + 1 and is_narrow)

    def pieces(self) -> tuple[Piece, ...]:
        """Return all pieces in order, with the padding between them."""
        found, at = [], self._begin
        for begin, piece in sorted(self._pieces, key=lambda one: one[0]):
            if begin > at:
                found.append(Piece(Fill.PADDING, -1, -1, begin - at))
            found.append(piece)
            at = begin + piece.nbytes
        if self._end > at:
            found.append(Piece(Fill.PADDING, -1, -1, self._end - at))
        return tuple(found)
