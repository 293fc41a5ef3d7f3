"""From the tensor ranks' shards to whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor
from zexport.checkpoint.layouts.boxes import Joined, Piece, replicated
from zexport.checkpoint.layouts.splits import Splits, join_alike, read_all_splits
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.checkpoint.ranks import Save, check_cells
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsupportedError,
)
from zexport.ranges.dtypes import Shape
from zexport.ranges.extents import ByteSource, Chain, Window
from zexport.ranges.mosaic import Mosaic, Tile, row_major
from zexport.ranges.replicas import Replica


def join_tensor_ranks(save: Save, inventories: Mapping[int, Inventory]) -> Inventory:
    """The whole tensors of a checkpoint whose model-parallel indices are tensor ranks.

    What several ranks hold whole is taken from the lowest and returned as replicas too; tied names
    come last, so that an alias of a split tensor means the joined one.
    """
    models = [*save.models.values()]
    if not models:
        raise DamagedCheckpointError(
            "has no model states that can be read, so that nothing tells how tensors are split",
            path=save.tag_dir,
        )
    grid = models[0].grid
    if grid is not None and grid.stages > 1:
        raise IncompleteCheckpointError(
            "lacks the layer files of its pipeline",
            path=save.tag_dir,
            found=f"{grid.stages} pipeline stages and no layer file",
            expected=f"{rank_file_name(RankFileKind.PIPELINE_LAYER)} and the like",
            hint="Copy them from the nodes that wrote them",
        )
    check_cells(save, grid.tensor if grid else models[0].tensor_parallel, "tensor ranks")
    return join_shards(models, [inventories[rank] for rank in sorted(inventories)])


def join_shards(models: Sequence[ModelStates], inventories: Sequence[Inventory]) -> Inventory:
    """The whole tensors of one stage, from the shards of each of its tensor ranks in order.

    ``models`` are these ranks' model states, each of which records how tensors are split.
    """
    records = read_all_splits(models)
    aliases = _aliases(inventories)
    by_rank = [
        {tensor.name: tensor for tensor in inventory.tensors if tensor.name not in aliases}
        for inventory in inventories
    ]
    _check_same_names(by_rank)
    shards = {name: [tensors[name].shape for tensors in by_rank] for name in by_rank[0]}
    joined = [
        _join_one([tensors[name] for tensors in by_rank], shards, records) for name in by_rank[0]
    ]
    notes = (records[0].note(tensor.name, tensor.shape) for tensor, _ in joined)
    shared = Inventory.joined(inventories)
    own = (replica for _, replicas in joined for replica in replicas)
    return replace(
        shared,
        tensors=tuple(tensor for tensor, _ in joined),
        replicas=(*own, *shared.replicas),
        notes=tuple(dict.fromkeys([*shared.notes, *filter(None, notes)])),
    )


def _join_one(
    ranks: Sequence[StoredTensor],
    shards: Mapping[str, Sequence[Shape]],
    records: Sequence[Splits],
) -> tuple[StoredTensor, list[Replica]]:
    """One tensor from every rank's shard, and the second copies of what it is made of.

    A shard without elements says nothing of role and type: no optimizer holds it, trained or not.
    """
    holders = [tensor for tensor in ranks if tensor.numel] or ranks
    first = holders[0]
    if any((t.role, t.dtype) != (first.role, first.dtype) for t in holders):
        raise LayoutError(
            f"the tensor ranks do not hold {first.name!r} alike",
            ", ".join(f"{t.role.value} {t.dtype.torch_name}" for t in ranks),
            "one role and element type",
        )
    joined = (
        _buffer(records[0], first.name, shards[first.name])
        if first.role is Role.BUFFER
        else join_alike(records, first.name, shards)
    )
    sources = [tensor.source for tensor in ranks if tensor.source is not None]
    if len(sources) < len(ranks):
        return StoredTensor(first.name, joined.shape, first.dtype, first.role, None), []
    laid, copies = lay_shards(joined, sources, shards[first.name], first.dtype.itemsize)
    whole = StoredTensor(first.name, joined.shape, first.dtype, first.role, laid)
    return whole, [Replica(first.name, *pair) for pair in copies]


def lay_shards(
    joined: Joined, sources: Sequence[ByteSource], shards: Sequence[Shape], itemsize: int
) -> tuple[ByteSource, list[tuple[ByteSource, ByteSource]]]:
    """The whole out of every rank's shard, and the pairs of ranges in them that hold the same."""
    cutter = _Cutter(sources, shards, itemsize)
    return cutter.lay(joined), [(cutter.cut(one), cutter.cut(two)) for one, two in joined.copies]


