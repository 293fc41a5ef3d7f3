"""The flat groups of experts, which only some ranks share: which these are, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial

from msgspec import Struct

from zexport.checkpoint.layouts import zero12
from zexport.checkpoint.layouts.bind import MASTERS, Bound, FlatRun, bind
from zexport.checkpoint.layouts.expert_layers import read_autoep_layers
from zexport.checkpoint.layouts.zero import flat_run
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.optimizer_states import OptimizerStates
from zexport.checkpoint.ranks import RankStates
from zexport.errors import DamagedCheckpointError, LayoutError, UnsupportedError


class Placement(Enum):
    """How the ranks are cut into sets with the same experts.

    ``BLOCKS`` is ``use_data_before_expert_parallelism``; without it neighbours differ.
    """

    INTERLEAVED = "interleaved"
    BLOCKS = "blocks"

    def sets(self, ep_size: int, world_size: int) -> list[range]:
        """For each expert-parallel rank, those with its experts, in their partitions' order."""
        if self is Placement.INTERLEAVED:
            return [range(ep_rank, world_size, ep_size) for ep_rank in range(ep_size)]
        count = world_size // ep_size
        return [range(ep_rank * count, (ep_rank + 1) * count) for ep_rank in range(ep_size)]


def sharing_sets(sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The distinct sets of ranks that share a flat group, by their first rank.

    That is the order of their experts: in both placements of DeepSpeed the expert-parallel rank
    grows with the first rank of its set.
    """
    distinct = sorted(set(sets))
    if sorted(rank for ranks in distinct for rank in ranks) != list(range(len(sets))) or any(
        rank not in ranks for rank, ranks in enumerate(sets)
    ):
        raise LayoutError(
            "the ranks do not agree on who shares a flat group",
            [list(ranks) for ranks in distinct],
            f"sets that hold each of the ranks 0 to {len(sets) - 1} once",
        )
    return distinct


class ExpertGroup(Struct, frozen=True):
    """A flat group that the ranks share which hold the same experts, one of ``ep_size`` sets."""

    run: FlatRun
    ep_size: int

    @property
    def index(self) -> int:
        """Number of the flat group."""
        return self.run.groups[0]


class BoundExperts(Struct, frozen=True):
    """For each flat group, what every expert-parallel rank has of it; and how that was decided."""

    groups: tuple[tuple[Bound, ...], ...] = ()
    warnings: tuple[str, ...] = ()


def bind_experts(
    ranks: RankStates,
    model: ModelStates,
    indices: Sequence[int],
    world_size: int,
    state: str = MASTERS,
) -> BoundExperts:
    """The tensors of the flat groups ``indices``, which hold experts and nothing else."""
    optimizers = [ranks.optimizer[rank] for rank in sorted(ranks.optimizer) if rank < world_size]
    if not optimizers or not indices:
        return BoundExperts()
    _check_counts(ranks, model, optimizers)
    groups = [_group(ranks, model, optimizers, index, world_size) for index in indices]
    bind_own = partial(bind, is_zero3=ranks.is_zero3, state=state)
    if len(optimizers) < world_size:
        some = (optimizers[0], None)
        return BoundExperts(tuple((bind_own(one.run, some),) * one.ep_size for one in groups))
    sets, warnings = _sharing(ranks, model, optimizers, groups)
    bound = (
        tuple(bind_own(group.run, [optimizers[rank] for rank in sharing]) for sharing in of_group)
        for group, of_group in zip(groups, sets, strict=True)
    )
    return BoundExperts(tuple(bound), warnings)


def sharing_of_experts(
    ranks: RankStates, model: ModelStates, indices: Sequence[int], world_size: int
) -> list[Sequence[Sequence[int]]]:
    """Of each of the flat groups ``indices``, which hold experts, the sets of ranks that share it.

    A set has the experts of one expert-parallel rank, and is in the order of its partitions.
    """
    optimizers = [ranks.optimizer[rank] for rank in range(world_size)]
    groups = [_group(ranks, model, optimizers, index, world_size) for index in indices]
    return _sharing(ranks, model, optimizers, groups)[0]


def _sharing(
    ranks: RankStates,
    model: ModelStates,
    optimizers: Sequence[OptimizerStates],
    groups: Sequence[ExpertGroup],
) -> tuple[list[Sequence[Sequence[int]]], tuple[str, ...]]:
    """The sets of ranks that share each group, and what is to be told of how they were found."""
    if ranks.is_zero3:
        return _named_sets(ranks, optimizers, groups), ()
    placement, warnings = find_placement(model, optimizers, groups)
    return [placement.sets(one.ep_size, len(optimizers)) for one in groups], warnings


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


def _group(
    ranks: RankStates,
    model: ModelStates,
    optimizers: Sequence[OptimizerStates],
    index: int,
    world_size: int,
) -> ExpertGroup:
    counts = optimizers[0].partition_counts
    if ranks.is_zero3:
        counts = tuple(len(group.ranks) for group in optimizers[0].shared_groups)
    if index >= len(counts):
        raise LayoutError(
            "ds_zero_partition_groups does not name every flat group",
            len(counts),
            f"{len(model.param_shapes)}, one for each dictionary of param_shapes",
        )
    if counts[index] < 1 or world_size % counts[index]:
        raise LayoutError(
            "the partitions of the experts do not divide the ranks",
            f"{counts[index]} partitions",
            f"a divisor of {world_size} ranks",
        )
    run = flat_run(index, model.param_shapes[index], optimizers)
    return ExpertGroup(run, world_size // counts[index])


def _named_sets(
    ranks: RankStates, optimizers: Sequence[OptimizerStates], groups: Sequence[ExpertGroup]
) -> list[Sequence[Sequence[int]]]:
    """ZeRO-3: the sets of ranks that share each group, as the optimizer files name them."""
    for rank, states in enumerate(optimizers):
        check_own_partition(rank, states)
    sharing = [[group.ranks for group in states.shared_groups] for states in optimizers]
    found: list[Sequence[Sequence[int]]] = []
    for group in groups:
        sets = sharing_sets([one[group.index] if group.index < len(one) else () for one in sharing])
        _check_order(ranks, sets)
        found.append(sets)
    return found


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
    if len({len(one) for one in sets}) > 1:
        raise LayoutError("the experts are not shared by equally many ranks", sets, "equal sets")


def find_placement(
    model: ModelStates, optimizers: Sequence[OptimizerStates], groups: Sequence[ExpertGroup]
) -> tuple[Placement, tuple[str, ...]]:
    """How the ranks share experts: what the partitions hold decides, then the configuration."""
    fitting = [
        placement
        for placement in Placement
        if all(_fits(placement, model, optimizers, group) for group in groups)
    ]
    if not fitting:
        raise LayoutError(
            "the partitions of the experts are not those that the ranks should hold",
            "param_slice_mappings of other ranks or other parameters",
            "those of param_shapes",
        )
    asked = _asked_for(model)
    if all(group.ep_size in (1, len(optimizers)) for group in groups):
        return fitting[0], ()  # each rank is a set of its own, or all are one: it is all the same
    if len(fitting) == 1:
        note = (
            "the ranks share experts in another order than ds_config says; the order that the "
            "optimizer files record was taken"
        )
        return fitting[0], () if asked in (None, fitting[0]) else (note,)
    if asked is None:
        raise UnsupportedError(
            "does not say which ranks share an expert",
            path=model.file.path,
            found="neither param_slice_mappings nor a ds_config",
            expected="one of them",
            hint="Resume the run and save again",
        )
    return asked, ()


def _fits(
    placement: Placement,
    model: ModelStates,
    optimizers: Sequence[OptimizerStates],
    group: ExpertGroup,
) -> bool:
    """Whether what the ranks record of their partitions agrees with ``placement``; so does nothing.

    Under round_robin_gradients the record is of another order than the data's (DeepSpeed 0.10 to
    0.19, ``runtime/zero/stage_1_and_2.py``), but ranks of one partition still record the same.
    """
    found = [
        states.slices[group.index] for states in optimizers if group.index < len(states.slices)
    ]
    if len(found) < len(optimizers) or not any(found):
        return True
    full = optimizers[0].flat_groups[group.index].numel
    sets = placement.sets(group.ep_size, len(found))
    for partition, sharing in enumerate(zip(*sets, strict=True)):
        expected = found[sharing[0]]
        if not model.is_round_robin:
            expected = zero12.fragments(group.run.places(), full, partition)
        if any(found[rank] != expected for rank in sharing):
            return False
    return True


def _asked_for(model: ModelStates) -> Placement | None:
    """The placement by ``use_data_before_expert_parallelism``; ``None`` where nothing says it.

    Source: DeepSpeed 0.19, ``runtime/constants.py``: off where the configuration does not name it.
    """
    option = model.ds_config.get("use_data_before_expert_parallelism", False)
    if not model.ds_config or not isinstance(option, bool):
        return None
    return Placement.BLOCKS if option else Placement.INTERLEAVED


def check_own_partition(rank: int, optimizer: OptimizerStates) -> None:
    """Refuse ZeRO-3 states under AutoEP that another rank wrote than their file is named for.

    Every flat group names the ranks that share it and which of these wrote the file: the same rank
    of the same process group (DeepSpeed 0.19, ``runtime/zero/stage3.py``).
    """
    for group in optimizer.shared_groups:
        part = group.part
        if part is None or group.ranks[part : part + 1] == (rank,):
            continue
        raise DamagedCheckpointError(
            "holds the states of another rank than its name says",
            path=optimizer.file.path,
            found=f"part {part} of those that ranks {list(group.ranks)} share",
            expected=f"rank {rank}'s part",
            hint="Give the rank files their own names back, or copy them again",
        )
