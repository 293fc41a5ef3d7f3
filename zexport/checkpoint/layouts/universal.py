"""Universal checkpoints: every trained weight whole in a file of its own, the rest in model files.

The files under ``zero/`` are believed for trained weights alone. What else the converter writes
there is not exact: buffers and frozen weights turned to fp32, tied weights made from 16-bit values.
Those come from the copied model files, as they do from the checkpoint that was converted: in pieces
where there are tensor ranks. A pipeline's lie in the files of its layers, which ``zexport reshard``
lets go along and DeepSpeed's converter does not.

Source: DeepSpeed 0.19, ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, whole_tensor
from zexport.checkpoint.layouts.pipeline import tied_layer, tied_layers
from zexport.checkpoint.layouts.tensor_parallel import join_shards
from zexport.checkpoint.layouts.universal_weights import (
    CONVERT_AGAIN,
    FOLDER,
    OPTIMIZER_STATE,
    check_one_type,
    has_moments,
    names_its_groups,
    read_weight,
    weight_folders,
)
from zexport.checkpoint.layouts.zero import bind_trained, rounded_copy, with_untrained
from zexport.checkpoint.model_states import ModelStates, ModuleFile, read_module_files
from zexport.checkpoint.module_names import names_in_state_dict, with_parameter_names
from zexport.checkpoint.rank_files import RankFileKind, name_ranks
from zexport.checkpoint.ranks import WORLD_SIZE_MAX, RankStates, Save
from zexport.checkpoint.untrusted import Value
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsupportedError,
)
from zexport.formats.torch_file import read_torch_file
from zexport.ranges.dtypes import Shape
from zexport.ranges.replicas import CastReplica, Replica
from zexport.store.folders import is_file

_FROZEN_LOST = (
    "frozen weights, if there were any, are in no file: a pipeline keeps them in layer files, "
    "which the conversion to universal leaves behind"
)


_NOTHING = Inventory((), {}, ())


def take_universal(save: Save) -> Inventory:
    """The tensors of a universal checkpoint."""
    tag_dir, cells = save.tag_dir, save.cells
    if not cells or any(0 not in ranks.model for ranks in cells.values()):
        raise IncompleteCheckpointError(
            "lacks the model file of rank 0, which names and shapes come from",
            path=tag_dir,
            hint="Copy *_model_states.pt from where the checkpoint was converted, or convert it "
            "again",
        )
    models = {cell: ranks.model[0] for cell, ranks in cells.items()}
    for model in models.values():
        _refuse_spoiled(tag_dir, model)
    parts = [_take_cell(tag_dir, cells[cell], models[cell]) for cell in sorted(cells)]
    names = {tensor.name for part in parts for tensor in part.tensors}
    folders = weight_folders(tag_dir / FOLDER)
    known = names.union(
        *(m.module for m in models.values()),
        *map(names_in_state_dict, models.values()),  # --inject_missing_state has weights made of it
        *(part.aliases for part in parts),
    )
    _check_no_surplus(tag_dir, folders, known)
    _check_all_trained_are_named(save, folders)
    untrained = _untrained_names(parts)
    weights = [
        read_weight(tag_dir, name, shards, models, folders)
        for name, shards in _shards(parts).items()
        if name not in untrained
    ]
    check_one_type(weights)
    rest, replicas = _rest_of_parts(models, dict(zip(sorted(cells), parts, strict=True)))
    trained = {tensor.name: tensor for tensor, _ in weights}
    layers = read_module_files(save.of_kind(RankFileKind.PIPELINE_LAYER))
    by_index = [models[index] for index in sorted(models)]
    of_layers = _rest_of_layers(layers, by_index, trained) if layers else _NOTHING
    copies = [c for tensor, _ in weights for c in _copies(tensor, models)]
    joined = Inventory.joined(parts)
    found = {tensor.name for tensor in of_layers.tensors}
    lost = [name for name in joined.left_out if name not in found]
    has_rest = bool(layers) or any(model.module for model in models.values())
    return replace(
        joined,
        tensors=(*trained.values(), *rest, *of_layers.tensors),
        aliases={alias: name for alias, name in joined.aliases.items() if alias not in names},
        left_out=(),
        replicas=(*replicas, *of_layers.replicas, *copies),
        warnings=tuple(_told(lost, has_rest=has_rest)),
        files=(*(file for _, file in weights), *(layer.file for layer in layers)),
    )


def _told(lost: Sequence[str], *, has_rest: bool) -> Iterator[str]:
    """What the converter dropped, which is told and not missed."""
    if not has_rest:
        yield _FROZEN_LOST
    if lost:
        yield f"the conversion to universal lost the values of {', '.join(lost)}"


def _refuse_spoiled(tag_dir: Path, model: ModelStates) -> None:
    """Refuse what ``ds_to_universal`` (DeepSpeed 0.10 to 0.19) is known to write wrongly.

    With round-robin gradients the weights lie in a shuffled order, and ``param_slice_mappings``, by
    which the converter cuts them, tells of the order before. A single rank shuffles nothing. Errs
    towards refusing: BF16_Optimizer does not shuffle, but leaves no trace in the model files.
    """
    stage = model.zero_options.get("stage")
    if not (model.is_round_robin and stage in (1, 2) and model.dp_world_size != 1):
        return
    path = tag_dir / FOLDER / f"{OPTIMIZER_STATE}.pt"
    said = Value(path, "optimizer state", read_torch_file(path).value if is_file(path) else {})
    if not names_its_groups(said):
        raise UnsupportedError(
            "was converted from a run with round_robin_gradients, and the converter mixed up the "
            "weights' values",
            path=model.file.path,
            hint="Export the checkpoint that it was converted from",
        )


def _take_cell(tag_dir: Path, ranks: RankStates, model: ModelStates) -> Inventory:
    """One model-parallel index by its model files alone: trained weights are without source."""
    world_size = model.dp_world_size or len(ranks.model)
    if not 0 < world_size <= WORLD_SIZE_MAX:
        raise DamagedCheckpointError(
            "model states['dp_world_size'] is an impossible number of ranks",
            path=model.file.path,
            found=world_size,
            hint="Copy the file again from where it was written",
        )
    model = with_parameter_names(model)
    trained = bind_trained((), model, is_zero3=ranks.is_zero3)
    inventory = with_untrained(trained, ranks, model, world_size)
    if model.has_experts:
        inventory = _without_unrecorded(inventory, model)
    if any(t.source is None and t.role is Role.FROZEN for t in inventory.tensors):
        missing = set(range(world_size)) - ranks.model.keys()
        raise IncompleteCheckpointError(
            f"lacks the model files of {name_ranks(missing)}, and parts of frozen weights",
            path=tag_dir,
            found=f"{len(ranks.model)} of {world_size} model files",
            hint="Copy them from the checkpoint that was converted",
        )
    return inventory


def _without_unrecorded(inventory: Inventory, model: ModelStates) -> Inventory:
    """Less the 16-bit weights that nothing accounts for, which may be stale.

    AutoEP keeps a module that it replaced, under its old name beside the new one, and never updates
    the old one's weights (DeepSpeed 0.19: ``mlp.gate.gate.weight`` for ``mlp.router.gate.weight``).
    """
    unrecorded = [
        tensor.name
        for tensor in inventory.tensors
        if tensor.role is Role.FROZEN and tensor.name not in (model.frozen_shapes or {})
    ]
    return replace(
        inventory,
        tensors=tuple(t for t in inventory.tensors if t.name not in set(unrecorded)),
        left_out=(*inventory.left_out, *unrecorded),
    )


def _shards(parts: list[Inventory]) -> dict[str, list[Shape]]:
    """The shapes that every trained weight has in the model-parallel ranks."""
    shards: dict[str, list[Shape]] = {}
    for part in parts:
        for tensor in part.tensors:
            if tensor.role is Role.TRAINABLE:
                shards.setdefault(tensor.name, []).append(tensor.shape)
    return shards


def _check_no_surplus(tag_dir: Path, folders: Mapping[str, Path], known: set[str]) -> None:
    surplus = sorted(folders.keys() - known)
    if surplus:
        raise DamagedCheckpointError(
            f"holds weights that no model file names, such as {surplus[0]!r}",
            path=tag_dir / FOLDER,
            found=f"{len(surplus)} such folders",
            expected="the weights of one conversion",
            hint=CONVERT_AGAIN,
        )


def _check_all_trained_are_named(save: Save, folders: Mapping[str, Path]) -> None:
    """Refuse model files that leave trained weights out of ``param_shapes``: those of another run.

    The converter writes moments for the names in the ``param_shapes`` of the model files that it
    copies, and for no others; buffers, frozen and tied weights have ``fp32.pt`` alone (DeepSpeed
    0.10 to 0.19, ``ds_to_universal.py``, ``main``).
    """
    models = [model for ranks in save.cells.values() for model in ranks.model.values()]
    named = {name for model in models for shapes in model.param_shapes for name in shapes}
    unnamed = sorted(name for name in folders.keys() - named if has_moments(folders[name]))
    if unnamed:
        raise DamagedCheckpointError(
            f"holds trained weights that no model file names as such, for one {unnamed[0]!r}",
            path=save.tag_dir / FOLDER,
            found=f"moments of {len(unnamed)} weights that are not in param_shapes",
            expected="the model files of the run that was converted",
            hint="Copy *_model_states.pt from where the checkpoint was converted, or convert it "
            "again",
        )


def _copies(weight: StoredTensor, models: Mapping[int, ModelStates]) -> Iterator[CastReplica]:
    """The module's own copies of a weight, where a model file holds it whole."""
    for model in models.values():
        copy = model.module.get(weight.name)
        if copy is not None and copy.shape == weight.shape:
            yield from (
                replace(one, advice=CONVERT_AGAIN) for one in rounded_copy(weight, model.file, copy)
            )


