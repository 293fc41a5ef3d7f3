"""Models with experts: every expert under its number in the whole layer, whoever held it.

DeepSpeed-MoE keeps an expert's weights as tensors of their own, AutoEP those of all experts of a
layer as one; beside the masters, expert files hold all of them in the module's element types, and
what is no master (frozen weights, buffers) nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from math import prod

from msgspec import structs

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, whole_tensor
from zexport.checkpoint.layouts.bind import Bound, check_one_type
from zexport.checkpoint.layouts.expert_groups import bind_experts
from zexport.checkpoint.layouts.expert_layers import (
    AutoEpLayer,
    ExpertLayers,
    expert_groups,
    find_layers,
    in_expert_order,
    parse_native,
    stack_slices,
    without_experts,
)
from zexport.checkpoint.layouts.expert_placement import uniform
from zexport.checkpoint.layouts.pipeline import merge_stages
from zexport.checkpoint.layouts.zero import (
    bind_trained,
    by_role,
    check_names,
    owners_of,
    rounded_copy,
    with_untrained,
)
from zexport.checkpoint.layouts.zero0_experts import take_unsharded_experts
from zexport.checkpoint.model_states import ModelStates, read_module_files
from zexport.checkpoint.module_names import with_parameter_names
from zexport.checkpoint.rank_files import RankFileKind, read_rank_file
from zexport.checkpoint.ranks import RankStates, Save, check_cells, is_zero0, no_first_model
from zexport.errors import LayoutError, UnsupportedError
from zexport.ranges.extents import Chain, Window
from zexport.ranges.replicas import CastReplica, Replica


def take_experts(save: Save) -> Inventory:
    """The tensors of a checkpoint with experts; several model-parallel indices are stages.

    Source: DeepSpeed 0.19, ``runtime/engine.py`` (``_save_moe_checkpoint``): with experts a stage's
    dense weights are in its model file, not in layer files, and its MoE layers are counted anew.
    """
    if not save.cells:
        raise no_first_model(save.tag_dir)
    models = [*save.models.values()]
    if len(save.cells) > 1 or any(model.tensor_parallel > 1 for model in models):
        _check_is_pipeline(save, models)
    taken = [_take_cell(save, index) for index in sorted(save.cells)]
    return taken[0] if len(taken) == 1 else merge_stages(taken)


def _check_is_pipeline(save: Save, models: Sequence[ModelStates]) -> None:
    """Refuse experts of several model-parallel indices unless these are a pipeline's stages."""
    grid = models[0].grid if models else None
    if grid is None or grid.tensor > 1:
        raise UnsupportedError(
            "combines experts with tensor parallelism, or does not say with what",
            path=save.tag_dir,
            found=f"{len(save.cells)} model-parallel ranks"
            + (f", {grid.tensor} of them tensor ranks" if grid else ""),
            expected="stages of a pipeline, in checkpoint_parallel_dimensions",
            hint="Resume the run without tensor parallelism, with DeepSpeed 0.19 or later, save "
            "once more, and export that",
        )
    check_cells(save, grid.stages, "pipeline stages")


def _take_cell(save: Save, index: int) -> Inventory:
    """What one model-parallel index holds, its experts numbered as in the whole layer."""
    ranks = save.cells[index]
    model = ranks.first_model
    if model is None:
        return Inventory((), {}, ())
    own = [file for file in save.files if file.mp_rank == index]
    parts = read_module_files(file for file in own if file.kind is RankFileKind.EXPERT)
    masters = [file for file in own if file.kind is RankFileKind.EXPERT_OPTIMIZER]
    optimizers = {one.rank: read_rank_file(one) for one in masters if is_zero0(ranks)}
    _refuse_folded(model)
    layers = find_layers(ranks, model, parts)
    dense = without_experts(model, layers)
    if is_zero0(ranks):
        stored = list(stored_experts(model, layers, set()))
        inventory = take_unsharded_experts(dense, stored, layers, optimizers)
    else:
        inventory = _take_sharded(ranks, model, dense, layers)
    ordered = tuple(by_role(inventory.tensors))
    check_names(ordered)
    return structs.replace(
        inventory,
        tensors=ordered,
        files=(*(part.file for part in parts), *optimizers.values()),
    )


