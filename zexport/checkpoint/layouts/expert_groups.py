"""The experts of every expert-parallel rank, out of the flat groups that only some ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zexport.checkpoint.contents import FlatData
from zexport.checkpoint.layouts import zero3, zero12
from zexport.checkpoint.layouts.expert_placement import ExpertGroup, find_placement
from zexport.checkpoint.layouts.expert_states import (
    check_own_partition,
    read_autoep_layers,
)
from zexport.checkpoint.layouts.placement import Placement, ep_size_of, sharing_sets
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.states import ModelStates, OptimizerStates
from zexport.errors import LayoutError
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import ByteSource, Chain, Striped, Window


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter of experts, as each expert-parallel rank holds one for its own experts.

    Attributes:
        name, shape: as the first expert-parallel rank names and shapes its own.
        dtype: the element type of the masters.
        sources: by expert-parallel rank; ``None`` where rank files are missing.
    """

    name: str
    shape: Shape
    dtype: DType
    sources: tuple[ByteSource | None, ...]


def local_parameters(
    ranks: RankStates,
    model: ModelStates,
    indices: Sequence[int],
    notes: list[str],
    flats: list[FlatData],
) -> list[LocalParameter]:
    """The parameters of the flat groups ``indices``, which hold experts and nothing else.

    Args:
        ranks: the states of one model-parallel index, its world size known.
        model: the model states that names and shapes come from.
        indices: numbers of the flat groups.
        notes: what the user should know of how it was decided is added here.
        flats: the flat data of the groups is added here.

    Raises:
        LayoutError: lengths, names or ranks contradict each other.
        UnsupportedError: nothing says which ranks share an expert.
    """
    world_size = ranks.world_size or 0
    optimizers = [ranks.optimizer[rank] for rank in sorted(ranks.optimizer) if rank < world_size]
    if not optimizers or not indices:
        return []
    _check_counts(ranks, model, optimizers)
    dtype = _dtype(optimizers)
    groups = [_group(ranks, model, optimizers[0], index) for index in indices]
    if len(optimizers) < world_size:
        return [
            LocalParameter(name, shape, dtype, (None,) * group.ep_size)
            for group in groups
            for name, shape in group.shapes.items()
        ]
    if ranks.is_zero3:
        return list(_striped(ranks, model, indices, dtype, flats))
    placement = find_placement(model, optimizers, groups, notes)
    return [one for group in groups for one in _chained(optimizers, group, placement, dtype, flats)]


def _check_counts(ranks: RankStates, model: ModelStates, all_: list[OptimizerStates]) -> None:
    """Every rank has a flat group for each dictionary of ``param_shapes``."""
    expected = len(model.param_shapes)
    for states in all_:
        counts = (
            len(states.flat_groups),
            expected if ranks.is_zero3 else len(states.partition_counts),
        )
        if counts != (expected, expected):
            raise LayoutError(
                "the parameter groups of the model file are not those of the optimizer files",
                f"{counts[0]} flat groups and {counts[1]} partition counts in "
                f"{states.file.path.name}",
                f"{expected}, one for each dictionary of param_shapes",
            )


def _dtype(optimizers: list[OptimizerStates]) -> DType:
    """The one floating element type of all flat groups, dense ones and those of experts."""
    found = {group.dtype for states in optimizers for group in states.flat_groups}
    if len(found) != 1 or not all(dtype.is_floating for dtype in found):
        raise LayoutError(
            "the flat groups are not of one floating-point type",
            ", ".join(sorted(dtype.torch_name for dtype in found)),
            "float32 throughout",
        )
    return found.pop()


def _group(
    ranks: RankStates, model: ModelStates, first: OptimizerStates, index: int
) -> ExpertGroup:
    paddings, counts = first.alignment_paddings, first.partition_counts
    if ranks.is_zero3:
        counts = tuple(len(group.ranks) for group in first.shared_groups)
    if index >= len(counts):
        raise LayoutError(
            "ds_zero_partition_groups does not name every flat group",
            len(counts),
            f"{len(model.param_shapes)}, one for each dictionary of param_shapes",
        )
    return ExpertGroup(
        index=index,
        shapes=model.param_shapes[index],
        paddings=paddings[index] if index < len(paddings) else (),
        ep_size=ep_size_of(counts[index], ranks.world_size or 0),
    )