def _rest_of_parts(
    models: Mapping[int, ModelStates], parts: Mapping[int, Inventory]
) -> tuple[tuple[StoredTensor, ...], tuple[Replica, ...]]:
    """Frozen weights and buffers of the model files of all model-parallel ranks.

    Buffers of one name must be equal; frozen weights are joined as trained ones would be.
    """
    names = _untrained_names(parts.values())
    kept = {
        index: replace(part, tensors=tuple(one for one in part.tensors if one.name in names))
        for index, part in parts.items()
    }
    is_split = len(kept) > 1 and any(
        one.role is Role.FROZEN for part in kept.values() for one in part.tensors
    )
    if not is_split:
        return _alike(kept.values())
    joined = join_shards([models[index] for index in kept], [*kept.values()])
    replicas = tuple(one for one in joined.replicas if isinstance(one, Replica))
    return joined.tensors, replicas


def _untrained_names(parts: Iterable[Inventory]) -> set[str]:
    """The names of what is not trained; a piece without an element says nothing of that."""
    tensors = chain.from_iterable(part.tensors for part in parts)
    return {
        tensor.name
        for tensor in tensors
        if tensor.role is Role.BUFFER or (tensor.role is Role.FROZEN and tensor.numel)
    }


def _alike(parts: Iterable[Inventory]) -> tuple[tuple[StoredTensor, ...], tuple[Replica, ...]]:
    rest: dict[str, StoredTensor] = {}
    replicas = []
    for tensor in (one for part in parts for one in part.tensors):
        first = rest.setdefault(tensor.name, tensor)
        if (first.shape, first.dtype, first.role) != (tensor.shape, tensor.dtype, tensor.role):
            raise LayoutError(
                f"two model-parallel ranks hold a different {tensor.name!r}",
                f"{tensor.dtype.torch_name} {list(tensor.shape)}",
                f"{first.dtype.torch_name} {list(first.shape)}",
            )
        if first is not tensor and first.source is not None and tensor.source is not None:
            replicas.append(Replica(tensor.name, first.source, tensor.source))
    return tuple(rest.values()), tuple(replicas)