def _take_sharded(
    ranks: RankStates, model: ModelStates, dense: ModelStates, layers: ExpertLayers
) -> Inventory:
    """The tensors out of flat groups: those of all ranks, and those that sets of ranks share."""
    indices = expert_groups(model, layers)
    dense, world_size = with_parameter_names(dense), _world_size(ranks, model) or 0
    owners, shapes = owners_of(ranks, world_size), model.param_shapes
    bound = bind_trained(owners, dense, is_zero3=ranks.is_zero3, shapes=shapes, others=indices)
    others = with_untrained(bound, ranks, dense, world_size)
    own = bind_experts(ranks, model, indices, world_size)
    every = [*bound, *(one for group in own.groups for one in group)]
    check_one_type(one.flat.dtype for one in every if one.flat is not None)
    trained = [one for group in own.groups for one in _number(group, layers)]
    aliases = expert_aliases(model, layers, {tensor.name for tensor in trained})
    known = {tensor.name for tensor in trained} | aliases.keys()
    copies = copies_in_files(trained, layers)
    stored = list(stored_experts(model, layers, known))
    of_experts = Inventory(
        tensors=(*trained, *stored),
        aliases=aliases,
        left_out=_nowhere(layers, [*trained, *stored]),
        replicas=(*copies, *frozen_twice(model, layers, stored)),
        warnings=own.warnings,
        flats=tuple(one.flat for group in own.groups for one in group if one.flat is not None),
    )
    return Inventory.joined([others, of_experts])


def _world_size(ranks: RankStates, model: ModelStates) -> int | None:
    """The number of ranks; where experts alone are trained, no flat group is shared by all."""
    stated = model.dp_world_size
    return stated if stated == len(ranks.optimizer) else ranks.world_size


def _nowhere(layers: ExpertLayers, found: Iterable[StoredTensor]) -> tuple[str, ...]:
    """Weights that AutoEP names and that no file holds: frozen experts under ZeRO-3."""
    known = {tensor.name for tensor in found}
    return tuple(name for name in layers.autoep if name not in known)


def _refuse_folded(model: ModelStates) -> None:
    if model.splits_experts:
        raise UnsupportedError(
            "holds experts that are split over tensor ranks as well",
            path=model.file.path,
            found="AutoEP folded with AutoTP",
            expected="expert parallelism without tensor parallelism",
            hint="Resume the run with autotp_size 1, save, and export that",
        )


def _number(ranks: Sequence[Bound], layers: ExpertLayers) -> Iterator[StoredTensor]:
    """The tensors that all expert-parallel ranks have of a group, by their names in the model."""
    for alike in zip(*(bound.tensors for bound in ranks), strict=True):
        layer = layers.autoep.get(alike[0].name)
        if layer is not None:
            yield _joined(alike, layer)
        else:
            yield from _renumbered(alike, layers)


def _renumbered(alike: Sequence[StoredTensor], layers: ExpertLayers) -> Iterator[StoredTensor]:
    """DeepSpeed-MoE: one tensor for each expert-parallel rank's expert of this local number."""
    local = alike[0].name
    name = parse_native(local)
    if name is None or name.prefix not in layers.native:
        raise LayoutError(f"no expert file holds {local!r}", "none", "one for each expert")
    shares = uniform(layers.native[name.prefix], len(alike))
    for share, tensor in zip(shares, alike, strict=True):
        if name.number >= len(share):
            raise LayoutError(
                f"{local!r} has a number that no expert of its rank has",
                name.number,
                f"less than {len(share)}",
            )
        yield replace(tensor, name=name.renumbered(share[name.number]))


def _joined(alike: Sequence[StoredTensor], layer: AutoEpLayer) -> StoredTensor:
    """AutoEP: the experts of all ranks as one tensor, in the order of their numbers."""
    first, held = alike[0], layer.held
    local = first.shape
    if len(held) != len(alike):
        raise LayoutError(
            f"{first.name!r} is on more or fewer ranks than its layer says",
            f"{len(alike)} expert-parallel ranks",
            len(held),
        )
    if not local or any(len(experts) != local[0] for experts in held):
        raise UnsupportedError(
            f"holds unequal numbers of the experts of {first.name!r} on its ranks",
            found=f"{[len(experts) for experts in held]} experts in tensors of {list(local)}",
            expected="as many on every expert-parallel rank",
            hint="Save again with equal shares of the experts",
        )
    sources = [tensor.source for tensor in alike if tensor.source is not None]
    whole = len(sources) == len(alike)
    source = Chain(tuple(in_expert_order(sources, layer))) if whole else None
    return replace(first, shape=(layer.num_experts, *local[1:]), source=source)


