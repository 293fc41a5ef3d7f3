"""Rank files of one model-parallel index: read them all; find missing and extra files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.state import FileKind, Parallelism
from zexport.checkpoint.zero.file_names import (
    MODEL_FILES,
    RankFile,
    name_ranks,
    ranges,
    rank_file_name,
    read_rank_file,
)
from zexport.checkpoint.zero.module_names import with_parameter_names
from zexport.checkpoint.zero.records import (
    ZERO3,
    ModelStates,
    OptimizerStates,
    model_states,
    optimizer_states,
)
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, ZexportError
from zexport.findings import FindingKind
from zexport.formats.pickle_reader import Pickle
from zexport.formats.torch_file import TorchFile

WORLD_SIZE_MAX = 1 << 20
"""Larger than any run; a larger number in a file is damage."""

FROM_NODES = "Copy them from the nodes that wrote them; if they are still being saved, wait"

_States = TypeVar("_States", ModelStates, OptimizerStates)


class Ranks(Struct, frozen=True):
    """Rank files of one model-parallel index, by data-parallel rank.

    With ZeRO-1/2 only rank 0 has model states. ``world_size`` is ``None`` if nothing records it.
    Missing ranks have no file; ranks with an unreadable file are only absent.
    """

    folder: Path
    index: int
    model: Mapping[int, ModelStates]
    optimizer: Mapping[int, OptimizerStates]
    is_zero3: bool
    world_size: int | None
    missing_ranks: tuple[int, ...] = ()
    missing_model_ranks: tuple[int, ...] = ()

    @property
    def first(self) -> ModelStates:
        """Model states of the lowest rank."""
        if not self.model:
            raise no_model(self.folder, self.index)
        return self.model[min(self.model)]

    @property
    def first_optimizer(self) -> OptimizerStates | None:
        """Optimizer states of the lowest rank."""
        return self.optimizer[min(self.optimizer)] if self.optimizer else None

    @property
    def owners(self) -> list[OptimizerStates | None]:
        """Optimizer states of all ranks in order; ``None`` for missing ones."""
        return [self.optimizer.get(rank) for rank in range(self.world_size or 0)]

    @property
    def files(self) -> tuple[TorchFile, ...]:
        """Files of all ranks; model states first."""
        models = (one.file for one in self.model.values())
        return (*models, *(one.file for one in self.optimizer.values()))

    @property
    def is_zero0(self) -> bool:
        """Whether the model states file has whole weights and no flat groups exist.

        Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_checkpoint``):
        ``param_shapes`` is ``None`` without ZeRO. A pipeline's weights are in layer files.
        """
        if not self.model or self.is_zero3 or self.optimizer:
            return False
        return bool(self.first.module or self.first.has_experts) and not self.first.param_shapes


class TagFolder(Struct, frozen=True):
    """The rank files of one tag, and their contents by model-parallel index."""

    path: Path
    files: Sequence[RankFile]
    ranks: Mapping[int, Ranks]

    @property
    def models(self) -> dict[int, ModelStates]:
        """Model states of every model-parallel index that has some, in order."""
        return {index: one.first for index, one in sorted(self.ranks.items()) if one.model}

    @property
    def grid(self) -> Parallelism:
        """Degrees of model parallelism; before DeepSpeed 0.19 layer files number tensor ranks."""
        model = next(iter(self.models.values()))
        layers = self.of_kind(FileKind.PIPELINE_LAYER)
        tensor = max((one.mp + 1 for one in layers), default=model.mp_world_size)
        return model.grid or Parallelism(model.mp_world_size // tensor, tensor)

    def of_kind(self, *kinds: FileKind) -> list[RankFile]:
        return [one for one in self.files if one.kind in kinds]


def check_grid(tag: TagFolder, count: int, what: str) -> None:
    """Raise unless there are exactly ``count`` model-parallel indices."""
    have = tag.models
    is_missing = any(index not in have for index in range(count))
    if is_missing or len(tag.ranks) > count:
        raise (IncompleteCheckpointError if is_missing else DamagedCheckpointError)(
            f"model states files of {what} are {'missing' if is_missing else 'of another run'}",
            path=tag.path,
            found=f"{what} {ranges(have)}",
            expected=f"{count} of them, up to *{rank_file_name(FileKind.MODEL, mp=count - 1)}",
            hint=FROM_NODES,
        )


def read_ranks(
    folder: Path, index: int, files: Sequence[RankFile], problems: list[ZexportError]
) -> Ranks:
    """Read all rank files of one model-parallel index; unreadable ones become problems."""
    of_models = [one for one in files if one.kind in MODEL_FILES and one.mp == index]
    of_optimizers = [one for one in files if one.kind is FileKind.OPTIMIZER and one.mp == index]
    model = _read_all(of_models, lambda file: with_parameter_names(model_states(file)), problems)
    optimizer = _read_all(of_optimizers, optimizer_states, problems)
    world_size = _world_size(model, optimizer)
    per_rank = any(one.kind is FileKind.MODEL_PER_RANK for one in of_models)
    is_zero3 = per_rank or any(one.stage == ZERO3 for one in optimizer.values())
    named, models = {one.rank for one in of_optimizers}, {one.rank for one in of_models}
    missing = sorted(set(range(world_size or 0)) - named)
    missing_models = sorted(set(range((world_size or 1) if is_zero3 else 1)) - models)
    if missing and of_optimizers:
        first = of_optimizers[0]
        problems.append(
            IncompleteCheckpointError(
                f"optimizer states files of {name_ranks(missing)} are missing",
                path=folder,
                found=f"{(world_size or 0) - len(missing)} of {world_size} ranks",
                expected=rank_file_name(first.kind, missing[0], index, prefix=first.prefix),
                hint=FROM_NODES,
            )
        )
    if 0 in missing_models:
        problems.append(no_model(folder, index))
    within = set(range(world_size)) if world_size is not None else named | models
    if extra := (named | models if is_zero3 else named) - within:
        problems.append(
            DamagedCheckpointError(
                f"extra files of {name_ranks(extra)}",
                path=folder,
                found=f"files of {len(named)} ranks",
                expected=world_size,
                hint="Remove the files of another checkpoint",
                finding=FindingKind.STRAY_FILES,
            )
        )
    return Ranks(
        folder,
        index,
        {rank: one for rank, one in model.items() if rank in within},
        {rank: one for rank, one in optimizer.items() if rank in within},
        is_zero3,
        world_size,
        tuple(missing),
        tuple(missing_models),
    )


def _read_all(
    files: Iterable[RankFile], record: Callable[[TorchFile], _States], problems: list[ZexportError]
) -> dict[int, _States]:
    """Read files by rank; ranks with equal pickles share everything except the file."""
    states: dict[int, _States] = {}
    known: dict[bytes, Pickle] = {}
    twins: dict[int, _States] = {}
    for name in files:
        try:
            file = read_rank_file(name, known)
            if name.rank in states:
                raise DamagedCheckpointError(
                    f"second file of rank {name.rank}",
                    path=name.path,
                    found=states[name.rank].file.path.name,
                    hint="Remove the files of the other run",
                )
            twin = twins.get(id(file.value))
            states[name.rank] = record(file) if twin is None else replace(twin, file=file)
            twins.setdefault(id(file.value), states[name.rank])
        except ZexportError as error:
            problems.append(error)
    return states


def _world_size(
    model: Mapping[int, ModelStates], optimizer: Mapping[int, OptimizerStates]
) -> int | None:
    """Return the number of ranks that partition the weights: the commonest partition count.

    With ZeRO-1/2 the data-parallel size of the model states counts if there are experts, or as
    many files: if only experts are trained, no group is partitioned over all ranks. With ZeRO-3
    the partition count is right: with MiCS it is smaller, and only the first group of ranks saves
    (DeepSpeed 0.9 to 0.18, ``runtime/zero/mics.py``).
    """
    first = model[min(model)] if model else None
    is_zero3 = any(one.stage == ZERO3 for one in optimizer.values())
    due = first.dp_world_size if first is not None and optimizer and not is_zero3 else None
    counts = Counter(max(one.partition_counts, default=0) for one in optimizer.values())
    if not (first is not None and due and (first.has_experts or due == len(optimizer))):
        due = counts.most_common(1)[0][0] if counts else len(model)
    is_known = 0 < due <= WORLD_SIZE_MAX and (bool(optimizer) or due > 1)
    return due if is_known else len(optimizer) or None


def no_model(folder: Path, index: int = 0) -> IncompleteCheckpointError:
    """Return the error for a model-parallel index without the file that names its weights."""
    plain, zero3 = (rank_file_name(kind, 0, index) for kind in MODEL_FILES)
    return IncompleteCheckpointError(
        "model states file of rank 0 is missing, which has names and shapes",
        path=folder,
        expected=f"{zero3} (ZeRO-3) or {plain} (other stages)",
        hint="Copy it from the node of rank 0",
    )


def no_optimizer(folder: Path, index: int) -> IncompleteCheckpointError:
    """Return the error for a model-parallel index without any master weights."""
    return IncompleteCheckpointError(
        "optimizer states files of all ranks are missing, which have the master weights",
        path=folder,
        expected=rank_file_name(FileKind.OPTIMIZER, mp=index, prefix="*"),
        hint=FROM_NODES,
    )