def cut_shard(
    joined: Joined, source: ByteSource, shard: Shape, rank: int, itemsize: int
) -> ByteSource:
    """One rank's shard out of the whole: the other way round."""
    own = (*joined.pieces, *(copy for _, copy in joined.copies))
    stride = row_major(joined.shape)
    tiles = []
    for piece in own:
        if piece.rank == rank and 0 not in piece.shape:
            offset = sum(at * step for at, step in zip(piece.start, stride, strict=True))
            tiles.append(Tile(piece.origin, piece.shape, source, offset, stride))
    return Mosaic(shard, itemsize, tuple(sorted(tiles, key=lambda tile: tile.start)))


def _buffer(splits: Splits, name: str, shards: Sequence[Shape]) -> Joined:
    """Buffers are not split; a model that does so has a rule of its own that nothing records."""
    if any(shard != shards[0] for shard in shards):
        raise UnsupportedError(
            f"holds the buffer {name!r} in different shapes on different tensor ranks",
            path=splits.record.path,
            found=", ".join(str(list(shard)) for shard in shards),
            expected="the same buffer everywhere",
            hint="Register it as not persistent if it can be computed again",
        )
    return replicated(shards)


class _Cutter(Struct, frozen=True):
    """The bytes of pieces: each rank's shard, stored densely, and its shape."""

    sources: Sequence[ByteSource]
    shards: Sequence[Shape]
    itemsize: int

    def lay(self, joined: Joined) -> ByteSource:
        """The whole tensor; end to end where that is all there is to it.

        The mosaic is made in any case, as it refuses gaps and overlaps.
        """
        pieces = sorted(joined.pieces, key=lambda piece: piece.start)
        if len(pieces) == 1 and pieces[0].shape == joined.shape:
            return self.cut(pieces[0])
        tiles = tuple(self._tile(piece, piece.start) for piece in pieces)
        mosaic = Mosaic(joined.shape, self.itemsize, tiles)
        if all(self._is_run(piece, joined.shape) for piece in pieces):
            return Chain(tuple(self._run(piece) for piece in pieces))
        return mosaic

    def cut(self, piece: Piece) -> ByteSource:
        """The bytes of one piece by itself."""
        if self._is_run(piece, piece.shape):
            return self._run(piece)
        return Mosaic(piece.shape, self.itemsize, (self._tile(piece, (0,) * len(piece.shape)),))

    def _tile(self, piece: Piece, start: Shape) -> Tile:
        stride = row_major(self.shards[piece.rank])
        offset = sum(i * step for i, step in zip(piece.origin, stride, strict=True))
        return Tile(start, piece.shape, self.sources[piece.rank], offset, stride)

    def _is_run(self, piece: Piece, whole: Shape) -> bool:
        """Whether the piece is a range of rows both in ``whole`` and in its shard."""
        return piece.shape[1:] == whole[1:] == self.shards[piece.rank][1:]

    def _run(self, piece: Piece) -> ByteSource:
        shard, source = self.shards[piece.rank], self.sources[piece.rank]
        if piece.shape == shard:
            return source
        begin = self._tile(piece, piece.start).offset * self.itemsize
        return Window(source, begin, prod(piece.shape) * self.itemsize)


def _aliases(inventories: Iterable[Inventory]) -> dict[str, str]:
    """Tied names of all ranks; DeepSpeed fills ``shared_params`` on the first rank alone."""
    aliases: dict[str, str] = {}
    for inventory in inventories:
        for alias, name in inventory.aliases.items():
            if aliases.setdefault(alias, name) != name:
                raise LayoutError(
                    f"the tensor ranks tie {alias!r} to different tensors", name, aliases[alias]
                )
    return aliases


def _check_same_names(by_rank: Sequence[Mapping[str, StoredTensor]]) -> None:
    names = set(by_rank[0])
    for rank, tensors in enumerate(by_rank):
        if differing := sorted(names ^ set(tensors)):
            raise LayoutError(
                f"tensor rank {rank} does not hold the tensors that rank 0 holds",
                f"{len(differing)} names that only one has, such as {differing[0]!r}",
                f"the same {len(names)} names",
            )