def _chained(
    optimizers: list[OptimizerStates],
    group: ExpertGroup,
    placement: Placement,
    dtype: DType,
    flats: list[FlatData],
) -> Iterator[LocalParameter]:
    """ZeRO-1/2: a window of the partitions of each set of ranks, laid end to end."""
    chains = []
    for ep_rank in range(group.ep_size):
        sharing = placement.ranks(ep_rank, group.ep_size, len(optimizers))
        parts = [(optimizers[rank], optimizers[rank].flat_groups[group.index]) for rank in sharing]
        zero12.check_partitions(
            group.shapes, [part.numel for _, part in parts], paddings=group.paddings
        )
        chain = Chain(tuple(states.file.source(part) for states, part in parts))
        padding = zero12.padding_numel(group.parameters, chain.nbytes // dtype.itemsize)
        flats.append(FlatData(chain, dtype, padding))
        chains.append(chain)
    for parameter in group.parameters:
        begin, nbytes = parameter.offset * dtype.itemsize, parameter.numel * dtype.itemsize
        sources = tuple(Window(chain, begin, nbytes) for chain in chains)
        yield LocalParameter(parameter.name, parameter.shape, dtype, sources)


def _striped(
    ranks: RankStates,
    model: ModelStates,
    indices: Sequence[int],
    dtype: DType,
    flats: list[FlatData],
) -> Iterator[LocalParameter]:
    """ZeRO-3: the stripes of each set of ranks, which the optimizer files name themselves."""
    world_size = ranks.world_size or 0
    optimizers = [ranks.optimizer[rank] for rank in range(world_size)]
    for rank, states in enumerate(optimizers):
        check_own_partition(rank, states)
    sharing = [[group.ranks for group in states.shared_groups] for states in optimizers]
    for index in indices:
        sets = sharing_sets([one[index] if index < len(one) else () for one in sharing])
        _check_order(ranks, sets)
        shapes = model.param_shapes[index]
        stripes = _flats_of(optimizers, shapes, index, sets)
        parameters = list(zero3.stripe_parameters([shapes], len(sets[0])))
        padding = zero3.padding_numel(parameters, len(sets[0]))
        flats += (FlatData(Chain(one), dtype, padding) for one in stripes)
        yield from _stripes_of(parameters, stripes, dtype)


def _flats_of(
    optimizers: list[OptimizerStates],
    shapes: Mapping[str, Shape],
    index: int,
    sets: list[tuple[int, ...]],
) -> list[tuple[ByteSource, ...]]:
    """Flat group ``index`` of every rank of each set."""
    if len({len(one) for one in sets}) > 1:
        raise LayoutError("the experts are not shared by equally many ranks", sets, "equal sets")
    flats = []
    for one in sets:
        groups = [optimizers[rank].flat_groups[index] for rank in one]
        zero3.check_flat_numels([shapes], [group.numel for group in groups])
        flats.append(
            tuple(
                optimizers[rank].file.source(group) for rank, group in zip(one, groups, strict=True)
            )
        )
    return flats


def _stripes_of(
    parameters: Iterable[zero3.StripedParameter],
    flats: Sequence[tuple[ByteSource, ...]],
    dtype: DType,
) -> Iterator[LocalParameter]:
    """The parameters of one flat group, out of the flat data of each set of ranks."""
    for parameter in parameters:
        sources = tuple(
            Striped(
                flat,
                offset=parameter.offset * dtype.itemsize,
                stripe_nbytes=parameter.stripe_numel * dtype.itemsize,
                nbytes=parameter.numel * dtype.itemsize,
            )
            for flat in flats
        )
        yield LocalParameter(parameter.name, parameter.shape, dtype, sources)


def _check_order(ranks: RankStates, sets: list[tuple[int, ...]]) -> None:
    """The expert-parallel ranks that the model files name are those of the sets, in their order."""
    for ep_rank, sharing in enumerate(sets):
        for rank in sharing:
            if rank not in ranks.model:
                continue
            named = {layer.ep_rank for layer in read_autoep_layers(ranks.model[rank])} - {None}
            if not named <= {ep_rank}:
                raise LayoutError(
                    f"rank {rank} holds the experts of another expert-parallel rank than it says",
                    sorted(str(one) for one in named),
                    ep_rank,
                )