def copies_in_files(trained: Iterable[StoredTensor], layers: ExpertLayers) -> Iterator[CastReplica]:
    """The same weights in the expert files, as the module trained with them."""
    held = {
        name: (states.file, tensor)
        for files in layers.files.values()
        for states in files
        for name, tensor in states.tensors.items()
    }
    for tensor in trained:
        layer = layers.autoep.get(tensor.name)
        if layer is not None and layer.number not in layers.files:
            continue
        for name, part in [(tensor.name, tensor)] if layer is None else _slices(tensor):
            if name not in held or held[name][1].shape != part.shape:
                raise LayoutError(
                    f"the expert file of {name!r} does not hold what the flat groups hold",
                    held[name][1].shape if name in held else "no such weight",
                    part.shape,
                )
            yield from rounded_copy(part, *held[name], name)


def _slices(tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The experts one by one, under the names of their files: there may be any number of them."""
    shape = tensor.shape[1:]
    nbytes = prod(shape) * tensor.dtype.itemsize
    for number in range(tensor.shape[0]):
        source = tensor.source and Window(tensor.source, number * nbytes, nbytes)
        yield f"{tensor.name}.{number}", replace(tensor, shape=shape, source=source)


def stored_experts(
    model: ModelStates, layers: ExpertLayers, known: Set[str]
) -> Iterator[StoredTensor]:
    """The weights and buffers of experts that no optimizer trained: all but ``known``.

    Those of DeepSpeed-MoE are alike in all files of a layer: ``find_layers`` lets no other pass.
    """
    for name, layer in layers.autoep.items():
        if name not in known and layer.number in layers.files:
            shape, dtype, source = stack_slices(name, layers.files[layer.number])
            yield StoredTensor(name, shape, dtype, Role.FROZEN, source)
    stacked = {layer.number for layer in layers.autoep.values()}
    for number, files in layers.files.items():
        for states in files if number not in stacked else ():
            for name, tensor in states.tensors.items():
                if name not in known:
                    yield whole_tensor(states.file, name, tensor, _role(name, model))


def _role(name: str, model: ModelStates) -> Role:
    """``buffer_names`` mentions the experts of rank 0 alone, and all experts are built alike."""
    parsed = parse_native(name)
    local = parsed.renumbered(0) if parsed is not None else name
    return Role.BUFFER if local in model.buffer_names else Role.FROZEN


def expert_aliases(model: ModelStates, layers: ExpertLayers, known: Set[str]) -> dict[str, str]:
    """Names within an expert that are tied to ``known`` ones, for all experts of the layer."""
    aliases: dict[str, str] = {}
    for alias, target in model.shared_params.items():
        one, other = parse_native(alias), parse_native(target)
        if one is None and other is None:
            continue
        if one is None or other is None or (one.prefix, one.number) != (other.prefix, other.number):
            raise UnsupportedError(
                f"ties {alias!r} to {target!r} across experts",
                path=model.file.path,
                expected="ties within one expert",
                hint="Give each expert weights of its own and save again",
            )
        for number in range(layers.native.get(one.prefix, 0)):
            if other.renumbered(number) in known:
                aliases[one.renumbered(number)] = other.renumbered(number)
    return aliases


def frozen_twice(
    model: ModelStates, layers: ExpertLayers, stored: Iterable[StoredTensor]
) -> Iterator[Replica]:
    """The first rank's frozen experts, which the model file holds as well (ZeRO-2)."""
    for tensor in stored:
        fragment = model.frozen_fragments.get(tensor.name)
        if fragment is None or tensor.source is None:
            continue
        kept, layer = tensor.source, layers.autoep.get(tensor.name)
        if layer is not None:
            files = layers.files[layer.number]
            names = [(files[expert], f"{tensor.name}.{expert}") for expert in layer.held[0]]
            kept = Chain(tuple(one.file.source(one.tensors[name]) for one, name in names))
        other = model.file.source(fragment)
        if other.nbytes != kept.nbytes:
            raise LayoutError(
                f"the frozen weight {tensor.name!r} has two sizes", other.nbytes, kept.nbytes
            )
        yield Replica(tensor.name, kept, other)
