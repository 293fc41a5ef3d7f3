"""DeepSpeed checkpoints as a source: from the files of a tag folder to a TrainingState."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from zexport.checkpoint.boxes import replicas_of
from zexport.checkpoint.state import (
    MODULE,
    Cell,
    CheckpointFile,
    FileKind,
    Parallelism,
    Role,
    Structure,
    TrainingState,
    finding_of,
    stored_tensors,
)
from zexport.checkpoint.zero.consistency import check_consistency, find_duplicates
from zexport.checkpoint.zero.file_names import (
    MODEL_FILES,
    RankFile,
    name_ranks,
    parse_name,
    rank_file_name,
    rank_files,
)
from zexport.checkpoint.zero.flat_groups import zero_cell
from zexport.checkpoint.zero.ranks import (
    FROM_NODES,
    Ranks,
    TagFolder,
    check_grid,
    no_model,
    no_optimizer,
    read_ranks,
)
from zexport.checkpoint.zero.records import model_states
from zexport.errors import IncompleteCheckpointError, UnsupportedError, ZexportError, layout_of
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.source import paths_of
from zexport.storage.files import children, is_folder, matching, version

# ruff: noqa: PLC0415 - most checkpoints need one of the layouts

if TYPE_CHECKING:
    from zexport.checkpoint.resolve import Location
    from zexport.storage.symlink_policy import Boundary

_MISSING_MAX = 100_000
"""Limit for missing files that are listed; a damaged file may record any number of ranks."""

Cells = Callable[[], tuple[Cell, ...]]


def holds_checkpoint(folder: Path) -> bool:
    """Return whether a folder has rank files, or those of a universal checkpoint."""
    return any(map(parse_name, children(folder))) or bool(matching(folder / "zero", "*/fp32.pt"))


def zero_step(folder: Path, boundary: Boundary) -> int | None:
    """Return the global step in a model states file; ``None`` if it cannot be read."""
    files = [one.path for one in rank_files(folder) if one.kind in MODEL_FILES]
    if not files or not boundary.holds(files[0]):
        return None
    try:
        return model_states(read_torch_file(files[0])).steps
    except ZexportError:  # raised again when this checkpoint is opened
        return None


def read_checkpoint(locations: Sequence[Location]) -> TrainingState:
    """Read the metadata of a checkpoint; several locations have its parts on several nodes."""
    for one in locations:  # before anything in them is read
        one.boundary.check_tree(one.tag_dir)
    path, problems = locations[0].tag_dir, list[ZexportError]()
    files = rank_files(*(one.tag_dir for one in locations))
    kinds = {one.kind for one in files}
    is_universal = is_folder(path / "zero") and FileKind.OPTIMIZER not in kinds
    of_ranks = [one for one in files if one.kind in (FileKind.OPTIMIZER, *MODEL_FILES)]
    if is_universal and FileKind.MODEL in kinds:
        # Converted for all stages: only ZeRO-3 loads the other one, which has no weights.
        of_ranks = [one for one in of_ranks if one.kind is FileKind.MODEL]
    indices = sorted({one.mp for one in of_ranks})
    ranks = {index: read_ranks(path, index, of_ranks, problems) for index in indices}
    tag = TagFolder(path, files, ranks)
    structure = Structure.UNIVERSAL if is_universal else _structure(tag)
    written = {one.mp for one in tag.of_kind(FileKind.OPTIMIZER)}
    for index, model in tag.models.items():
        if index not in written and any(model.param_shapes) and not is_universal:
            problems.append(no_optimizer(path, index))
    problems += check_consistency(ranks)
    more, first = tuple(locations[1:]), locations[0]
    state = TrainingState(first, "", Cell({}), zero=ranks, structure=structure, parts=more)
    try:
        with layout_of(path):
            state = replace(state, parallelism=_parallelism(tag, structure))
            joined, cells = _assemble(tag, structure)
            whole = _without_shards(joined)
            state = replace(
                state,
                whole=whole,
                tensors=stored_tensors(whole),
                replicas=tuple(replicas_of(whole)),
                split=lambda: _split(tag, cells),
            )
            problems += (*whole.problems, *chain(*map(find_duplicates, ranks.values())))
    except ZexportError as error:
        problems.append(error)
    missing = {rank for own in ranks.values() for rank in own.missing_model_ranks if rank != 0}
    if missing and any(one.role is Role.FROZEN and one.source is None for one in state.tensors):
        what = f"model states files of {name_ranks(missing)} are missing, which have frozen weights"
        problems.append(IncompleteCheckpointError(what, path=path, hint=FROM_NODES))
    elif missing:
        what = f"model states files of {name_ranks(missing)} are missing: resuming needs them"
        state = replace(state, notes=(what,))
    if problems and (swapped := _swapped_out(tag)):
        problems = [swapped]
    refused = [one for one in problems if one.finding is None or one.finding.is_refused]
    found = (finding_of(one) for one in problems if one not in refused)
    return replace(
        _described(state, tag),
        problems=tuple(refused),
        findings=tuple(finding for finding in found if finding is not None),
    )


def _split(tag: TagFolder, cells: Cells) -> tuple[Cell, ...]:
    if swapped := _swapped_out(tag):
        raise swapped
    with layout_of(tag.path):
        return cells()


def _swapped_out(tag: TagFolder) -> UnsupportedError | None:
    swapped = tag.path / "offloaded_tensors"  # DeepSpeed 0.19, runtime/zero/stage3.py
    if not is_folder(swapped):
        return None
    return UnsupportedError(
        "optimizer tensors are in NVMe swap files, which zexport does not read",
        path=swapped,
        hint="Resume with the optimizer offloaded to the CPU, and save again",
    )


def _structure(tag: TagFolder) -> Structure:
    kinds, models = {one.kind for one in tag.files}, tag.models.values()
    if FileKind.PIPELINE_LAYER in kinds:
        return Structure.PIPELINE
    of_experts = kinds & {FileKind.EXPERT, FileKind.EXPERT_OPTIMIZER}
    if of_experts or any(one.has_experts for one in models):
        return Structure.EXPERTS
    if max(tag.ranks, default=0) > 0 or any(model.mp_world_size > 1 for model in models):
        return Structure.TENSOR
    return Structure.DATA


def _parallelism(tag: TagFolder, structure: Structure) -> Parallelism:
    if structure in (Structure.DATA, Structure.UNIVERSAL) or not tag.models:
        return Parallelism()
    if structure is not Structure.EXPERTS:
        return tag.grid
    from zexport.checkpoint.zero.experts import expert_sizes

    counts = tuple(count for model in tag.models.values() for count in model.num_experts)
    return replace(tag.grid, expert_ranks=expert_sizes(tag), experts=counts)


def _assemble(tag: TagFolder, structure: Structure) -> tuple[Cell, Cells]:
    """Return all parameters joined, and a function that returns the cells of the ranks."""
    if not (tag.files if structure is Structure.DATA else tag.models):
        raise no_model(tag.path)
    if structure is Structure.UNIVERSAL:
        from zexport.checkpoint.zero.universal import read_universal

        return read_universal(tag)
    if structure is Structure.EXPERTS:
        from zexport.checkpoint.zero.experts import read_experts

        return read_experts(tag)
    if structure is Structure.PIPELINE or (structure is Structure.TENSOR and tag.grid.stages > 1):
        from zexport.checkpoint.zero.pipeline import read_pipeline

        return read_pipeline(tag)
    cells = [_cell(tag.ranks[index]) for index in tag.models]
    if structure is Structure.DATA:
        return cells[0] if cells else Cell({}), lambda: tuple(cells)
    from zexport.checkpoint.zero.tensor_parallel import join_tensor_ranks

    check_grid(tag, tag.grid.tensor_ranks, "tensor ranks")
    return join_tensor_ranks([*tag.models.values()], cells), lambda: tuple(cells)


def _cell(ranks: Ranks) -> Cell:
    if not ranks.is_zero0:
        return zero_cell(ranks)
    from zexport.checkpoint.zero.stage0 import zero0_cell

    return zero0_cell(ranks)


def _without_shards(cell: Cell) -> Cell:
    """Return the cell without frozen weights of which only the first rank's shard was saved.

    Next to an adapter such a shard is flat (DeepSpeed 0.19, ``linear/optimized_linear.py``,
    ``base_weight_sharding``).
    """
    known, adapter = cell.parameters, "lora_weight_1.weight"
    bases = [f"{n.removesuffix(adapter)}weight" for n in known if n.endswith(adapter)]
    shards = {name for name in bases if name in known and len(known[name].shape) == 1}
    kept = {name: one for name, one in known.items() if name not in shards}
    return replace(cell, parameters=kept, left_out=(*cell.left_out, *sorted(shards)))


def _described(state: TrainingState, tag: TagFolder) -> TrainingState:
    """Return the state with its layout, steps, dtypes, files and warnings."""
    ranks, structure, stage, kind = [*tag.ranks.values()], state.structure, None, ""
    model = next(iter(tag.models.values()), None)
    optimizer = next((one.first_optimizer for one in ranks if one.optimizer), None)
    if optimizer is not None and optimizer.stage is None:
        stage, kind = 1, " (BF16_Optimizer)"
    elif optimizer is not None:
        stage = optimizer.stage
    elif model and (ranks[0].is_zero0 or structure is Structure.PIPELINE):
        stage = None if any(model.param_shapes) else 0
    layout = "" if stage is None else ", ".join((f"ZeRO-{stage}{kind}", *state.parallelism.words()))
    module, buffers = (model.module, {*model.buffers}) if model else ({}, {*()})
    dtypes = [ref.dtype for name, ref in module.items() if name not in buffers]
    if structure is Structure.PIPELINE:
        dtypes = [one.dtype_of(MODULE) for one in state.parameters.values() if one.has(MODULE)]
    counted = Counter(one for one in dtypes if one.is_floating and state.parameters)
    every = (*(file for one in ranks for file in one.files), *state.whole.files)
    opened = {file.path: file for file in every}
    pruned = {one.file.path for own in ranks for one in own.optimizer.values() if one.is_pruned}
    notes = ("pruned checkpoint: training cannot resume from it",) if pruned else ()
    missing = {rank for one in ranks for rank in one.missing_ranks}
    warnings = []
    if model is not None:
        config = model.config.get("optimizer")
        name = config.get("type") if isinstance(config, dict) else None
        state = replace(
            state,
            global_steps=model.steps,
            skipped_steps=model.skipped_steps,
            optimizer=name if isinstance(name, str) else None,
            lr_step=model.lr_step,
            cast_dtype=model.cast_dtype,
            frozen_left_out=model.frozen_shapes is None and stage in (2, 3),
        )
        if 0 < (model.steps or 0) <= model.skipped_steps:
            warnings.append("all optimizer steps were skipped, so these are the initial weights")
    if any(file.is_legacy for file in every):
        warnings.append("legacy torch files have no checksums; flipped bits cannot be detected")
    return replace(
        state,
        layout="universal checkpoint" if structure is Structure.UNIVERSAL else layout,
        stage=stage,
        world_size=next((one.world_size for one in ranks), None),
        ds_version=next((one.version for one in (model, optimizer) if one and one.version), None),
        module_dtype=max(counted, key=counted.__getitem__, default=None),
        missing_ranks=() if structure is Structure.UNIVERSAL else tuple(sorted(missing)),
        missing_model_ranks=tuple(sorted({r for one in ranks for r in one.missing_model_ranks})),
        missing_files=tuple(islice(_missing_files(state, tag), _MISSING_MAX)),
        files=tuple(_files(state, tag, opened)),
        torch_files=tuple(opened.values()),
        pruned_files=frozenset(pruned),
        warnings=(*warnings, *state.whole.warnings),
        notes=(*state.notes, *notes, *state.whole.notes),
    )


def _missing_files(state: TrainingState, tag: TagFolder) -> Iterator[str]:
    """Yield names of missing rank files that an export needs.

    ZeRO-3's model states files except the first are needed only for frozen weights.
    """
    ranks, there = tag.ranks.values(), {one.path.name for one in tag.files}
    world = range(max((one.world_size or 1 for one in ranks), default=0))
    is_partitioned = any(one.role is Role.FROZEN and one.source is None for one in state.tensors)
    has_optimizer = any(one.optimizer or one.missing_ranks for one in ranks)
    per_rank = any(one.is_zero3 for one in ranks)
    prefix = next((one.prefix for one in tag.files if one.prefix), "")
    for index in range(state.parallelism.stages * state.parallelism.tensor_ranks):
        for rank in world:
            optimizer = rank_file_name(FileKind.OPTIMIZER, rank, index, prefix=prefix)
            if has_optimizer and state.structure is not Structure.UNIVERSAL:
                yield from {optimizer} - there
            if rank == 0 or (per_rank and is_partitioned):
                yield from {rank_file_name(MODEL_FILES[per_rank], rank, index)} - there


def _files(
    state: TrainingState, tag: TagFolder, opened: Mapping[Path, TorchFile]
) -> Iterator[CheckpointFile]:
    """Yield the rank files, and the parameter files of a universal checkpoint."""
    listed = {one.path for one in tag.files}
    others = (RankFile(path, FileKind.PARAMETER) for path in opened if path not in listed)
    read = paths_of(one.source for one in state.tensors if one.source is not None)
    for one in (*tag.files, *others):
        is_first = one.rank == 0 and one.kind in MODEL_FILES
        yield CheckpointFile(
            path=one.path,
            kind=one.kind,
            rank=one.rank,
            nbytes=version(one.path).nbytes,
            needed=one.path in read or one.kind is FileKind.OPTIMIZER or is_first,
            unknown_globals=opened[one.path].unknown_globals if one.path in opened else (),
        )
