"""AutoEP's experts of all ranks as whole parameters, and a rank's share of these again.

Source: DeepSpeed 0.19.8, ``checkpoint/autoep_universal.py``
(``consolidate_autoep_zero12_expert_states``), ``checkpoint/universal_checkpoint.py``
(``_resolve_autoep_partition``) and ``runtime/zero/stage3.py``
(``_slice_autoep_universal_expert_param``): a run of any expert-parallel size takes its own experts
out of a parameter that has those of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.contents import StoredTensor, source_of
from zexport.checkpoint.layouts.expert_layers import (
    AutoEpLayer,
    autoep_weights,
    in_expert_order,
    read_autoep_layers,
)
from zexport.checkpoint.model_states import ModelStates
from zexport.errors import LayoutError, UnsupportedError
from zexport.ranges.extents import Chain, Window
from zexport.resharding.state import CellState, Group, Parameter, Recorded

_SIZE = "name"
"""The setting by which a group of experts says among how many ranks they are shared.

A run keeps its own where it is not given one, and so may have another size.
"""

Told = dict[str, Mapping[object, object]]


def join_experts(cells: Sequence[CellState], model: ModelStates) -> tuple[tuple[Group, ...], Told]:
    """The groups of a stage with all experts, and what files say of these beside their elements.

    Raises:
        UnsupportedError: the experts are DeepSpeed-MoE's, or some of their weights are frozen.
    """
    layers = autoep_weights(read_autoep_layers(model))
    groups: list[Group] = []
    for alike in zip(*(one.groups for one in cells), strict=True):
        if alike[0].of_experts:
            _check_is_autoep(alike[0], layers, model)
        groups.append(_joined(alike, layers) if alike[0].of_experts else alike[0])
    trained = {one.name for group in groups for one in group.parameters}
    if frozen := sorted(layers.keys() - trained):
        raise UnsupportedError(
            "has experts with frozen weights, which no universal checkpoint keeps",
            path=model.file.path,
            found=f"{frozen[0]!r} is not trained",
            hint="Reshard to rank files with --world-size",
        )
    told: Told = {
        name: {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": layer.num_experts}
        for name, layer in layers.items()
    }
    return tuple(groups), told


def _check_is_autoep(group: Group, layers: Mapping[str, AutoEpLayer], model: ModelStates) -> None:
    other = next((one.name for one in group.parameters if one.name not in layers), None)
    if other is not None:
        raise UnsupportedError(
            "has experts of DeepSpeed-MoE, which every rank numbers from 0 on: of a universal "
            "checkpoint each would load those of the first",
            path=model.file.path,
            found=repr(other),
            expected="AutoEP's experts, which DeepSpeed loads by their place in the layer",
            hint="Reshard to rank files with --world-size",
        )


def _joined(alike: Sequence[Group], layers: Mapping[str, AutoEpLayer]) -> Group:
    """A group with the experts of all ranks."""
    parts = zip(*(one.parameters for one in alike), strict=True)
    said = alike[0].settings
    return replace(
        alike[0],
        parameters=tuple(_of_all(own, layers[own[0].name]) for own in parts),
        settings=said and Recorded(said.file, {k: v for k, v in said.values.items() if k != _SIZE}),
    )


def _of_all(parts: Sequence[Parameter], layer: AutoEpLayer) -> Parameter:
    """A parameter with the experts of all ranks, in the order of their numbers."""
    first = parts[0]
    shape = (layer.num_experts, *first.shape[1:])
    tensors = {}
    for state, one in first.tensors.items():
        sources = [source_of(part.tensors[state]) for part in parts]
        source = Chain(tuple(in_expert_order(sources, layer)))
        tensors[state] = StoredTensor(first.name, shape, one.dtype, one.role, source)
    return Parameter(first.name, shape, tensors)


class Share(Struct, frozen=True):
    """What one expert-parallel rank has of the experts; ``layers`` are by name of a weight."""

    layers: Mapping[str, AutoEpLayer]
    rank: int

    @classmethod
    def all_of(cls, model: ModelStates) -> list[Share]:
        """The shares of every expert-parallel rank that there was; none without experts."""
        layers = autoep_weights(read_autoep_layers(model))
        sizes = {len(layer.held) for layer in layers.values()}
        if len(sizes) > 1:
            raise LayoutError(
                "the layers with experts have several expert-parallel sizes", sorted(sizes), "one"
            )
        return [cls(layers, rank) for rank in range(max(sizes, default=0))]

    def cut(self, whole: StoredTensor) -> StoredTensor:
        """This rank's part of a parameter; all of what is not an expert's."""
        layer = self.layers.get(whole.name)
        if layer is None:
            return whole
        if whole.shape[:1] != (layer.num_experts,):
            raise LayoutError(
                f"{whole.name!r} has not as many experts as its layer",
                list(whole.shape),
                layer.num_experts,
            )
        held, shape = layer.held[self.rank], whole.shape[1:]
        nbytes = prod(shape) * whole.dtype.itemsize
        source = source_of(whole)
        parts = tuple(Window(source, expert * nbytes, nbytes) for expert in held)
        return StoredTensor(whole.name, (len(held), *shape), whole.dtype, whole.role, Chain(parts))

    @property
    def count(self) -> int:
        """How many expert-parallel ranks there are."""
        return next(len(layer.held) for layer in self.layers.values())

    def has_all(self, names: Collection[str]) -> bool:
        """Whether these are weights of experts; a group has such alone, or none.

        Raises:
            LayoutError: some are, and others are not.
        """
        count = len(self.layers.keys() & names)
        if count not in (0, len(names)):
            raise LayoutError(
                "a parameter group mixes experts with other weights", count, f"0 or {len(names)}"
            )
        return count > 0

    def settings(self, said: Recorded) -> Recorded:
        """A group's settings with what names the number of ranks that share its experts."""
        return Recorded(said.file, {**said.values, _SIZE: f"ep_size_{self.count}"})
