"""How a model was split; and by that which files it takes, and every tensor of it, whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Parallelism, Role, StoredTensor, Structure
from zexport.checkpoint.layouts.zero import module_dtype, take_inventory
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.rank_files import RankFile, RankFileKind, ranges_of, rank_file_name
from zexport.checkpoint.ranks import Save, is_zero0
from zexport.checkpoint.same_save import stated_by_key, stated_by_rank, step_of
from zexport.errors import DamagedCheckpointError, LayoutError, ZexportError
from zexport.facts import statements as facts
from zexport.facts.training import TrainingFact
from zexport.formats.torch_file import TorchFile
from zexport.store.folders import is_folder

_MAX_NAMES = 100_000
"""Names that are given; a damaged file may claim any number of ranks."""

_ADAPTER, _OTHER = "lora_weight_1.weight", "lora_weight_2.weight"

_HINTS = {
    Structure.TENSOR: "Copy the rank files of all tensor ranks again",
    Structure.PIPELINE: "Copy the rank files and layer files of all stages again",
    Structure.UNIVERSAL: "Convert the checkpoint again with DeepSpeed's ds_to_universal, or export "
    "its source",
}
"""What to do where the numbers of a layout contradict each other."""


def recognise(save: Save) -> Structure:
    """The structure of a checkpoint."""
    kinds = {file.kind for file in save.files}
    models = save.models.values()
    optimizers = [cell.first_optimizer for cell in save.cells.values()]
    if is_folder(save.tag_dir / "zero") and RankFileKind.OPTIMIZER not in kinds:
        return Structure.UNIVERSAL
    if RankFileKind.PIPELINE_LAYER in kinds:
        return Structure.PIPELINE
    if kinds & {RankFileKind.EXPERT, RankFileKind.EXPERT_OPTIMIZER} or (
        any(model.has_experts for model in models)
        or any(states is not None and states.stripes_experts for states in optimizers)
    ):
        return Structure.EXPERTS
    if max(save.cells, default=0) > 0 or any(model.tensor_parallel > 1 for model in models):
        return Structure.TENSOR
    return Structure.DATA


def lacking_optimizer_files(save: Save, structure: Structure) -> list[int]:
    """The model-parallel indices without any of the optimizer files that their weights lie in.

    Wherever ZeRO holds weights, ``param_shapes`` names them; under ZeRO-0 it is ``None``. Only a
    conversion to universal moves them elsewhere.
    """
    if structure is Structure.UNIVERSAL:
        return []
    written = {file.mp_rank for file in save.of_kind(RankFileKind.OPTIMIZER)}
    models = {i: model for i, model in save.models.items() if i not in written}
    return [index for index, model in models.items() if any(model.param_shapes)]


def parallelism_of(save: Save, structure: Structure) -> Parallelism:
    """The degrees that a checkpoint states; ones where it says nothing that can be read."""
    models = [*save.models.values()]
    if structure in (Structure.DATA, Structure.UNIVERSAL) or not models:
        return Parallelism()
    try:
        if structure is Structure.TENSOR:
            return Parallelism(tensor_ranks=max(models[0].tensor_parallel, len(save.cells)))
        if structure is Structure.PIPELINE:
            return _stages(models[0], save.files)
        return _experts(models, save)
    except (ZexportError, LayoutError):  # assembling tells it as a problem
        return Parallelism()


def _stages(model: ModelStates, files: Sequence[RankFile]) -> Parallelism:
    grid = model.grid
    if grid is not None:
        return Parallelism(grid.stages, grid.tensor)
    tensor = max((file.tensor_rank for file in files), default=0) + 1
    return Parallelism(max(model.tensor_parallel // tensor, 1), tensor)


def _experts(models: Sequence[ModelStates], save: Save) -> Parallelism:
    from zexport.checkpoint.layouts.expert_layers import (  # noqa: PLC0415
        read_autoep_layers,
    )

    grid = models[0].grid
    layers = [layer for model in models for layer in read_autoep_layers(model)]
    degrees = {len(layer.held) for layer in layers}
    if not layers:
        degrees = set(_native_degrees(models[0], save))
    return Parallelism(
        stages=grid.stages if grid is not None else 1,
        tensor_ranks=grid.tensor if grid is not None else 1,
        expert_ranks=tuple(sorted(degrees)),
        experts=tuple(count for model in models for count in model.num_experts),
    )


def _native_degrees(model: ModelStates, save: Save) -> Iterator[int]:
    """DeepSpeed-MoE: an optimizer file for every expert rank, or the share that one rank names."""
    from zexport.checkpoint.layouts.expert_layers import (  # noqa: PLC0415
        parse_native,
    )

    ranks = [file.rank for file in save.of_kind(RankFileKind.EXPERT_OPTIMIZER)]
    if ranks:
        yield max(ranks) + 1
        return
    named = [parse_native(name) for group in model.param_shapes for name in group]
    held: dict[str, set[int]] = {}
    for name in named:
        if name is not None:
            held.setdefault(name.prefix, set()).add(name.number)
    for count, own in zip(model.num_experts, held.values(), strict=False):
        yield count // len(own)


def assemble(save: Save, structure: Structure) -> Inventory:
    """Every tensor of a checkpoint, whole."""
    try:
        inventory = _by_structure(save, structure)
    except LayoutError as error:
        raise DamagedCheckpointError(
            error.problem,
            path=save.tag_dir,
            found=error.found,
            expected=error.expected,
            hint=error.hint or _HINTS.get(structure, "Copy all rank files of one save again"),
        ) from error
    if parts := {*_shared_out(inventory.tensors)}:
        whole = tuple(one for one in inventory.tensors if one.name not in parts)
        left_out = (*inventory.left_out, *sorted(parts))
        inventory = replace(inventory, tensors=whole, left_out=left_out)
    model = next(iter(save.models.values()), None)
    if structure is Structure.PIPELINE or model is None:
        return inventory
    return replace(inventory, module_dtype=module_dtype(model))


def _shared_out(tensors: Sequence[StoredTensor]) -> Iterator[str]:
    """Frozen weights of which the files have the first rank's part alone: adapters tell their size.

    Source: DeepSpeed 0.19, ``linear/optimized_linear.py`` (``base_weight_sharding``).
    """
    adapted = [one for one in tensors if one.name.endswith(_ADAPTER)]
    shapes = {one.name: one.shape for one in tensors} if adapted else {}
    for adapter in adapted:
        module = adapter.name.removesuffix(_ADAPTER)
        match (shapes.get(f"{module}weight"), adapter.shape, shapes.get(f"{module}{_OTHER}")):
            case (numel,), (_, inputs), (outputs, _) if numel < inputs * outputs:
                yield f"{module}weight"


def _by_structure(save: Save, structure: Structure) -> Inventory:
    """Each structure imports its own code: the commonest, data parallelism, starts without it."""
    match structure:
        case Structure.UNIVERSAL:
            from zexport.checkpoint.layouts.universal import take_universal  # noqa: PLC0415

            return take_universal(save)
        case Structure.PIPELINE:
            from zexport.checkpoint.layouts.pipeline import join_stages  # noqa: PLC0415

            return join_stages(save)
        case Structure.EXPERTS:
            from zexport.checkpoint.layouts.experts import take_experts  # noqa: PLC0415

            return take_experts(save)
        case Structure.TENSOR:
            from zexport.checkpoint.layouts.tensor_parallel import (  # noqa: PLC0415
                join_tensor_ranks,
            )

            return join_tensor_ranks(save, _take_each(save))
        case Structure.DATA:
            return next(iter(_take_each(save).values()), Inventory((), {}, ()))


def _take_each(save: Save) -> dict[int, Inventory]:
    """The tensors of every model-parallel index whose names are known."""
    models, cells = save.models, save.cells
    whole = {index: model for index, model in models.items() if is_zero0(cells[index])}
    sharded = {
        index: take_inventory(cells[index], model)
        for index, model in models.items()
        if index not in whole
    }
    return sharded | (_take_zero0(whole) if whole else {})


def _take_zero0(models: Mapping[int, ModelStates]) -> dict[int, Inventory]:
    """Each rank's tensors; a weight without a master on one rank goes without on all of them."""
    from zexport.checkpoint.layouts.zero0 import (  # noqa: PLC0415
        lacking_masters,
        take_zero0_inventory,
    )

    taken = {index: take_zero0_inventory(model) for index, model in models.items()}
    lacking = {name for one in taken.values() for name in lacking_masters(one)}
    uneven = {
        index
        for index, one in taken.items()
        if any(replica.name in lacking for replica in one.replicas)
    }
    return taken | {
        index: take_zero0_inventory(models[index], unmastered=lacking) for index in uneven
    }


