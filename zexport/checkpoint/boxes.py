"""Tensors made of boxes (n-dimensional ranges) of other tensors: one join, and its inverse.

TP slices, experts, DTensors and DCP chunks are all boxes of a part that are boxes of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from msgspec import Struct

from zexport.checkpoint.state import MASTER, MODULE, Cell, Copy, Parameter, Role, bound
from zexport.errors import IncompleteCheckpointError, LayoutError
from zexport.formats.pickle_values import TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.compare import CastReplica, Replica
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import ByteSource, Chain, Mosaic, Tile, Window, check_cover, row_major


class InFile(Struct, frozen=True):
    """A slot that a file stores whole."""

    file: TorchFile
    ref: TensorRef

    @property
    def dtype(self) -> DType:
        return self.ref.dtype

    def bind(self) -> ByteSource:
        return self.file.source(self.ref)


def in_file(
    file: TorchFile, name: str, ref: TensorRef, role: Role, slot: str = MODULE
) -> Parameter:
    """Return a parameter with one slot, which a file stores whole."""
    return Parameter(name, ref.shape, role, {slot: InFile(file, ref)})


class Bound(Struct, frozen=True):
    """A slot that is bound already, or ``None`` if rank files with parts of it are missing."""

    dtype: DType
    source: ByteSource | None

    def bind(self) -> ByteSource:
        if self.source is None:
            raise IncompleteCheckpointError(
                "rank files with partitions of a weight are missing",
                hint="Copy them from the nodes that wrote them",
            )
        return self.source


class Piece(Struct, frozen=True):
    """A box: the part that has it, its first index in the whole (``start``) and in the part."""

    part: Parameter
    start: Shape
    origin: Shape
    shape: Shape


class Boxes(Struct, frozen=True):
    """A slot of a tensor that is covered exactly by boxes."""

    shape: Shape
    pieces: tuple[Piece, ...]
    slot: str
    dtype: DType

    def bind(self) -> ByteSource:
        size, tiles, are_rows = self.dtype.itemsize, list[Tile](), True
        for piece in sorted(self.pieces, key=lambda piece: piece.start):
            source, stride = piece.part.source(self.slot), row_major(piece.part.shape)
            offset = sum(i * step for i, step in zip(piece.origin, stride, strict=True))
            tiles.append(Tile(piece.start, piece.shape, source, offset, stride))
            are_rows &= piece.shape[1:] == self.shape[1:] == piece.part.shape[1:]
        if not are_rows and prod(self.shape) > 0:
            return Mosaic(self.shape, size, tuple(tiles))
        nbytes = [prod(tile.shape) * size for tile in tiles]
        return chained(
            [
                one.source
                if own == one.source.nbytes
                else Window(one.source, one.offset * size, own)
                for one, own in zip(tiles, nbytes, strict=True)
            ]
        )


def chained(sources: Sequence[ByteSource]) -> ByteSource:
    return sources[0] if len(sources) == 1 else Chain(tuple(sources))


def join_boxes(
    name: str, shape: Shape, role: Role, pieces: Sequence[Piece]
) -> tuple[Parameter, list[Copy]]:
    """Return the tensor that boxes cover; boxes stored several times become copies.

    Raises:
        LayoutError: the boxes leave gaps, overlap, or have different dtypes.
    """
    kept: dict[tuple[Shape, Shape], Piece] = {}
    copies: list[Copy] = []
    for piece in pieces:
        is_empty = prod(piece.shape) == 0
        if is_empty and prod(shape) > 0:
            continue
        first = kept.setdefault((piece.start, piece.shape), piece)
        if first is not piece and not is_empty:
            copies.append(Copy(_cut(first), _cut(piece)))
    check_cover(repr(name), shape, kept)
    if not kept:
        raise LayoutError(f"no file has a part of {name!r}", 0, "at least 1")
    boxes = tuple(kept.values())
    if len(boxes) == 1 and boxes[0].part.shape == shape:
        return Parameter(name, shape, role, boxes[0].part.stored), copies
    slots, *others = (piece.part.slots for piece in boxes)
    stored = {}
    for slot, dtype in slots.items():
        if not all(slot in one for one in others):
            continue
        if other := next((one[slot] for one in others if one[slot] is not dtype), None):
            found, expected = f"{other.torch_name} ({slot})", dtype.torch_name
            raise LayoutError(f"parts of {name!r} have different dtypes", found, expected)
        stored[slot] = Boxes(shape, boxes, slot, dtype)
    return Parameter(name, shape, role, stored), copies


def cut_boxes(whole: Parameter, shape: Shape, pieces: Iterable[Piece]) -> Parameter:
    """Return one part of a tensor: the inverse of ``join_boxes`` for that part's boxes.

    Args:
        whole: the tensor.
        shape: the part's shape.
        pieces: the part's boxes; their ``part`` is ignored.
    """
    own = tuple(
        Piece(whole, piece.origin, piece.start, piece.shape)
        for piece in pieces
        if prod(piece.shape)
    )
    check_cover(f"a part of {whole.name!r}", shape, [(one.start, one.shape) for one in own])
    if len(own) == 1 and shape == whole.shape:
        return whole
    stored = {slot: Boxes(shape, own, slot, dtype) for slot, dtype in whole.slots.items()}
    return Parameter(whole.name, shape, whole.role, stored)


def _cut(piece: Piece) -> Parameter:
    zero = (0,) * len(piece.shape)
    return cut_boxes(piece.part, piece.shape, [Piece(piece.part, piece.origin, zero, piece.shape)])


def replicas_of(cell: Cell) -> Iterator[Replica | CastReplica]:
    """Yield the replicas of weights: equal values, and module weights of master weights."""
    for one in cell.parameters.values():
        yield from _casts(one, one, cell.matched)
    for copy in cell.copies:
        slot = copy.kept.value_slot
        kept, other = bound(copy.kept, slot), bound(copy.other, slot)
        if kept is not None and other is not None and kept.nbytes:
            yield Replica(copy.kept.name, kept, other)
        trained = copy.other if copy.other.has(MASTER) else copy.kept
        yield from _casts(trained, copy.other, cell.matched)


def _casts(trained: Parameter, one: Parameter, matched: frozenset[str]) -> Iterator[CastReplica]:
    """Yield the module weights of ``one`` that are rounded master weights of ``trained``."""
    master, module = trained.stored.get(MASTER), one.stored.get(MODULE)
    if master is None or trained.role is not Role.TRAINABLE:
        return
    pieces = module.pieces if isinstance(module, Boxes) else None
    if isinstance(master, Boxes) and (module is None or pieces is master.pieces):
        for part in {id(piece.part): piece.part for piece in master.pieces}.values():
            yield from _casts(part, part, matched)
        return
    if isinstance(module, Boxes):
        for piece in module.pieces:
            box = _cut(Piece(trained, piece.start, piece.start, piece.shape))
            yield from _casts(box, piece.part, matched)
        return
    if module is None or module is master:
        return
    kept, other = bound(trained, MASTER), bound(one, MODULE)
    own, dtype = master.dtype, module.dtype
    is_rounded = dtype is own or (dtype.is_floating and dtype.itemsize != own.itemsize)
    if kept is not None and other is not None and other.nbytes and is_rounded:
        is_matched = one.name in matched
        yield CastReplica(
            name=one.name,
            path=next(iter((kept if is_matched else other).extents(0, 1))).path,
            kept=kept,
            kept_dtype=own,
            other=other,
            other_dtype=dtype,
            is_matched_by_value=is_matched,
        )


def state_replicas(cells: Iterable[Cell]) -> Iterator[Replica]:
    """Yield the replicas of optimizer states."""
    for copy in (copy for cell in cells for copy in cell.copies):
        for slot in copy.kept.slots:
            if copy.other.has(slot) and slot not in (MODULE, copy.kept.value_slot):
                pair = copy.kept.source(slot), copy.other.source(slot)
                yield Replica(f"{copy.kept.name} ({slot})", *pair)
