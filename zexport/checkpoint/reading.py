"""Reading one tag folder: all that its metadata says, with what is wrong with it gathered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from zexport.checkpoint.client_state import client_statements
from zexport.checkpoint.contents import (
    CheckpointFile,
    Inventory,
    Parallelism,
    Role,
    Structure,
    ZeroCheckpoint,
    finding_of,
)
from zexport.checkpoint.layouts.duplicate_files import copied_files
from zexport.checkpoint.layouts.structure import (
    assemble,
    disagreements,
    lacking_optimizer_files,
    missing_files,
    parallelism_of,
    recognise,
)
from zexport.checkpoint.location import Location
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.node_local import unite
from zexport.checkpoint.rank_files import (
    MODEL_FILES,
    RankFile,
    RankFileKind,
    name_ranks,
    rank_file_name,
)
from zexport.checkpoint.ranks import RankStates, Save, is_zero0, no_optimizer_files, read_ranks
from zexport.checkpoint.trainer_state import stated_beside
from zexport.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    UnsupportedError,
    ZexportError,
)
from zexport.facts.statements import judge
from zexport.formats.torch_file import Container, TorchFile
from zexport.ranges.extents import paths_of
from zexport.store.files import version
from zexport.store.folders import is_folder

now = time.time
_RECENT_SECONDS = 600
_WAIT = "if it is still being saved or copied, wait: files changed in the last minutes"


def read_checkpoint(locations: Sequence[Location]) -> ZeroCheckpoint:
    """One checkpoint, whose rank files lie in these tag folders, and what is wrong with it."""
    location = locations[0]
    for one in locations:  # before anything in them is read
        one.boundary.check_tree(one.tag_dir)
    files = unite(locations)
    cells = _read_cells(location.tag_dir, files)
    save = Save(location.tag_dir, files, cells)
    structure = recognise(save)
    problems = [p for cell in cells.values() for p in (*cell.problems, *copied_files(cell))]
    problems += [
        no_optimizer_files(save.tag_dir, index, cells[index].first_model)
        for index in lacking_optimizer_files(save, structure)
    ]
    problems += disagreements(save)
    inventory = Inventory((), {}, ())
    try:
        inventory = assemble(save, structure)
    except ZexportError as error:
        problems.append(swapped_out(save.tag_dir) or error)
    problems += inventory.problems
    if not (files or inventory.files or problems):
        problems.append(_no_files(save.tag_dir))
    problems += _missing_frozen(save, inventory)
    told = tuple(_unless_unfinished(problems, files))
    found = _describe(locations, save, structure, inventory, told)
    beside = judge((*stated_beside(found), *client_statements(found)), None)
    return replace(
        found,
        warnings=(*beside.warnings, *found.warnings),
        notes=(*found.notes, *beside.notes),
    )


def _read_cells(tag_dir: Path, files: Sequence[RankFile]) -> dict[int, RankStates]:
    """The states of the ranks of each model-parallel index."""
    plain = [file for file in files if file.kind in (RankFileKind.OPTIMIZER, *MODEL_FILES)]
    by_index = {
        index: [file for file in plain if file.mp_rank == index]
        for index in sorted({file.mp_rank for file in plain})
    }
    if is_folder(tag_dir / "zero"):
        by_index = {index: _whole_model_files(own) for index, own in by_index.items()}
    return {index: read_ranks(tag_dir, own) for index, own in by_index.items()}


def _whole_model_files(files: Sequence[RankFile]) -> list[RankFile]:
    """Of a universal checkpoint for all stages, without the model file that ZeRO-3 looks for."""
    if {file.kind for file in files} != {*MODEL_FILES}:
        return [*files]
    return [file for file in files if file.kind is RankFileKind.MODEL]


def _no_files(tag_dir: Path) -> ZexportError:
    return IncompleteCheckpointError(
        "has no rank file that is a file: its names are those of folders, or of links to nothing",
        path=tag_dir,
        hint="Copy the tag folder again, with what its links lead to",
    )


def _describe(
    locations: Sequence[Location],
    save: Save,
    structure: Structure,
    inventory: Inventory,
    problems: tuple[ZexportError, ...],
) -> ZeroCheckpoint:
    cells = save.cells
    cell = cells[min(cells)] if cells else RankStates({}, {}, False, None, (), (), ())
    model, optimizer = cell.first_model, cell.first_optimizer
    stage = _stage(cell, structure)
    parallelism = parallelism_of(save, structure)
    masters = [t for t in inventory.tensors if t.role is Role.TRAINABLE]
    missing_model_ranks = {rank for one in cells.values() for rank in one.missing_model_ranks}
    told = (found for p in problems if (found := finding_of(p)) and not found.kind.is_refused)
    torch_files = (*(file for one in cells.values() for file in one.files), *inventory.files)
    return ZeroCheckpoint(
        location=locations[0],
        layout=_layout(cells, structure, parallelism, stage),
        parallelism=parallelism,
        stage=stage,
        world_size=cell.world_size,
        ds_version=(model and model.ds_version) or (optimizer and optimizer.ds_version) or None,
        global_steps=model.global_steps if model is not None else None,
        optimizer=_optimizer_name(model),
        skipped_steps=model.skipped_steps if model is not None else 0,
        lr_step=model.lr_step if model is not None else None,
        module_dtype=inventory.module_dtype,
        cast_dtype=model.cast_dtype if model is not None else None,
        master_dtype=masters[0].dtype if masters else None,
        tensors=inventory.tensors,
        aliases=inventory.aliases,
        left_out=inventory.left_out,
        frozen_left_out=model is not None and model.frozen_shapes is None and stage in (2, 3),
        missing_ranks=_missing_ranks(cells, structure),
        missing_model_ranks=tuple(sorted(missing_model_ranks)),
        missing_files=missing_files(save, structure, parallelism, inventory),
        files=_describe_files(save, torch_files, inventory),
        torch_files=torch_files,
        replicas=inventory.replicas,
        flats=inventory.flats,
        problems=tuple(p for p in problems if p.finding is None or p.finding.is_refused),
        warnings=(*_steps(model), *_without_checksums(torch_files), *inventory.warnings),
        notes=(*_told_of(cells), *inventory.notes),
        newer=(),
        findings=tuple(told),
        cells=cells,
        structure=structure,
        parts=tuple(locations[1:]),
    )


def _missing_ranks(cells: Mapping[int, RankStates], structure: Structure) -> tuple[int, ...]:
    """Ranks whose optimizer file is not there; a conversion to universal takes none along."""
    if structure is Structure.UNIVERSAL:
        return ()
    return tuple(sorted({rank for cell in cells.values() for rank in cell.missing_ranks}))


def _stage(cell: RankStates, structure: Structure) -> int | None:
    """The ZeRO stage; BF16_Optimizer, which records none, is a form of ZeRO-1."""
    if is_zero0(cell):
        return 0
    if cell.first_optimizer is None:
        model = cell.first_model
        is_pipeline = structure is Structure.PIPELINE  # its weights are in layer files
        return 0 if is_pipeline and model is not None and not any(model.param_shapes) else None
    stage = cell.first_optimizer.stage
    return 1 if stage is None else stage


def _layout(
    cells: Mapping[int, RankStates],
    structure: Structure,
    parallelism: Parallelism,
    stage: int | None,
) -> str:
    """The layout in words: stage, optimizer where it matters, and how the model was split.

    Empty where the stage could not be read.
    """
    if structure is Structure.UNIVERSAL:
        return "universal checkpoint"
    if stage is None:
        return ""
    words = f"ZeRO-{stage}"
    optimizers = [c.first_optimizer for c in cells.values() if c.first_optimizer is not None]
    if optimizers and optimizers[0].stage is None:
        words += " (BF16_Optimizer)"
    if structure is Structure.DATA:
        return words
    return f"{words}, {', '.join(parallelism.words()) or structure.value}"


def _describe_files(
    save: Save, torch_files: Iterable[TorchFile], inventory: Inventory
) -> tuple[CheckpointFile, ...]:
    """The rank files, and those of no rank that were read: a universal checkpoint's parameters."""
    listed = {file.path for file in save.files}
    others = (file.path for file in inventory.files if file.path not in listed)
    files = (*save.files, *(RankFile(path, RankFileKind.PARAMETER) for path in others))
    opened = {torch_file.path: torch_file for torch_file in torch_files}
    read = paths_of(t.source for t in inventory.tensors if t.source is not None)
    return tuple(_describe_file(file, opened.get(file.path), read) for file in files)


