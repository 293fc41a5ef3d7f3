"""The states of all ranks, by model-parallel index, and whether a file of each is here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.model_states import MAX_DEGREE, ZERO3, ModelStates, read_model_states
from zexport.checkpoint.module_names import with_checkpointing_named
from zexport.checkpoint.optimizer_states import OptimizerStates, read_optimizer_states
from zexport.checkpoint.rank_files import (
    MODEL_FILES,
    RankFile,
    RankFileKind,
    name_ranks,
    ranges_of,
    rank_file_name,
    read_rank_file,
)
from zexport.checkpoint.same_save import disagreements
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, ZexportError
from zexport.findings import FindingKind
from zexport.formats.pickles import Pickle
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType

WORLD_SIZE_MAX = 1 << 20
"""More ranks than any run has; a larger number in a file is damage, and must cost nothing."""


_States = TypeVar("_States", ModelStates, OptimizerStates)


class RankStates(Struct, frozen=True):
    """The states of every rank that could be read, by rank, and everything found wrong.

    Under ZeRO-1/2 rank 0 alone has model states. ``world_size`` is the number of ranks of a whole
    checkpoint, ``None`` where nothing says it; missing are ranks without the file they should have.
    """

    model: Mapping[int, ModelStates]
    optimizer: Mapping[int, OptimizerStates]
    is_zero3: bool
    world_size: int | None
    missing_ranks: tuple[int, ...]
    missing_model_ranks: tuple[int, ...]
    problems: tuple[ZexportError, ...]

    @property
    def first_model(self) -> ModelStates | None:
        """The model states of the lowest rank there is."""
        return self.model[min(self.model)] if self.model else None

    @property
    def files(self) -> tuple[TorchFile, ...]:
        """The files that they are in: model states before optimizer states."""
        models = (states.file for states in self.model.values())
        return (*models, *(states.file for states in self.optimizer.values()))

    @property
    def first_optimizer(self) -> OptimizerStates | None:
        """The optimizer states of the lowest rank there is."""
        return self.optimizer[min(self.optimizer)] if self.optimizer else None


class Save(Struct, frozen=True):
    """The rank files of one tag, and what those of each model-parallel index say."""

    tag_dir: Path
    files: Sequence[RankFile]
    cells: Mapping[int, RankStates]

    @property
    def models(self) -> dict[int, ModelStates]:
        """The model states of every model-parallel index that has some, in order."""
        return models_of(self.cells)

    def of_kind(self, *kinds: RankFileKind) -> list[RankFile]:
        """The files of some kinds."""
        return [file for file in self.files if file.kind in kinds]


def is_zero0(ranks: RankStates) -> bool:
    """Whether the model file holds all there is: whole weights, and no flat groups elsewhere.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_checkpoint``): ``param_shapes``
    is ``None`` unless ZeRO holds the weights. A pipeline's stage has them in layer files; beside
    the files of experts a model file may be without weights as well.
    """
    model = ranks.first_model
    return (
        model is not None
        and bool(model.module or model.has_experts)
        and not (model.param_shapes or ranks.optimizer or ranks.is_zero3)
    )


def read_ranks(tag_dir: Path, files: Iterable[RankFile]) -> RankStates:
    """The states in ``files`` and every contradiction between them; raises nothing of its own."""
    files = tuple(files)
    problems: list[ZexportError] = []
    of_models = [f for f in files if f.kind in MODEL_FILES]
    of_optimizers = [f for f in files if f.kind is RankFileKind.OPTIMIZER]
    model = _read_all(
        of_models, lambda file: with_checkpointing_named(read_model_states(file)), problems
    )
    optimizer = _read_all(of_optimizers, read_optimizer_states, problems)
    world_size = _world_size(model, optimizer)
    if world_size is not None and not 0 < world_size <= WORLD_SIZE_MAX:
        problems.append(_impossible(tag_dir, world_size))
        world_size = None
    named = {f.rank for f in of_optimizers}
    missing = tuple(sorted(set(range(world_size or 0)) - named))
    per_rank = any(f.kind is RankFileKind.MODEL_PER_RANK for f in files)
    is_zero3 = per_rank or any(states.stage == ZERO3 for states in optimizer.values())
    model_expected = range(world_size or 1) if is_zero3 else range(1)
    model_named = {f.rank for f in of_models}
    missing_model = tuple(sorted(set(model_expected) - model_named))
    problems += _missing(of_optimizers, tag_dir, missing, world_size)
    if 0 in missing_model:
        mp_rank = files[0].mp_rank if files else 0
        is_known = is_zero3 or bool(model or optimizer)
        problems.append(no_first_model(tag_dir, mp_rank, is_zero3=is_zero3 if is_known else None))
    problems += _surplus(tag_dir, named | (model_named if is_zero3 else set()), world_size)
    within = range(WORLD_SIZE_MAX if world_size is None else world_size)
    own = {r: s for r, s in optimizer.items() if r in within}
    problems += disagreements(tag_dir, {r: s for r, s in model.items() if r in within}, own)
    return RankStates(
        model, optimizer, is_zero3, world_size, missing, missing_model, tuple(problems)
    )


def _impossible(tag_dir: Path, world_size: int) -> ZexportError:
    return DamagedCheckpointError(
        "records an impossible number of ranks",
        path=tag_dir,
        found=world_size,
        expected=f"1 to {WORLD_SIZE_MAX}",
        hint="Copy the optimizer files again",
    )


def _read_all(
    files: list[RankFile],
    read: Callable[[TorchFile], _States],
    problems: list[ZexportError],
) -> dict[int, _States]:
    states: dict[int, _States] = {}
    known: dict[bytes, Pickle] = {}
    for file in files:
        try:
            torch_file = read_rank_file(file, known)
            if file.rank in states:
                raise DamagedCheckpointError(
                    f"is a second file of rank {file.rank}",
                    path=file.path,
                    found=f"{states[file.rank].file.path.name} beside it",
                    expected="the files of one save",
                    hint="Remove the files of the other run",
                )
            # Equal pickles come as one value, and then the states differ in nothing but the file.
            twin = next((s for s in states.values() if s.file.value is torch_file.value), None)
            states[file.rank] = read(torch_file) if twin is None else replace(twin, file=torch_file)
        except ZexportError as error:
            problems.append(error)
    return states


def _world_size(
    model: Mapping[int, ModelStates], optimizer: Mapping[int, OptimizerStates]
) -> int | None:
    """The number of ranks that the weights are cut into.

    It is the most common partition count among the ranks, the largest of a rank's groups counting,
    but for ZeRO-1/2 with experts, or with as many files as data-parallel ranks: where only experts
    are trained, no group has a part on all of them, and ranks that are missing would not be missed
    (the experts' own files hold the rest in 16 bits). Under ZeRO-3 the count always is what
    matters: with MiCS it is smaller, and only the first group of ranks saves (DeepSpeed 0.9 to
    0.18, ``runtime/engine.py``, ``_configure_checkpointing``, and ``runtime/zero/mics.py``,
    ``MiCS_Optimizer``).
    """
    first = model[min(model)] if model else None
    is_zero3 = any(states.stage == ZERO3 for states in optimizer.values())
    due = first.dp_world_size if first is not None and optimizer and not is_zero3 else None
    if first is not None and due and (first.has_experts or due == len(optimizer)):
        return due
    counts = Counter(max(s.partition_counts) for s in optimizer.values() if s.partition_counts)
    if counts:
        return counts.most_common(1)[0][0]
    return len(model) if len(model) > 1 else None


def no_optimizer_files(tag_dir: Path, mp_rank: int, model: ModelStates | None) -> ZexportError:
    """The problem of a model-parallel index without any file that holds master weights.

    The configuration tells their names: those of bf16 have a prefix (DeepSpeed 0.10 to 0.19,
    ``runtime/engine.py``, ``_get_zero_ckpt_prefix``).
    """
    plain, bf16 = (
        rank_file_name(RankFileKind.OPTIMIZER, 0, mp_rank, prefix=prefix)
        for prefix in ("", "bf16_")
    )
    if model is None or not model.ds_config:
        name = f"{bf16} or {plain}"
    else:
        name = bf16 if model.cast_dtype is DType.BF16 else plain
    return IncompleteCheckpointError(
        "lacks the optimizer files of all ranks, which hold the weights",
        path=tag_dir,
        found=f"no *_mp_rank_{mp_rank:02d}_optim_states.pt",
        expected=f"{name} and the like",
        hint="Copy them from the nodes that wrote them",
    )


def _missing(
    written: Sequence[RankFile], tag_dir: Path, missing: Sequence[int], world_size: int | None
) -> Iterable[ZexportError]:
    if missing and written:
        here = written[0]
        name = rank_file_name(here.kind, missing[0], here.mp_rank, prefix=here.prefix)
        yield IncompleteCheckpointError(
            f"lacks the optimizer files of {name_ranks(missing)}",
            path=tag_dir,
            found=f"{(world_size or 0) - len(missing)} of {world_size} ranks",
            expected=name if len(missing) == 1 else f"{name} and the like",
            hint="Copy them from the nodes that wrote them",
        )


def no_first_model(
    tag_dir: Path, mp_rank: int = 0, *, is_zero3: bool | None = False
) -> IncompleteCheckpointError:
    """Return the error for a model-parallel index without the file that names its weights.

    ``is_zero3`` is ``None`` if no file that can be read records the stage.
    """
    plain, zero3 = (
        rank_file_name(kind, 0, mp_rank)
        for kind in (RankFileKind.MODEL, RankFileKind.MODEL_PER_RANK)
    )
    either = f"{zero3} (ZeRO-3) or {plain} (other stages)"
    return IncompleteCheckpointError(
        "lacks the model file of rank 0, which names and shapes come from",
        path=tag_dir,
        found="no such file",
        expected=either if is_zero3 is None else zero3 if is_zero3 else plain,
        hint="Copy it from the node of rank 0",
    )


def _surplus(tag_dir: Path, named: set[int], world_size: int | None) -> Iterable[ZexportError]:
    surplus = sorted(rank for rank in named if world_size is not None and rank >= world_size)
    if surplus:
        yield DamagedCheckpointError(
            f"has files of {name_ranks(surplus)}, beyond its world size",
            path=tag_dir,
            found=f"files of {len(named)} ranks",
            expected=f"{world_size}, ranks 0-{(world_size or 1) - 1}",
            hint="Remove what another save left here",
            finding=FindingKind.STRAY_FILES,
        )


def models_of(cells: Mapping[int, RankStates]) -> dict[int, ModelStates]:
    """The model states of every model-parallel index that has some, in order."""
    found = {index: cell.first_model for index, cell in sorted(cells.items())}
    return {index: model for index, model in found.items() if model is not None}


def check_cells(save: Save, count: int, what: str) -> None:
    """Refuse a grid in which cells are missing or in excess."""
    tag_dir, cells, have = save.tag_dir, save.cells, save.models.keys()
    if count > MAX_DEGREE:
        raise DamagedCheckpointError(
            f"records an impossible number of {what}",
            path=tag_dir,
            found=count,
            expected=f"1 to {MAX_DEGREE}",
            hint="Copy the model files again",
        )
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
