"""A target's flat groups: which parameters lie in each, in which order, and their states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from msgspec import Struct

from zexport.checkpoint.contents import source_of
from zexport.checkpoint.layouts import zero3, zero12
from zexport.checkpoint.layouts.bind import MASTERS
from zexport.checkpoint.model_states import ZERO3
from zexport.errors import UnsupportedError
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, Chain
from zexport.ranges.stripes import Stripes
from zexport.resume.settings import TargetSettings
from zexport.resume.state import CellState, Group, Parameter


class Place(Struct, frozen=True):
    """A rank of the target: its number, and the ranks with the same experts, in their order."""

    rank: int
    sharing: Sequence[int]
    world_size: int

    def of(self, group: Group) -> tuple[int, int]:
        """Which partition of a group's flat data it has, and of how many."""
        if group.of_experts:
            return self.sharing.index(self.rank), len(self.sharing)
        return self.rank, self.world_size


class Cut(Struct, frozen=True):
    """The parameters of one flat group of the target, in its order, and every state of theirs.

    ``whole`` are the sources by state: all parameters end to end (ZeRO-1/2), or cut into stripes.
    """

    parameters: tuple[Parameter, ...]
    whole: Mapping[str, Stripes | Chain]
    dtypes: Mapping[str, DType]

    @property
    def numel(self) -> int:
        """Elements of the parameters."""
        return sum(prod(one.shape) for one in self.parameters)


class GroupCuts(Struct, frozen=True):
    """A parameter group and its flat groups: sub-groups under ZeRO-3, else one."""

    group: Group
    cuts: tuple[Cut, ...]


def cuts_of(cell: CellState, settings: TargetSettings) -> tuple[GroupCuts, ...]:
    """The flat groups of every parameter group."""
    lay = _sub_groups if settings.stage == ZERO3 else _whole
    sets = cell.expert_ranks
    return tuple(
        GroupCuts(
            group,
            tuple(lay(group, settings, settings.world_size // (sets if group.of_experts else 1))),
        )
        for group in cell.groups
    )


def _sub_groups(group: Group, settings: TargetSettings, ranks: int) -> Iterator[Cut]:
    numels = [prod(one.shape) for one in group.parameters]
    for own in zero3.sub_groups(numels, ranks, settings.sub_group_size):
        if own:
            yield _striped(group.parameters[own.start : own.stop], ranks)


def _whole(group: Group, settings: TargetSettings, ranks: int) -> Iterator[Cut]:
    yield _end_to_end(group, settings, ranks)


def _striped(parameters: Sequence[Parameter], world_size: int) -> Cut:
    whole = {}
    for state in _states(parameters):
        tensors = [one.tensors[state] for one in parameters]
        nbytes = (zero3.stripe_numel(t.numel, world_size) * t.dtype.itemsize for t in tensors)
        whole[state] = Stripes(tuple(map(source_of, tensors)), tuple(nbytes))
    return Cut(tuple(parameters), whole, _dtypes(parameters))


def _end_to_end(group: Group, settings: TargetSettings, world_size: int) -> Cut:
    parameters = group.parameters
    if settings.is_dealt_out:
        order = zero12.dealt_out(len(parameters), world_size)
        parameters = tuple(parameters[index] for index in order)
    numel = sum(prod(one.shape) for one in parameters)
    padding = zero12.partition_numel(numel, world_size) * world_size - numel
    whole: dict[str, Stripes | Chain] = {}
    dtypes = _dtypes(parameters)
    for state in _states(parameters):
        sources: list[ByteSource] = [source_of(one.tensors[state]) for one in parameters]
        whole[state] = Chain((*sources, Zeros(padding * dtypes[state].itemsize)))
    return Cut(parameters, whole, dtypes)


def _states(parameters: Sequence[Parameter]) -> list[str]:
    """The states that all parameters of a flat group have; they are the same ones."""
    names = list(parameters[0].tensors) if parameters else [MASTERS]
    for one in parameters:
        if one.tensors.keys() != set(names):
            raise UnsupportedError(
                f"the optimizer keeps other states of {one.name!r} than of the rest of its group",
                found=", ".join(one.tensors),
                expected=", ".join(names),
                hint="Reshard to the stage and settings that the checkpoint was saved with",
            )
    return names


def _dtypes(parameters: Sequence[Parameter]) -> dict[str, DType]:
    """The element type of every state, which must be one throughout a flat group."""
    found = dict.fromkeys(_states(parameters), DType.F32)
    for one in parameters:
        for state, tensor in one.tensors.items():
            if one is parameters[0]:
                found[state] = tensor.dtype
            elif found[state] is not tensor.dtype:
                raise UnsupportedError(
                    f"the state {state!r} is of several element types within one group",
                    found=f"{tensor.dtype.torch_name} of {one.name!r}",
                    expected=found[state].torch_name,
                    hint="Reshard to the stage and settings that the checkpoint was saved with",
                )
    return found
