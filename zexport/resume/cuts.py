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
from zexport.formats.leaves import TensorLeaf
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, Chain
from zexport.ranges.stripes import Stripes
from zexport.resume.settings import TargetSettings
from zexport.resume.state import CellState, Group, Parameter

_AS_SAVED = "Reshard to the stage and settings that the checkpoint was saved with"


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
    sets = [cell.expert_ranks if group.of_experts else 1 for group in cell.groups]
    return tuple(
        GroupCuts(group, tuple(_cuts(group, settings, settings.world_size // count)))
        for group, count in zip(cell.groups, sets, strict=True)
    )


def _cuts(group: Group, settings: TargetSettings, ranks: int) -> Iterator[Cut]:
    """The sub-groups of a parameter group under ZeRO-3; else all of it in one."""
    if settings.stage != ZERO3:
        yield _end_to_end(group, settings, ranks)
        return
    numels = [prod(one.shape) for one in group.parameters]
    for own in zero3.sub_groups(numels, ranks, settings.sub_group_size):
        if own:
            yield _striped(group.parameters[own.start : own.stop], ranks)


def _striped(parameters: Sequence[Parameter], world_size: int) -> Cut:
    whole, dtypes = {}, _dtypes(parameters)
    for state in dtypes:
        tensors = [one.tensors[state] for one in parameters]
        nbytes = (zero3.stripe_numel(t.numel, world_size) * t.dtype.itemsize for t in tensors)
        whole[state] = Stripes(tuple(map(source_of, tensors)), tuple(nbytes))
    return Cut(tuple(parameters), whole, dtypes)


def _end_to_end(group: Group, settings: TargetSettings, world_size: int) -> Cut:
    parameters = group.parameters
    if settings.is_dealt_out:
        order = zero12.dealt_out(len(parameters), world_size)
        parameters = tuple(parameters[index] for index in order)
    numel = sum(prod(one.shape) for one in parameters)
    padding = zero12.partition_numel(numel, world_size) * world_size - numel
    whole: dict[str, Stripes | Chain] = {}
    dtypes = _dtypes(parameters)
    for state in dtypes:
        sources: list[ByteSource] = [source_of(one.tensors[state]) for one in parameters]
        whole[state] = Chain((*sources, Zeros(padding * dtypes[state].itemsize)))
    return Cut(parameters, whole, dtypes)


def _dtypes(parameters: Sequence[Parameter]) -> dict[str, DType]:
    """The element type of every state; all parameters of a flat group have the same ones, alike."""
    first = parameters[0].tensors if parameters else {}
    found = {state: tensor.dtype for state, tensor in first.items()} or {MASTERS: DType.F32}
    for one in parameters:
        if one.tensors.keys() != found.keys():
            raise UnsupportedError(
                f"the optimizer keeps other states of {one.name!r} than of the rest of its group",
                found=", ".join(one.tensors),
                expected=", ".join(found),
                hint=_AS_SAVED,
            )
        for state, tensor in one.tensors.items():
            if tensor.dtype is not found[state]:
                raise UnsupportedError(
                    f"the state {state!r} is of several element types within one group",
                    found=f"{tensor.dtype.torch_name} of {one.name!r}",
                    expected=found[state].torch_name,
                    hint=_AS_SAVED,
                )
    return found


def flat_leaf(source: ByteSource, dtype: DType) -> TensorLeaf:
    """A run of elements as a tensor of one dimension."""
    return TensorLeaf((source.nbytes // dtype.itemsize,), dtype, source, dtype)
