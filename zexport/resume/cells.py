"""One model-parallel index of ZeRO-1, 2 or 3 as a state: its groups, and all that its files say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, whole_tensor
from zexport.checkpoint.layouts.zero import listed_frozen, owners_of, take_inventory
from zexport.checkpoint.model_states import ZERO3, ModelStates
from zexport.checkpoint.module_names import with_parameter_names
from zexport.checkpoint.optimizer_states import OptimizerStates
from zexport.checkpoint.ranks import RankStates, no_first_model, no_optimizer_files
from zexport.checkpoint.untrusted import Value
from zexport.errors import UnsupportedError
from zexport.formats.inert import TensorRef
from zexport.ranges.copies import Replica
from zexport.resume.groups import GroupReader
from zexport.resume.state import CellState, ModuleEntry, Recorded
from zexport.weights.named import PEFT_PREFIX

CellFiles = tuple[ModelStates, list[OptimizerStates]]
"""The model states that name the weights, and all optimizer states in the order of ranks."""


def read_cell(index: int, ranks: RankStates) -> tuple[CellState, tuple[Replica, ...]]:
    """The state of one index, none of whose files is missing, and copies that must be equal."""
    model, owners = files = cell_files(index, ranks)
    named = with_parameter_names(model)
    state = without_groups(index, ranks, files, named, take_inventory(ranks, model))
    reader = GroupReader(owners, named, is_zero3=ranks.is_zero3)
    return replace(state, groups=reader.read()), tuple(reader.replicas)


def without_groups(
    index: int, ranks: RankStates, files: CellFiles, named: ModelStates, inventory: Inventory
) -> CellState:
    """The state of one index but for what is trained; ``named`` has the parameters' names."""
    model, owners = files
    first = owners[0]
    inner = Value(first.file.path, "optimizer states", first.file.value).mapping()
    return CellState(
        index=index,
        groups=(),
        frozen=frozen_table(ranks, named, inventory, len(owners)),
        module=tuple(module_entries(model, named, inventory, is_zero3=ranks.is_zero3)),
        aliases=inventory.aliases,
        model=said_by(model),
        optimizer=Recorded(first.file, inner),
    )


def said_by(model: ModelStates) -> Recorded:
    """All that a model file says."""
    said = Value(model.file.path, "model states", model.file.value).mapping()
    return Recorded(model.file, said)


def cell_files(index: int, ranks: RankStates) -> CellFiles:
    """The files of one index, of which none may be missing."""
    model = ranks.first_model
    if model is None:
        raise no_first_model(next(iter(ranks.optimizer.values())).file.path.parent, index)
    owners = [one for one in owners_of(ranks, ranks.world_size) if one is not None]
    if not any(model.param_shapes):
        raise UnsupportedError(
            "does not record in which order its weights lie in the flat groups, as a pipeline "
            "without ZeRO does not",
            path=model.file.path,
            expected="param_shapes",
            hint="Resume the run with ZeRO stage 1, save, and reshard that",
        )
    if not owners:
        raise no_optimizer_files(model.file.path.parent, index, model)
    return model, owners


def frozen_table(
    ranks: RankStates, named: ModelStates, inventory: Inventory, world_size: int
) -> Mapping[str, StoredTensor] | None:
    """The table of frozen weights, which ZeRO-1 does not write.

    There, what the module holds beside trained weights and buffers is not trained: frozen, or
    without an element. Where that is nothing, the names tell whether a base may have been left out,
    as the Trainer does of peft's.
    """
    if named.frozen_shapes is not None:
        listed = listed_frozen(ranks, named, world_size)
        return {tensor.name: tensor for tensor in listed}
    trained = {name for shapes in named.param_shapes for name in shapes}
    weights = [one for one in inventory.tensors if one.role is not Role.BUFFER]
    unlisted = {one.name: one for one in weights if one.name not in trained}
    is_recorded = named.zero_options.get("stage") in (2, ZERO3)
    if is_recorded or (not unlisted and _is_adapted(named)):
        return None
    return unlisted


def _is_adapted(named: ModelStates) -> bool:
    return all(name.startswith(PEFT_PREFIX) for shapes in named.param_shapes for name in shapes)


def module_entries(
    model: ModelStates, named: ModelStates, inventory: Inventory, *, is_zero3: bool
) -> Iterator[ModuleEntry]:
    """Every tensor of the module's state dict, by the name that it has there."""
    stated = Value(model.file.path, "module", model.file.value).get("module").mapping_or_empty()
    names = [name for name, one in stated.items() if isinstance(one, TensorRef)]
    known = {tensor.name: tensor for tensor in inventory.tensors}
    for name, (own, ref) in zip(names, named.module.items(), strict=True):
        owner = inventory.aliases.get(own, own)
        tensor = known.get(owner)
        is_placeholder = is_zero3 and ref.shape == (0,)
        yield ModuleEntry(
            name=name,
            owner=owner,
            dtype=ref.dtype,
            value=tensor if is_placeholder else whole_tensor(model.file, own, ref, Role.BUFFER),
            is_parameter=is_placeholder if tensor is None else tensor.role is not Role.BUFFER,
        )
