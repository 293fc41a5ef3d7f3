"""Tensors made of boxes (n-dimensional ranges) of other tensors: one join, and its inverse.

TP slices, experts, DTensors and DCP chunks are all boxes of a part that are boxes of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from msgspec import Struct

from zexport.checkpoint.state import MASTER, MODULE, Cell, Copy, Held, Parameter, Role, bound
from zexport.errors import IncompleteCheckpointError, LayoutError
from zexport.formats.pickle_values import TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.compare import CastReplica, Replica
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import ByteSource, Chain, Mosaic, Tile, Window, check_cover, row_major


class InFiles(Struct, frozen=True):
    """Slots that files store whole."""

    places: Mapping[str, tuple[TorchFile, TensorRef]]

    @property
    def slots(self) -> Mapping[str, DType]:
        return {slot: ref.dtype for slot, (_, ref) in self.places.items()}

    def bind(self, slot: str) -> ByteSource:
        file, ref = self.places[slot]
        return file.source(ref)


def in_file(
    file: TorchFile, name: str, ref: TensorRef, role: Role, slot: str = MODULE
) -> Parameter:
    """Return a parameter with one slot, which a file stores whole."""
    return Parameter(name, ref.shape, role, (InFiles({slot: (file, ref)}),))


class As(Struct, frozen=True):
    """The only slot of another ``Held``, under another name and, without elements, dtype."""

    slot: str
    held: Held
    dtype: DType | None = None

    @property
    def slots(self) -> Mapping[str, DType]:
        return {self.slot: self.dtype or next(iter(self.held.slots.values()))}

    def bind(self, slot: str) -> ByteSource:  # noqa: ARG002
        return self.held.bind(next(iter(self.held.slots)))


class Sources(Struct, frozen=True):
    """One slot that is bound already, or ``None`` if rank files with parts of it are missing."""

    slot: str
    dtype: DType
    source: ByteSource | None

    @property
    def slots(self) -> Mapping[str, DType]:
        return {self.slot: self.dtype}

    def bind(self, slot: str) -> ByteSource:
        if self.source is None:
            raise IncompleteCheckpointError(
                f"rank files with partitions of a weight are missing ({slot})",
                hint="Copy them from the nodes that wrote them",
            )
        return self.source


class Piece(Struct, frozen=True):
    """A box: the part that has it, its first index in the whole (``start``) and in the part."""

    part: Parameter
    start: Shape
    origin: Shape
    shape: Shape


def rows(part: Parameter, start: int) -> Piece:
    """Return a part as rows ``start``, ... of the whole."""
    zero = (0,) * len(part.shape)
    return Piece(part, (start, *zero[1:]), zero, part.shape)


class Boxes(Struct, frozen=True):
    """A tensor covered exactly by boxes; it has the slots that all parts have."""

    shape: Shape
    pieces: tuple[Piece, ...]
    slots: Mapping[str, DType]

    def bind(self, slot: str) -> ByteSource:
        size = self.slots[slot].itemsize
        pieces = sorted(self.pieces, key=lambda piece: piece.start)
        tiles = []
        for piece in pieces:
            stride = row_major(piece.part.shape)
            offset = sum(i * step for i, step in zip(piece.origin, stride, strict=True))
            tiles.append(Tile(piece.start, piece.shape, piece.part.source(slot), offset, stride))
        if any(
            piece.shape[1:] != self.shape[1:] or piece.shape[1:] != piece.part.shape[1:]
            for piece in pieces
        ):
            return Mosaic(self.shape, size, tuple(tiles))
        return chained(
            [
                tile.source
                if piece.shape == piece.part.shape
                else Window(tile.source, tile.offset * size, prod(piece.shape) * size)
                for piece, tile in zip(pieces, tiles, strict=True)
            ]
        )


def chained(sources: Sequence[ByteSource]) -> ByteSource:
    """Return several sources end to end."""
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
    only = next(iter(kept.values())) if len(kept) == 1 else None
    if only is not None and only.part.shape == shape:
        return Parameter(name, shape, role, only.part.held), copies
    of_parts = [piece.part.slots for piece in kept.values()]
    slots = {slot: dtype for slot, dtype in of_parts[0].items() if all(slot in o for o in of_parts)}
    for slot, dtype in slots.items():
        if other := next((one[slot] for one in of_parts if one[slot] is not dtype), None):
            found, expected = f"{other.torch_name} ({slot})", dtype.torch_name
            raise LayoutError(f"parts of {name!r} have different dtypes", found, expected)
    return Parameter(name, shape, role, (Boxes(shape, tuple(kept.values()), slots),)), copies


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
    if len(own) == 1 and own[0].shape == shape == whole.shape:
        return whole
    return Parameter(whole.name, shape, whole.role, (Boxes(shape, own, whole.slots),))


def _cut(piece: Piece) -> Parameter:
    """Return one box as a tensor."""
    zero = (0,) * len(piece.shape)
    return cut_boxes(piece.part, piece.shape, [Piece(piece.part, piece.origin, zero, piece.shape)])


def replicas_of(cell: Cell) -> Iterator[Replica | CastReplica]:
    """Yield the second copies of values: equal ones, and module weights of master weights.

    Copies of optimizer states are left out; see ``state_replicas``.
    """
    for one in cell.parameters.values():
        yield from _casts(one, one, cell.matched)
    for copy in cell.copies:
        slot = copy.kept.value_slot
        if copy.other.has(slot):
            kept, other = bound(copy.kept, slot), bound(copy.other, slot)
            if kept is not None and other is not None and kept.nbytes:
                yield Replica(copy.kept.name, kept, other)
        trained = copy.other if copy.other.has(MASTER) else copy.kept
        yield from _casts(trained, copy.other, cell.matched)


def _casts(trained: Parameter, one: Parameter, matched: frozenset[str]) -> Iterator[CastReplica]:
    """Yield the module weights of ``one`` that are rounded master weights of ``trained``."""
    master = next((held for held in trained.held if MASTER in held.slots), None)
    module = next((held for held in one.held if MODULE in held.slots), None)
    if master is None or trained.role is not Role.TRAINABLE:
        return
    if isinstance(master, Boxes) and (module is None or module is master):
        for part in {id(piece.part): piece.part for piece in master.pieces}.values():
            yield from _casts(part, part, matched)
        return
    if isinstance(module, Boxes) and module is not master:
        for piece in module.pieces:
            box = _cut(Piece(trained, piece.start, piece.start, piece.shape))
            yield from _casts(box, piece.part, matched)
        return
    if module is None or module is master:
        return
    kept, other = bound(trained, MASTER), bound(one, MODULE)
    own, dtype = master.slots[MASTER], module.slots[MODULE]
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
            names_it=is_matched,
        )


def state_replicas(cells: Iterable[Cell]) -> Iterator[Replica]:
    """Yield the second copies of optimizer states."""
    for copy in (copy for cell in cells for copy in cell.copies):
        for slot in copy.kept.slots:
            if copy.other.has(slot) and slot not in (MODULE, copy.kept.value_slot):
                pair = copy.kept.source(slot), copy.other.source(slot)
                yield Replica(f"{copy.kept.name} ({slot})", *pair)
