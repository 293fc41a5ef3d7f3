"""Where every tensor lies in the files of the ranks: the flat groups as strips, cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.state import FileKind, Role, StoredTensor, TrainingState
from zexport.ranges.source import ByteSource, Extent, Mosaic, Places

_PIECES = 1000
"""A strip is drawn about so many points wide: what is narrower joins its neighbours."""
_PIECES_MIN = 10
_PIECES_TOGETHER = 12_000


class Fill(Enum):
    """What the bytes of a piece are."""

    TRAINABLE = "trainable"
    EXPERT = "trainable, of experts"
    FROZEN = "frozen"
    BUFFER = "buffers"
    COPY = "second copies"
    PADDING = "padding"


class Piece(Struct, frozen=True):
    """Some bytes of a strip: those of one tensor, or of several that follow one another.

    ``first`` and ``last`` are numbers of the checkpoint's tensors; -1 where there is none.
    """

    fill: Fill
    first: int
    last: int
    nbytes: int


class Strip(Struct, frozen=True):
    """A run of bytes that one rank holds: a flat group's partition, or weights that lie whole.

    Attributes:
        file: name of the file below the tag folder, or of the kind of file where each tensor has
            one of its own.
        offset: where in the file it begins; ``None`` where its pieces do not lie end to end.
        pieces: all its bytes, in their order.
    """

    file: str
    offset: int | None
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


def strips(checkpoint: TrainingState) -> tuple[Strip, ...]:
    """The bytes that an export reads, as they lie: file after file, flat groups first in each.

    Padding is what a flat group holds and no tensor claims.
    """
    names = {file.path: (n, file) for n, file in enumerate(checkpoint.files)}
    flats = Places(flat.source for flat in checkpoint.flats)
    cuts = {run: _Cut(run.offset, run.nbytes) for runs in flats.ranges.values() for run in runs}
    whole: dict[str, _Cut] = {}
    order: dict[str, int] = {}
    for number, tensor in enumerate(checkpoint.tensors):
        for extent in _runs(tensor.source):
            run = flats.find(extent)
            if run is None:
                index, file = names.get(extent.path, (len(names), None))
                own = file is not None and file.kind is FileKind.PARAMETER
                name = extent.path.name if file is None else file.kind.value if own else file.name
                order.setdefault(name, index)
            cut = whole.setdefault(name, _Cut(None, 0)) if run is None else cuts[run]
            cut.add(extent, fill_of(tensor), number)
    numbers = {tensor.name: number for number, tensor in enumerate(checkpoint.tensors)}
    for replica in checkpoint.replicas:
        for extent in _runs(replica.other):
            if (run := flats.find(extent)) is not None:
                cuts[run].add(extent, Fill.COPY, numbers.get(replica.name, -1))
    drawn = [
        (names.get(run.path, (len(names), 0))[0], 0, Strip(run.path.name, run.offset, cut.pieces()))
        for run, cut in cuts.items()
    ]
    drawn += [(order[name], 1, Strip(name, None, cut.pieces())) for name, cut in whole.items()]
    return _within_bounds([strip for _, _, strip in sorted(drawn, key=lambda one: one[:2])])


def fill_of(tensor: StoredTensor) -> Fill:
    """What the bytes of a tensor are; experts are known by the names that their module gives."""
    if tensor.role is Role.TRAINABLE:
        return Fill.EXPERT if "experts" in tensor.name.split(".") else Fill.TRAINABLE
    return Fill.FROZEN if tensor.role is Role.FROZEN else Fill.BUFFER


def _runs(source: ByteSource | None) -> Iterator[Extent]:
    """Where a tensor's bytes lie; of one laid of boxes, each box as a whole and not row by row."""
    if isinstance(source, Mosaic):
        for part in source.constituents():
            yield from _runs(part)
    elif source is not None:
        yield from source.extents(0, source.nbytes)


class _Cut:
    """The pieces of one strip, gathered in any order.

    What follows its neighbour, is of the same kind, and narrow, joins it at once, so that a strip
    of a hundred thousand tensors takes little memory.
    """

    def __init__(self, offset: int | None, nbytes: int) -> None:
        self.offset = offset
        self._begin = offset or 0
        self._end = self._begin + nbytes
        self._narrow = nbytes // _PIECES
        self._pieces: list[tuple[int, Piece]] = []
        self._last = Piece(Fill.PADDING, -1, -1, 0)
        self._at = self._begin

    def add(self, extent: Extent, fill: Fill, number: int) -> None:
        """Some bytes that are a tensor's; where no offset counts, they follow those before."""
        last = self._last
        begin = self._at if self.offset is None else extent.offset
        joined = None
        if begin == self._at:
            joined = _joined(last, fill, number, extent.nbytes, self._narrow)
        if joined is not None:
            self._pieces[-1] = (self._pieces[-1][0], joined)
            self._last = joined
        else:
            self._last = Piece(fill, number, number, extent.nbytes)
            self._pieces.append((begin, self._last))
        self._at = begin + extent.nbytes

    def pieces(self) -> tuple[Piece, ...]:
        """All of them in order, with the padding between them."""
        found, at = [], self._begin
        for begin, piece in sorted(self._pieces, key=lambda one: one[0]):
            if begin > at:
                found.append(Piece(Fill.PADDING, -1, -1, begin - at))
            found.append(piece)
            at = begin + piece.nbytes
        if self._end > at:
            found.append(Piece(Fill.PADDING, -1, -1, self._end - at))
        return tuple(found)


def _joined(one: Piece, fill: Fill, first: int, nbytes: int, narrow: int) -> Piece | None:
    """A piece and its neighbour as one, if they are one tensor's, or narrow and of one kind."""
    if one.fill is not fill or one.last < 0:
        return None
    if one.last != first:
        small, large = (nbytes, one.nbytes) if nbytes < one.nbytes else (one.nbytes, nbytes)
        if one.last + 1 != first or small >= narrow or large >= 4 * narrow:
            return None
    return Piece(fill, one.first, first, one.nbytes + nbytes)


def _within_bounds(found: Sequence[Strip]) -> tuple[Strip, ...]:
    """The strips, their narrowest pieces joined until there are few enough different ones."""
    share = _PIECES
    while _count(found) > _PIECES_TOGETHER and share > _PIECES_MIN:
        share //= 2
        found = [
            Strip(strip.file, strip.offset, _coarser(strip.pieces, strip.nbytes // share))
            for strip in found
        ]
    return tuple(found)


def _count(found: Iterable[Strip]) -> int:
    """Pieces of the strips that are not alike."""
    return sum(map(len, {strip.pieces for strip in found}))


def _coarser(pieces: Iterable[Piece], narrow: int) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for piece in pieces:
        joined = None
        if found and found[-1].last + 1 >= piece.first >= 0:
            joined = _joined(found[-1], piece.fill, piece.first, piece.nbytes, narrow)
        found[-1:] = [replace(joined, last=piece.last)] if joined else [*found[-1:], piece]
    return tuple(found)