def _describe_file(file: RankFile, opened: TorchFile | None, read: Set[Path]) -> CheckpointFile:
    holds_names = file.rank == 0 and file.kind in MODEL_FILES
    return CheckpointFile(
        path=file.path,
        kind=file.kind,
        rank=file.rank,
        nbytes=version(file.path).nbytes,
        needed=file.path in read or file.kind is RankFileKind.OPTIMIZER or holds_names,
        unknown_globals=opened.unknown_globals if opened is not None else (),
    )


def _optimizer_name(model: ModelStates | None) -> str | None:
    """The optimizer's name in the DeepSpeed configuration; a client's own optimizer has none."""
    config = model.ds_config.get("optimizer") if model is not None else None
    name = config.get("type") if isinstance(config, dict) else None
    return name if isinstance(name, str) else None


def _steps(model: ModelStates | None) -> Iterator[str]:
    """What is to be known of the steps of a checkpoint where none was taken."""
    if model is None or model.global_steps is None:
        return
    if 0 < model.global_steps <= model.skipped_steps:
        yield (
            f"no step was taken: all {model.global_steps:,} were skipped for an overflow, so these "
            "are the weights that training began from"
        )


def _told_of(cells: Mapping[int, RankStates]) -> Iterator[str]:
    for cell in cells.values():
        missing = [rank for rank in cell.missing_model_ranks if rank != 0]
        if missing:
            yield (
                f"the model files of {name_ranks(missing)} are missing; without frozen "
                "weights no value comes from them"
            )
    if any(one.is_pruned for cell in cells.values() for one in cell.optimizer.values()):
        yield (
            "the optimizer's states were removed (zexport prune): the weights are all there, and "
            "no training goes on from it"
        )