def missing_files(
    save: Save, structure: Structure, parallelism: Parallelism, inventory: Inventory
) -> tuple[str, ...]:
    """Names of the rank files that an export needs and that are not there.

    Model files but the first of ZeRO-3 are needed for their parts of frozen weights alone.
    """
    there = {file.path.name for file in save.files}
    needed = _needed(save, structure, parallelism, inventory)
    return tuple(islice((name for name in needed if name not in there), _MAX_NAMES))


def _needed(
    save: Save, structure: Structure, parallelism: Parallelism, inventory: Inventory
) -> Iterator[str]:
    cells = save.cells
    known = [cell.world_size for cell in cells.values() if cell.world_size is not None]
    world = range(max(known, default=1))
    has_stripes = any(t.role is Role.FROZEN and t.source is None for t in inventory.tensors)
    per_rank = any(cell.is_zero3 for cell in cells.values())
    has_masters = any(cell.optimizer or cell.missing_ranks for cell in cells.values())
    prefix = next((file.prefix for file in save.files if file.prefix), "")
    kind = RankFileKind.MODEL_PER_RANK if per_rank else RankFileKind.MODEL
    for index in range(parallelism.stages * parallelism.tensor_ranks) if cells else ():
        if has_masters and structure is not Structure.UNIVERSAL:
            for rank in world:
                yield rank_file_name(RankFileKind.OPTIMIZER, rank, index, prefix=prefix)
        for rank in world if per_rank and has_stripes else (0,):
            yield rank_file_name(kind, rank, index)


