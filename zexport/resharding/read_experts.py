"""A training with experts as a state: for each expert-parallel rank, all weights and its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, ZeroCheckpoint, source_of
from zexport.checkpoint.layouts.bind import MASTERS
from zexport.checkpoint.layouts.expert_groups import sharing_of_experts
from zexport.checkpoint.layouts.expert_layers import (
    AUTOEP_WEIGHTS,
    AutoEpLayer,
    ExpertLayers,
    expert_groups,
    find_layers,
    parse_native,
    read_autoep_layers,
    without_experts,
)
from zexport.checkpoint.layouts.expert_placement import uniform
from zexport.checkpoint.layouts.experts import stored_experts
from zexport.checkpoint.layouts.master_matching import Weight
from zexport.checkpoint.layouts.zero import bind_trained, owners_of, with_untrained
from zexport.checkpoint.layouts.zero0_experts import Share, shares_of
from zexport.checkpoint.model_states import ModelStates, module_file
from zexport.checkpoint.module_names import with_parameter_names
from zexport.checkpoint.optimizer_states import optimizer_in
from zexport.checkpoint.rank_files import RankFile, RankFileKind, parse_rank_file, rank_file_name
from zexport.checkpoint.ranks import RankStates, is_zero0, no_first_model, no_optimizer_files
from zexport.errors import UnsupportedError
from zexport.formats.inert import TensorLeaf
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Window
from zexport.ranges.replicas import Replica
from zexport.resharding.read_cells import (
    GroupReader,
    cell_files,
    module_entries,
    said_by,
    without_groups,
)
from zexport.resharding.read_zero0 import NumberedGroups, optimizer_file
from zexport.resharding.state import CellState, Group, Recorded

Read = tuple[list[CellState], list[Replica]]


def read_experts(checkpoint: ZeroCheckpoint) -> Read:
    """The state of every expert-parallel rank of every stage, and copies that must be equal.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_save_moe_checkpoint``,
    ``load_moe_state_dict``): the files of experts are of the whole layer, so that they stay as they
    are; ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` partition a group of experts over the
    ranks that have the same, and all else over all ranks.
    """
    cells, replicas = [], []
    for index, ranks in sorted(checkpoint.cells.items()):
        model = ranks.first_model
        if model is None:
            raise no_first_model(checkpoint.location.tag_dir, index)
        named = [*_named(checkpoint, index)]
        experts = [one for one in named if one[0].kind is RankFileKind.EXPERT]
        layers = find_layers(ranks, model, [module_file(*one) for one in experts])
        if is_zero0(ranks):
            kind = RankFileKind.EXPERT_OPTIMIZER
            masters = {name.rank: file for name, file in named if name.kind is kind}
            read = _read_unsharded(checkpoint, index, model, layers, masters)
        else:
            read = _read_sharded(index, ranks, layers, checkpoint.module_dtype)
        cells += read[0]
        replicas += read[1]
    return cells, replicas


def _named(checkpoint: ZeroCheckpoint, index: int) -> Iterable[tuple[RankFile, TorchFile]]:
    """The files of one model-parallel index, with what their names say."""
    for file in checkpoint.torch_files:
        name = parse_rank_file(file.path)
        if name is not None and name.mp_rank == index:
            yield name, file


def _read_sharded(index: int, ranks: RankStates, layers: ExpertLayers, dtype: DType | None) -> Read:
    """The states of the expert-parallel ranks of one stage under ZeRO."""
    model, owners = cell_files(index, ranks)
    world_size, is_zero3 = len(owners), ranks.is_zero3
    named = with_parameter_names(without_experts(model, layers))
    numbers = expert_groups(model, layers)
    bound = bind_trained(
        owners_of(ranks, world_size), named, is_zero3=is_zero3, shapes=model.param_shapes,
        others=numbers,
    )  # fmt: skip
    inventory = with_untrained(bound, ranks, named, world_size)
    sets = _sets(ranks, model, numbers, world_size)
    trained = {name for shapes in model.param_shapes for name in shapes}
    state = without_groups(index, ranks, (model, owners), named, inventory)
    frozen = None if _has_frozen_experts(model, layers, trained) else state.frozen
    whole = with_parameter_names(model)
    cells, replicas = [], []
    for expert_rank, sharing in enumerate(sets):
        sharers = [owners[rank] for rank in sharing]
        own = dict.fromkeys(numbers, sharers)
        reader = GroupReader(owners, whole, is_zero3=is_zero3, sharing=own)
        cell = replace(
            state,
            groups=reader.read(),
            frozen=frozen,
            model=said_by(ranks.model.get(sharing[0], model)),
            expert_rank=expert_rank,
            expert_ranks=len(sets),
        )
        if is_zero3:
            files = expert_files(cell, read_autoep_layers(model), dtype or DType.F32)
            cell = replace(cell, expert_files=tuple(files))
        cells.append(cell)
        replicas += reader.replicas
    return cells, replicas


def _sets(
    ranks: RankStates, model: ModelStates, numbers: Sequence[int], world_size: int
) -> Sequence[Sequence[int]]:
    """For each expert-parallel rank, who has its experts; one set where none are trained."""
    found = sharing_of_experts(ranks, model, numbers, world_size)
    if any([*map(list, one)] != [*map(list, found[0])] for one in found):
        raise UnsupportedError(
            "cannot be resharded: has layers of several expert-parallel sizes",
            path=model.file.path,
            found=", ".join(str(len(one)) for one in found),
            expected="one size, as DeepSpeed looks for experts by the largest",
            hint="Resume it with as many ranks as wrote it",
        )
    return found[0] if found else [range(world_size)]


def _has_frozen_experts(model: ModelStates, layers: ExpertLayers, trained: Iterable[str]) -> bool:
    """Whether experts have weights that are not trained, which the files of experts hold.

    The table of frozen weights that ZeRO-2 writes has those of the first rank. Every rank would
    load them over its own (DeepSpeed 0.19.8, ``runtime/engine.py``, ``load_module_state_dict``), so
    such a training gets no table: the module and these files have every weight.
    """
    held = {name for files in layers.files.values() for one in files for name in one.tensors}
    native = {_of_first(name) for name in held if parse_native(name) is not None}
    known = {*map(_of_first, trained), *map(_of_first, model.buffer_names)}
    return bool((native | layers.autoep.keys()) - known)


def _of_first(name: str) -> str:
    """The same weight of the first expert."""
    native = parse_native(name)
    return name if native is None else native.renumbered(0)


def expert_files(
    cell: CellState, layers: Iterable[AutoEpLayer], dtype: DType
) -> Iterator[tuple[str, dict[object, object]]]:
    """The files that ZeRO-1 and 2 load AutoEP's experts from, which ZeRO-3 does without.

    A file for each expert of this rank, by its name: its weights as the module has them, in
    ``dtype``.
    """
    masters = {one.name: one.tensors[MASTERS] for one in cell.parameters()}
    for layer in layers:
        for place, expert in enumerate(layer.held[cell.expert_rank]):
            content: dict[object, object] = {}
            for weight in AUTOEP_WEIGHTS:
                whole = masters[f"{layer.experts}.{weight}"]
                shape, size = whole.shape[1:], whole.dtype.itemsize
                nbytes = prod(shape) * size
                part = Window(source_of(whole), place * nbytes, nbytes)
                leaf = TensorLeaf(shape, dtype, part, whole.dtype)
                content[f"{layer.experts}.{weight}.{expert}"] = leaf
            kind = RankFileKind.EXPERT
            yield rank_file_name(kind, 0, cell.index, layer=layer.number, expert=expert), content


def _read_unsharded(
    checkpoint: ZeroCheckpoint,
    index: int,
    model: ModelStates,
    layers: ExpertLayers,
    masters: Mapping[int, TorchFile],
) -> Read:
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
        reader = _groups(share, layers, rank, len(shares))
        groups = tuple(reader.read())
        if cells:
            groups = tuple(_taken(cells[0].groups, groups, replicas))
        cells.append(
            CellState(
                index=index,
                groups=groups,
                frozen=_unsharded_frozen(model, layers, inventory, groups),
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


def _groups(share: Share, layers: ExpertLayers, rank: int, ranks: int) -> NumberedGroups:
    """The groups of one rank's file, by the weights that it trained, as they are called there."""
    known = {
        name: _stored(name, one, share)
        for one in share.weights
        for name in (_local_name(one, layers, rank, ranks),)
    }
    experts = {_local_name(one, layers, rank, ranks) for one in share.experts}
    return NumberedGroups(share.file, optimizer_in(share.file), known, experts)


def _local_name(weight: Weight, layers: ExpertLayers, rank: int, ranks: int) -> str:
    """The name that a weight has on its rank, which numbers its own experts from 0 on."""
    native = parse_native(weight.name) if weight.of_experts else None
    if native is None:
        return weight.name
    own = uniform(layers.native[native.prefix], ranks)[rank]
    return native.renumbered(own.index(native.number))


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


def _unsharded_frozen(
    model: ModelStates, layers: ExpertLayers, inventory: Inventory, groups: tuple[Group, ...]
) -> dict[str, StoredTensor] | None:
    """The table of frozen weights; none is to be written where experts have some."""
    trained = {one.name for group in groups for one in group.parameters}
    if _has_frozen_experts(model, layers, trained):
        return None
    return {
        one.name: one
        for one in inventory.tensors
        if one.role is not Role.BUFFER and one.name not in trained and one.name in model.module
    }
