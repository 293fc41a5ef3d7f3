"""Which ranks share an expert: what their partitions hold decides, then the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zexport.checkpoint.layouts import zero12
from zexport.checkpoint.layouts.expert_states import read_blocks_option
from zexport.checkpoint.layouts.placement import Placement, same_where_shared
from zexport.checkpoint.states import Fragments, ModelStates, OptimizerStates
from zexport.errors import LayoutError, UnsupportedError
from zexport.ranges.dtypes import Shape


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """One flat group of experts, under ZeRO-1/2 shared by the ranks that hold the same experts.

    Attributes:
        index: number of the flat group.
        shapes: of its parameters, by name, in their order.
        paddings: elements of padding after each parameter; empty where there is none.
        ep_size: number of expert-parallel ranks.
    """

    index: int
    shapes: Mapping[str, Shape]
    paddings: tuple[int, ...]
    ep_size: int

    @property
    def parameters(self) -> list[zero12.FlatParameter]:
        """Its parameters, each at its place."""
        return list(zero12.place_parameters(self.shapes, self.paddings))


def find_placement(
    model: ModelStates,
    optimizers: Sequence[OptimizerStates],
    groups: Sequence[ExpertGroup],
    notes: list[str],
) -> Placement:
    """How the ranks share experts: what the partitions hold decides, then the configuration.

    Args:
        model: the model states that the configuration is in.
        optimizers: the states of every rank, in order.
        groups: the flat groups of experts.
        notes: what the user should know of how it was decided is added here.

    Raises:
        LayoutError: what the ranks record of their partitions fits no placement.
        UnsupportedError: nothing says which ranks share an expert.
    """
    recorded = [states.slices for states in optimizers]
    fitting = [
        placement
        for placement in Placement
        if all(_fits(placement, model, optimizers, recorded, group) for group in groups)
    ]
    if not fitting:
        raise LayoutError(
            "the partitions of the experts are not those that the ranks should hold",
            "param_slice_mappings of other ranks or other parameters",
            "those of param_shapes",
        )
    asked = {True: Placement.BLOCKS, False: Placement.INTERLEAVED, None: None}[
        read_blocks_option(model)
    ]
    if all(group.ep_size in (1, len(optimizers)) for group in groups):
        return fitting[0]  # each rank is a set of its own, or all are one: both come to the same
    if len(fitting) == 1:
        if asked not in (None, fitting[0]):
            notes.append(
                "the ranks share experts in another order than ds_config says; the order that the "
                "optimizer files record was taken"
            )
        return fitting[0]
    if asked is None:
        raise UnsupportedError(
            "does not say which ranks share an expert",
            path=model.file.path,
            found="neither param_slice_mappings nor a ds_config",
            expected="one of them",
            hint="Resume the run and save again",
        )
    return asked


def _fits(
    placement: Placement,
    model: ModelStates,
    optimizers: Sequence[OptimizerStates],
    recorded: Sequence[tuple[Fragments, ...]],
    group: ExpertGroup,
) -> bool:
    """Whether what the ranks record of their partitions agrees with ``placement``; so does nothing.

    Under round_robin_gradients the record is of another order than the data's (DeepSpeed 0.10 to
    0.19, ``runtime/zero/stage_1_and_2.py``), but ranks of one partition still record the same.
    """
    if any(group.index >= len(one) for one in recorded) or not any(
        one[group.index] for one in recorded
    ):
        return True
    found = [one[group.index] for one in recorded]
    if model.is_round_robin:
        contents = [tuple(sorted(one.items())) for one in found]
        return same_where_shared(placement, group.ep_size, contents)
    full = optimizers[0].flat_groups[group.index].numel
    sets = [placement.ranks(e, group.ep_size, len(found)) for e in range(group.ep_size)]
    return all(
        found[rank] == expected
        for partition, sharing in enumerate(zip(*sets, strict=True))
        for expected in (zero12.fragments(group.parameters, full, partition),)
        for rank in sharing
    )