def _rest_of_layers(
    layers: Sequence[ModuleFile],
    models: Sequence[ModelStates],
    trained: Mapping[str, StoredTensor],
) -> Inventory:
    """Frozen weights and buffers of a pipeline, out of the files of its layers.

    ``models`` are the model states of all its stages, of every tensor rank of one after another.
    """
    buffers = {name for model in models for name in model.buffer_names}
    ranks = sorted({layer.tensor_rank for layer in layers})
    found = []
    for rank in ranks:
        shapes = chain.from_iterable(one.param_shapes for one in models[rank :: len(ranks)])
        numels = {name: prod(shape) for group in shapes for name, shape in group.items()}
        tied = tied_layers(numels, buffers)
        own = (layer for layer in layers if layer.tensor_rank == rank)
        tensors = (one for layer in own for one in _untrained_of(layer, trained, buffers, tied))
        found.append(Inventory(tuple(tensors), {}, ()))
    return found[0] if len(found) == 1 else join_shards([*models][: len(ranks)], found)


def _untrained_of(
    layer: ModuleFile,
    trained: Mapping[str, StoredTensor],
    buffers: set[str],
    tied: Mapping[str, Mapping[str, int | None]],
) -> Iterator[StoredTensor]:
    names = {f"{layer.layer}.{key}" for key in layer.tensors}
    if not names & (trained.keys() | buffers) and tied_layer(layer, tied) is not None:
        return
    for key, ref in layer.tensors.items():
        name = f"{layer.layer}.{key}"
        if name not in trained:
            role = Role.BUFFER if name in buffers else Role.FROZEN
            yield whole_tensor(layer.file, name, ref, role)