def disagreements(save: Save) -> Iterator[ZexportError]:
    """Facts that every model-parallel index of one save states alike, and these do not."""
    models, cells = save.models, save.cells
    steps = {i: step_of(one) for i in models if (one := cells[i].first_optimizer) is not None}
    stated: list[tuple[TrainingFact, Mapping[int, object]]] = [
        (TrainingFact.GLOBAL_STEP, {i: m.global_steps for i, m in models.items()}),
        (TrainingFact.OPTIMIZER_STEP, steps),
        (TrainingFact.DEEPSPEED_VERSION, {i: m.ds_version for i, m in models.items()}),
        (TrainingFact.SCHEDULE, {i: m.lr_step for i, m in models.items()}),
        (TrainingFact.SKIPPED_STEPS, {i: m.skipped_steps for i, m in models.items()}),
        (TrainingFact.CELL_WORLD_SIZE, {i: cells[i].world_size for i in models}),
        (TrainingFact.STAGE, {i: cells[i].is_zero3 for i in models}),
    ]
    files: dict[str | int, TorchFile] = {
        i: one.file for i in models if (one := cells[i].first_optimizer) is not None
    }
    trained = stated_by_key(files, (TrainingFact.CONFIG, TrainingFact.LOSS_SCALE))
    for found in facts.disagreements((*stated_by_rank(stated), *trained)):
        yield found.error(save.tag_dir, lambda cells: f"model-parallel ranks {ranges_of(cells)}")
