"""Opening a checkpoint: from a path to all that its metadata says, with what is wrong gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from zexport.archive import TorchFile
from zexport.checkpoint import CheckpointFile, Role, ZeroCheckpoint
from zexport.errors import (
    IncompleteCheckpointError,
    UnsupportedError,
    ZexportError,
)
from zexport.location import Location, locate, locate_all
from zexport.rank_files import RankFile, RankFileKind, list_rank_files, ranges_of
from zexport.ranks import RankStates, read_ranks
from zexport.states import ModelStates, OptimizerStates
from zexport.tensors import Inventory, module_dtype, take_inventory

NEWEST = "newest"
"""The value of ``--tag`` that asks for the newest complete tag."""


def open_checkpoint(path: Path | str, *, tag: str | None = None) -> ZeroCheckpoint:
    """The checkpoint that ``path`` and ``tag`` mean, from metadata alone.

    Args:
        path: any level: a run's folder, the folder with ``latest``, or a tag folder.
        tag: name of the tag; ``newest`` for the newest without problems (the newest, if all have
            some); ``None`` takes it from the level given or ``latest``.

    Guarantees that no tensor data is read, but for one scalar a rank file, and that no code of the
    checkpoint runs. What stands in the way of an export is in ``problems``, not raised.

    Raises:
        CheckpointError: there is no checkpoint, or the tag is not there.
        AmbiguousTagError: several tags, and nothing says which.
        UnsafeError: ``latest`` leads outside its folder.
    """
    if tag == NEWEST:
        return _open_newest(locate_all(Path(path)))
    return _open(locate(Path(path), tag))


def _open_newest(locations: Sequence[Location]) -> ZeroCheckpoint:
    opened = (_open(location) for location in locations)
    return next((c for c in opened if not c.problems), None) or _open(locations[0])


def _open(location: Location) -> ZeroCheckpoint:
    files = list_rank_files(location.tag_dir)
    unsupported = _layout_by_names(location.tag_dir, files)
    readable = [file for file in files if file.mp_rank == 0]
    ranks = read_ranks(location.tag_dir, readable)
    unsupported = unsupported or _layout_by_contents(location.tag_dir, ranks)
    if unsupported is not None:
        return _describe(location, files, ranks, Inventory((), {}, ()), (unsupported,))
    problems = list(ranks.problems)
    inventory = Inventory((), {}, ())
    if ranks.first_model is not None:
        try:
            inventory = take_inventory(ranks, ranks.first_model)
        except ZexportError as error:
            problems.append(_swapped_out(location.tag_dir) or error)
    if ranks.missing_model_ranks and any(t.source is None for t in inventory.tensors):
        problems += _missing_frozen(location.tag_dir, ranks, inventory)
    return _describe(location, files, ranks, inventory, tuple(problems))


def _describe(
    location: Location,
    files: Iterable[RankFile],
    ranks: RankStates,
    inventory: Inventory,
    problems: tuple[ZexportError, ...],
) -> ZeroCheckpoint:
    first, optimizer = ranks.first_model, ranks.first_optimizer
    stage = optimizer.stage if optimizer is not None else None
    is_bf16_optimizer = optimizer is not None and stage is None
    masters = [t for t in inventory.tensors if t.role is Role.TRAINABLE]
    return ZeroCheckpoint(
        location=location,
        layout="ZeRO-1 (BF16_Optimizer)" if is_bf16_optimizer else f"ZeRO-{stage}",
        stage=1 if is_bf16_optimizer else stage,
        world_size=ranks.world_size,
        ds_version=(first and first.ds_version) or (optimizer and optimizer.ds_version) or None,
        global_steps=first.global_steps if first is not None else None,
        optimizer=_optimizer_name(ranks),
        lr_step=first.lr_step if first is not None else None,
        module_dtype=module_dtype(first) if first is not None else None,
        master_dtype=masters[0].dtype if masters else None,
        tensors=inventory.tensors,
        aliases=inventory.aliases,
        left_out=inventory.left_out,
        frozen_left_out=first is not None and first.frozen_shapes is None and stage in (2, 3),
        missing_ranks=ranks.missing_ranks,
        missing_model_ranks=ranks.missing_model_ranks,
        files=tuple(_describe_file(file, ranks) for file in files),
        torch_files=tuple(_torch_files(ranks)),
        problems=problems,
        warnings=_warnings(ranks),
    )


def _describe_file(file: RankFile, ranks: RankStates) -> CheckpointFile:
    is_optimizer = file.kind is RankFileKind.OPTIMIZER
    states: ModelStates | OptimizerStates | None
    states = ranks.optimizer.get(file.rank) if is_optimizer else ranks.model.get(file.rank)
    has_frozen = isinstance(states, ModelStates) and bool(states.frozen_fragments)
    return CheckpointFile(
        path=file.path,
        kind=file.kind,
        rank=file.rank,
        nbytes=file.path.stat().st_size,
        needed=is_optimizer or file.rank == 0 or has_frozen,
        unknown_globals=states.file.unknown_globals if states is not None else (),
    )


def _torch_files(ranks: RankStates) -> Iterable[TorchFile]:
    yield from (states.file for states in ranks.model.values())
    yield from (states.file for states in ranks.optimizer.values())


def _optimizer_name(ranks: RankStates) -> str | None:
    """The optimizer's name in the DeepSpeed configuration; a client's own optimizer has none."""
    config = ranks.first_model.ds_config.get("optimizer") if ranks.first_model else None
    name = config.get("type") if isinstance(config, dict) else None
    return name if isinstance(name, str) else None


def _warnings(ranks: RankStates) -> tuple[str, ...]:
    missing = [rank for rank in ranks.missing_model_ranks if rank != 0]
    if not missing:
        return ()
    return (
        f"the model files of ranks {ranges_of(missing)} are missing; without frozen weights no "
        "value comes from them",
    )


def _missing_frozen(
    tag_dir: Path, ranks: RankStates, inventory: Inventory
) -> Iterable[ZexportError]:
    """A missing model file matters where frozen weights are striped over all of them."""
    frozen = [t for t in inventory.tensors if t.role is Role.FROZEN and t.source is None]
    missing = [rank for rank in ranks.missing_model_ranks if rank != 0]
    if frozen and missing:
        yield IncompleteCheckpointError(
            f"lacks the model files of ranks {ranges_of(missing)}, with parts of frozen weights",
            path=tag_dir,
            found=f"{len(ranks.model)} of {ranks.world_size} model files",
            expected=f"zero_pp_rank_{missing[0]}_mp_rank_00_model_states.pt and the like",
            hint="Copy them from the nodes that wrote them",
        )


def _layout_by_names(tag_dir: Path, files: Iterable[RankFile]) -> UnsupportedError | None:
    """Why the names of the files show a layout that is not exported, if they do."""
    files = tuple(files)
    kinds = {file.kind for file in files}
    if (tag_dir / "zero").is_dir() and RankFileKind.OPTIMIZER not in kinds:
        return _unsupported(tag_dir, "a universal checkpoint")
    if kinds & {RankFileKind.EXPERT, RankFileKind.EXPERT_OPTIMIZER}:
        return _unsupported(tag_dir, "an expert-parallel checkpoint")
    if RankFileKind.PIPELINE_LAYER in kinds:
        return _unsupported(tag_dir, "a pipeline-parallel checkpoint")
    if any(file.mp_rank for file in files):
        return _unsupported(tag_dir, "a tensor-parallel checkpoint")
    return None


def _layout_by_contents(tag_dir: Path, ranks: RankStates) -> UnsupportedError | None:
    """Why the states show a layout that is not exported, if they do."""
    model, optimizer = ranks.first_model, ranks.first_optimizer
    if (model is not None and model.has_experts) or (
        optimizer is not None and optimizer.stripes_experts
    ):
        return _unsupported(tag_dir, "an expert-parallel checkpoint")
    if model is not None and model.tensor_parallel > 1:
        return _unsupported(tag_dir, "a tensor-parallel checkpoint")
    if model is not None and model.has_optimizer:
        return _unsupported(tag_dir, "a ZeRO-0 checkpoint")
    return None


def _unsupported(tag_dir: Path, layout: str) -> UnsupportedError:
    return UnsupportedError(
        f"is {layout}, which this version does not export",
        path=tag_dir,
        expected="ZeRO-1, 2 or 3 with data parallelism alone",
    )


def _swapped_out(tag_dir: Path) -> UnsupportedError | None:
    """Lengths do not add up where the optimizer was swapped to NVMe: its tensors lie elsewhere.

    Source: DeepSpeed 0.19, ``runtime/zero/stage3.py`` (``offloaded_tensors`` beside rank files).
    """
    swapped = tag_dir / "offloaded_tensors"
    if not swapped.is_dir():
        return None
    return UnsupportedError(
        "keeps the optimizer's tensors in NVMe swap files, which this version does not read",
        path=swapped,
        hint="Resume the run with the optimizer offloaded to the CPU, save, and export that",
    )


def raise_problems(checkpoint: ZeroCheckpoint) -> None:
    """Raise what stands in the way of an export, if anything: all of it, as the gravest kind."""
    problems = checkpoint.problems
    if len(problems) == 1:
        raise problems[0]
    if problems:
        gravest = max(problems, key=lambda problem: problem.exit_code)
        raise type(gravest)(
            f"has {len(problems)} problems",
            path=checkpoint.location.tag_dir,
            found="; ".join(problem.sentence().rstrip(".") for problem in problems),
            hint="Mend them and run again; `zexport inspect` shows what is there",
        )
