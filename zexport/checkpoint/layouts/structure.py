"""How a model was split, by its files' names and what they say, and which files that takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path

from zexport.checkpoint.agreement import stated_by_key, stated_by_rank, step_of
from zexport.checkpoint.contents import Inventory, Parallelism, Role
from zexport.checkpoint.rank_files import RankFile, RankFileKind, ranges_of, rank_file_name
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.states import MAX_DEGREE, ModelStates
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    ZexportError,
)
from zexport.facts import statements as facts
from zexport.facts.table import Fact
from zexport.formats.torch_file import TorchFile
from zexport.store.folders import is_folder

_MAX_NAMES = 100_000
"""Names that are given; a damaged file may claim any number of ranks."""


class Structure(Enum):
    """How the model was split, beside the data parallelism that there always is."""

    DATA = "data parallelism alone"
    TENSOR = "tensor parallelism"
    PIPELINE = "pipeline parallelism"
    EXPERTS = "expert parallelism"
    UNIVERSAL = "none: converted to a universal checkpoint"


def models_of(cells: Mapping[int, RankStates]) -> dict[int, ModelStates]:
    """The model states of every model-parallel index that has some, in order."""
    found = {index: cell.first_model for index, cell in sorted(cells.items())}
    return {index: model for index, model in found.items() if model is not None}


def recognise(
    tag_dir: Path, files: Iterable[RankFile], cells: Mapping[int, RankStates]
) -> Structure:
    """The structure of the checkpoint in ``tag_dir``."""
    kinds = {file.kind for file in files}
    models = models_of(cells).values()
    optimizers = [cell.first_optimizer for cell in cells.values()]
    if is_folder(tag_dir / "zero") and RankFileKind.OPTIMIZER not in kinds:
        return Structure.UNIVERSAL
    if RankFileKind.PIPELINE_LAYER in kinds:
        return Structure.PIPELINE
    if kinds & {RankFileKind.EXPERT, RankFileKind.EXPERT_OPTIMIZER} or (
        any(model.has_experts for model in models)
        or any(states is not None and states.stripes_experts for states in optimizers)
    ):
        return Structure.EXPERTS
    if max(cells, default=0) > 0 or any(model.tensor_parallel > 1 for model in models):
        return Structure.TENSOR
    return Structure.DATA


def lacking_optimizer_files(
    structure: Structure, files: Iterable[RankFile], cells: Mapping[int, RankStates]
) -> list[int]:
    """The model-parallel indices without any of the optimizer files that their weights lie in.

    Wherever ZeRO holds weights, ``param_shapes`` names them; under ZeRO-0 it is ``None``. Only a
    conversion to universal moves them elsewhere.
    """
    if structure is Structure.UNIVERSAL:
        return []
    written = {file.mp_rank for file in files if file.kind is RankFileKind.OPTIMIZER}
    models = {i: model for i, model in models_of(cells).items() if i not in written}
    return [index for index, model in models.items() if any(model.param_shapes)]


def parallelism_of(
    structure: Structure, files: Sequence[RankFile], cells: Mapping[int, RankStates]
) -> Parallelism:
    """The degrees that a checkpoint states; ones where it says nothing that can be read."""
    models = [*models_of(cells).values()]
    if structure in (Structure.DATA, Structure.UNIVERSAL) or not models:
        return Parallelism()
    try:
        if structure is Structure.TENSOR:
            return Parallelism(tensor_ranks=max(models[0].tensor_parallel, len(cells)))
        if structure is Structure.PIPELINE:
            return _stages(models[0], files)
        return _experts(models, files)
    except (ZexportError, LayoutError):  # assembling tells it as a problem
        return Parallelism()


def _stages(model: ModelStates, files: Sequence[RankFile]) -> Parallelism:
    grid = model.grid
    if grid is not None:
        return Parallelism(grid.stages, grid.tensor)
    tensor = max((file.tensor_rank for file in files), default=0) + 1
    return Parallelism(max(model.tensor_parallel // tensor, 1), tensor)


def _experts(models: Sequence[ModelStates], files: Sequence[RankFile]) -> Parallelism:
    from zexport.checkpoint.layouts.expert_layers import (  # noqa: PLC0415
        read_autoep_layers,
    )

    grid = models[0].grid
    layers = [layer for model in models for layer in read_autoep_layers(model)]
    degrees = {len(layer.held) for layer in layers}
    if not layers:
        degrees = set(_native_degrees(models[0], files))
    return Parallelism(
        stages=grid.stages if grid is not None else 1,
        tensor_ranks=grid.tensor if grid is not None else 1,
        expert_ranks=tuple(sorted(degrees)),
        experts=tuple(count for model in models for count in model.num_experts),
    )


def _native_degrees(model: ModelStates, files: Sequence[RankFile]) -> Iterator[int]:
    """DeepSpeed-MoE: an optimizer file for every expert rank, or the share that one rank names."""
    from zexport.checkpoint.layouts.expert_layers import (  # noqa: PLC0415
        parse_native,
    )

    ranks = [file.rank for file in files if file.kind is RankFileKind.EXPERT_OPTIMIZER]
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


def missing_files(
    structure: Structure,
    parallelism: Parallelism,
    files: Sequence[RankFile],
    cells: Mapping[int, RankStates],
    inventory: Inventory,
) -> tuple[str, ...]:
    """Names of the rank files that an export needs and that are not there.

    Model files but the first of ZeRO-3 are needed for their parts of frozen weights alone.
    """
    there = {file.path.name for file in files}
    needed = _needed(structure, parallelism, files, cells, inventory)
    return tuple(islice((name for name in needed if name not in there), _MAX_NAMES))


def _needed(
    structure: Structure,
    parallelism: Parallelism,
    files: Sequence[RankFile],
    cells: Mapping[int, RankStates],
    inventory: Inventory,
) -> Iterator[str]:
    known = [cell.world_size for cell in cells.values() if cell.world_size is not None]
    world = range(max(known, default=1))
    has_stripes = any(t.role is Role.FROZEN and t.source is None for t in inventory.tensors)
    per_rank = any(cell.is_zero3 for cell in cells.values())
    has_masters = any(cell.optimizer or cell.missing_ranks for cell in cells.values())
    prefix = next((file.prefix for file in files if file.prefix), "")
    kind = RankFileKind.MODEL_PER_RANK if per_rank else RankFileKind.MODEL
    for index in range(parallelism.stages * parallelism.tensor_ranks) if cells else ():
        if has_masters and structure is not Structure.UNIVERSAL:
            for rank in world:
                yield rank_file_name(RankFileKind.OPTIMIZER, rank, index, prefix=prefix)
        for rank in world if per_rank and has_stripes else (0,):
            yield rank_file_name(kind, rank, index)


def check_cells(tag_dir: Path, cells: Mapping[int, RankStates], count: int, what: str) -> None:
    """Refuse a grid in which cells are missing or in excess."""
    if count > MAX_DEGREE:
        raise DamagedCheckpointError(
            f"records an impossible number of {what}",
            path=tag_dir,
            found=count,
            expected=f"1 to {MAX_DEGREE}",
            hint="Copy the model files again",
        )
    have = models_of(cells).keys()
    missing = sorted(set(range(count)) - have)
    if missing:
        name = rank_file_name(RankFileKind.MODEL, mp_rank=missing[0])
        raise IncompleteCheckpointError(
            f"lacks the model files of {what} {ranges_of(missing)}",
            path=tag_dir,
            found=f"{what} {ranges_of(have)}",
            expected=f"{count} of them, *{name} and the like",
            hint="Copy them from the nodes that wrote them",
        )
    if surplus := sorted(set(cells) - set(range(count))):
        raise DamagedCheckpointError(
            f"has files of {what} {ranges_of(surplus)}, more than it records",
            path=tag_dir,
            found=f"{len(cells)} model-parallel indices",
            expected=count,
            hint="Remove what another save left here",
        )


def disagreements(tag_dir: Path, cells: Mapping[int, RankStates]) -> Iterator[ZexportError]:
    """Facts that every model-parallel index of one save states alike, and these do not."""
    models = models_of(cells)
    steps = {i: step_of(one) for i in models if (one := cells[i].first_optimizer) is not None}
    stated: list[tuple[Fact, Mapping[int, object]]] = [
        (Fact.GLOBAL_STEP, {i: m.global_steps for i, m in models.items()}),
        (Fact.OPTIMIZER_STEP, steps),
        (Fact.DEEPSPEED_VERSION, {i: m.ds_version for i, m in models.items()}),
        (Fact.SCHEDULE, {i: m.lr_step for i, m in models.items()}),
        (Fact.SKIPPED_STEPS, {i: m.skipped_steps for i, m in models.items()}),
        (Fact.CELL_WORLD_SIZE, {i: cells[i].world_size for i in models}),
        (Fact.STAGE, {i: cells[i].is_zero3 for i in models}),
    ]
    files: dict[str | int, TorchFile] = {
        i: one.file for i in models if (one := cells[i].first_optimizer) is not None
    }
    trained = stated_by_key(files, (Fact.CONFIG, Fact.LOSS_SCALE))
    for found in facts.disagreements((*stated_by_rank(stated), *trained)):
        yield found.error(tag_dir, _name_cells)


def _name_cells(cells: Iterable[int]) -> str:
    return f"model-parallel ranks {ranges_of(cells)}"
