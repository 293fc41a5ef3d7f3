"""Experts without ZeRO as a state: whole masters in a file of each expert-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, ZeroCheckpoint
from zexport.checkpoint.layouts.expert_layers import (
    ExpertLayers,
    parse_native,
    without_experts,
)
from zexport.checkpoint.layouts.expert_placement import uniform
from zexport.checkpoint.layouts.experts import stored_experts
from zexport.checkpoint.layouts.master_matching import Weight
from zexport.checkpoint.layouts.zero0_experts import Share, shares_of
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.optimizer_states import optimizer_in
from zexport.checkpoint.ranks import no_optimizer_files
from zexport.formats.torch_file import TorchFile
from zexport.ranges.copies import Replica
from zexport.resume.cells import module_entries, said_by
from zexport.resume.expert_files import has_frozen_experts
from zexport.resume.state import CellState, Group, Recorded
from zexport.resume.zero0 import NumberedGroups, optimizer_file


def read_unsharded(
    checkpoint: ZeroCheckpoint,
    index: int,
    model: ModelStates,
    layers: ExpertLayers,
    masters: Mapping[int, TorchFile],
) -> tuple[list[CellState], list[Replica]]:
    """The states of the expert-parallel ranks of one stage, and copies that must be equal.

    Every rank has dense weights and their states in its file: the first rank's are taken.
    """
    if not masters:
        raise no_optimizer_files(model.file.path.parent, index, model)
    dense = without_experts(model, layers)
    stored = [*stored_experts(model, layers, set())]
    inventory = Inventory(checkpoint.tensors, checkpoint.aliases, ())
    cells: list[CellState] = []
    replicas: list[Replica] = []
    shares = shares_of(dense, stored, layers, masters)
    for rank, share in enumerate(shares):
        reader = _groups(share, _Local(layers, rank, len(shares)))
        groups = tuple(reader.read())
        if cells:
            groups = tuple(_taken(cells[0].groups, groups, replicas))
        cells.append(
            CellState(
                index=index,
                groups=groups,
                frozen=_frozen(model, layers, inventory, groups),
                module=tuple(module_entries(model, model, inventory, is_zero3=False)),
                aliases=inventory.aliases,
                model=said_by(model),
                optimizer=Recorded(share.file, optimizer_file(share.file, model)),
                expert_rank=rank,
                expert_ranks=len(shares),
            )
        )
        replicas += reader.replicas
    return cells, replicas


class _Local:
    """The names that experts have on their rank, which numbers its own from 0 on."""

    def __init__(self, layers: ExpertLayers, rank: int, ranks: int) -> None:
        self._layers = layers
        self._rank = rank
        self._ranks = ranks

    def name(self, weight: Weight) -> str:
        native = parse_native(weight.name) if weight.of_experts else None
        if native is None:
            return weight.name
        own = uniform(self._layers.native[native.prefix], self._ranks)[self._rank]
        return native.renumbered(own.index(native.number))


def _groups(share: Share, local: _Local) -> NumberedGroups:
    """The groups of one rank's file, by the weights that it trained."""
    known = {local.name(one): _stored(local.name(one), one, share) for one in share.weights}
    experts = {local.name(one) for one in share.experts}
    return NumberedGroups(share.file, optimizer_in(share.file), known, experts)


def _stored(name: str, weight: Weight, share: Share) -> StoredTensor:
    """A weight as its master, or as it is where it has none: not trained, if others have one."""
    found = share.masters.found
    master = found.get(weight.name)
    if master is not None:
        return StoredTensor(name, weight.shape, master.dtype, Role.TRAINABLE, master.source)
    role = Role.FROZEN if found else Role.TRAINABLE
    return StoredTensor(name, weight.shape, weight.dtype, role, weight.source)


def _taken(
    first: tuple[Group, ...], own: tuple[Group, ...], replicas: list[Replica]
) -> Iterator[Group]:
    """A later rank's groups: those of experts are its own, all else the first rank's.

    What it has itself of dense weights is a copy of that.
    """
    for kept, group in zip(first, own, strict=True):
        if group.of_experts:
            yield group
            continue
        yield kept
        for one, other in zip(kept.parameters, group.parameters, strict=True):
            for state, tensor in one.tensors.items():
                copy = other.tensors[state]
                if tensor.source is not None and copy.source is not None:
                    name = f"{one.name} ({state})"
                    replicas.append(Replica(name, tensor.source, copy.source))


def _frozen(
    model: ModelStates, layers: ExpertLayers, inventory: Inventory, groups: tuple[Group, ...]
) -> dict[str, StoredTensor] | None:
    """The table of frozen weights; none is to be written where experts have some."""
    trained = {one.name for group in groups for one in group.parameters}
    if has_frozen_experts(model, layers, trained):
        return None
    return {
        one.name: one
        for one in inventory.tensors
        if one.role is not Role.BUFFER and one.name not in trained and one.name in model.module
    }