def _without_checksums(files: Iterable[TorchFile]) -> Iterator[str]:
    count = sum(file.container is Container.LEGACY for file in files)
    if count:
        yield (
            f"{count} file{'s are' if count > 1 else ' is'} in torch's old container, which has no "
            "checksums: values are exported as they are read, and a flipped bit shows nowhere"
        )


def _missing_frozen(save: Save, inventory: Inventory) -> Iterator[ZexportError]:
    """A missing model file matters where frozen weights are striped over all of them."""
    if not any(t.role is Role.FROZEN and t.source is None for t in inventory.tensors):
        return
    for index, cell in save.cells.items():
        missing = [rank for rank in cell.missing_model_ranks if rank != 0]
        if missing:
            name = rank_file_name(RankFileKind.MODEL_PER_RANK, missing[0], index)
            yield IncompleteCheckpointError(
                f"lacks the model files of {name_ranks(missing)}, which have parts of frozen "
                "weights",
                path=save.tag_dir,
                found=f"{len(cell.model)} of {cell.world_size} model files",
                expected=f"{name} and the like",
                hint="Copy them from the nodes that wrote them",
            )


def swapped_out(tag_dir: Path) -> UnsupportedError | None:
    """Lengths do not add up where the optimizer was swapped to NVMe: its tensors lie elsewhere.

    Source: DeepSpeed 0.19, ``runtime/zero/stage3.py`` (``offloaded_tensors`` in the tag folder).
    """
    swapped = tag_dir / "offloaded_tensors"
    if not is_folder(swapped):
        return None
    return UnsupportedError(
        "keeps the optimizer's tensors in NVMe swap files, which this version does not read",
        path=swapped,
        hint="Resume the run with the optimizer offloaded to the CPU, save, and export that",
    )


def _unless_unfinished(
    problems: Sequence[ZexportError], files: Sequence[RankFile]
) -> Iterator[ZexportError]:
    """The problems; that files are missing, or are not whole ones, may be a save that is going on.

    So may a copy that is; and files that were copied, whole or not, look the same (``latest`` tells
    nothing: rank 0 writes it before the other ranks are done). The clock of a storage may be ahead
    of this machine's.
    """
    times = {file.path: version(file.path).mtime_ns / 1e9 for file in files} if problems else {}
    is_recent = bool(times) and abs(now() - max(times.values())) < _RECENT_SECONDS
    for problem in problems:
        is_lacking = isinstance(problem, IncompleteCheckpointError) or problem.path in times
        if is_recent and is_lacking and isinstance(problem, CheckpointError):
            yield type(problem)(
                problem.problem,
                path=problem.path,
                found=problem.found,
                expected=problem.expected,
                hint=f"{problem.hint}; {_WAIT}" if problem.hint else _WAIT.capitalize(),
            )
        else:
            yield problem
