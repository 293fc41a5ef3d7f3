"""Two trainings side by side: weights as those of models, every optimizer state by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.state import (
    MASTER,
    Cell,
    Role,
    StoredTensor,
    TrainingState,
    raise_problems,
)
from zexport.diff.diff import DiffReport, TensorDiffs, diff_tensors, make_report
from zexport.diff.folder import ModelWeights, has_rank_files, open_weights
from zexport.diff.settings import of_trainings
from zexport.errors import layout_of
from zexport.export.base_model import weights_file
from zexport.export.plan import SourceFile
from zexport.export.progress import Progress
from zexport.options import ExportOptions
from zexport.resharding.model_files import module_entries
from zexport.resharding.resumable import resumable
from zexport.resharding.values import records_of, slots_of, source_of
from zexport.storage.location import place


def are_checkpoints(*paths: Path) -> bool:
    """Whether all are folders with rank files right below them, and not all also hold a model.

    A file of ZeRO-3's empty placeholders is none.
    """
    return all(map(has_rank_files, paths)) and not all(
        weights_file(path) is not None and not open_weights(path).is_hollow for path in paths
    )


def diff_states(
    a: Path | str,
    b: Path | str,
    *,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> DiffReport:
    """Compare two checkpoints: fp32 master weights, optimizer states and settings.

    ZeRO stage, world size and layout do not matter. Memory does not grow with the model. If one
    side was pruned, only weights are compared.

    Args:
        a: a checkpoint, at any level of its folders.
        b: another one, such as what ``reshard`` made of it.
        jobs: worker threads; by default one per core, up to 4.
        progress: called at every step.

    Raises:
        CheckpointError: a side is not a checkpoint, has problems, or lacks states.
        UnsupportedError: optimizer states cannot be matched by name.
    """
    jobs = ExportOptions().jobs if jobs is None else jobs
    paths = place(a), place(b)
    opened = open_checkpoint(paths[0]), open_checkpoint(paths[1])
    for checkpoint in opened:
        raise_problems(checkpoint)
    if any(checkpoint.pruned_files for checkpoint in opened):
        weights = diff_tensors(*map(_weights_alone, opened), jobs=jobs, progress=progress)
        return make_report(paths, _without_states(weights, opened), weights)
    opened = (resumable(opened[0]), resumable(opened[1]))
    sides = zip(*map(_sides, opened), strict=True)
    weights, states = (diff_tensors(*pair, jobs=jobs, progress=progress) for pair in sides)
    compared = (
        f"{len(weights.tensors):,} weights and {len(states.tensors):,} optimizer states in the "
        "rank files"
    )
    cells = zip(*(state.cells for state in opened), strict=False)
    settings = dict.fromkeys(chain.from_iterable(of_trainings(*pair) for pair in cells))
    return make_report(paths, compared, weights, states, settings=tuple(settings))


def _weights_alone(checkpoint: TrainingState) -> ModelWeights:
    """The weights by name, as an export has them in fp32; all that a pruned checkpoint has."""
    found = {one.name: one for one in checkpoint.tensors}
    files = tuple(map(SourceFile.of, checkpoint.torch_files))
    return ModelWeights(checkpoint.location.tag_dir, found, files)


def _without_states(weights: TensorDiffs, opened: tuple[TrainingState, TrainingState]) -> str:
    """What was compared, and of which sides the optimizer's states were removed."""
    pruned = [side for side, one in zip("AB", opened, strict=True) if one.pruned_files]
    return (
        f"{len(weights.tensors):,} weights in the rank files; zexport prune has removed the "
        f"optimizer's states of {' and '.join(pruned)}"
    )


def _sides(state: TrainingState) -> tuple[ModelWeights, ModelWeights]:
    """Return the weights by name, and the optimizer states as ``NAME (STATE)``."""
    weights: dict[str, StoredTensor] = {}
    states: dict[str, StoredTensor] = {}
    for cell in state.cells:
        with layout_of(state.location.tag_dir):
            named = [*_named(cell)]
        for name, slot, tensor in named:
            part = name if len(state.cells) == 1 else f"{cell.label}: {name}"
            unique = f"{part} ({slot})" if slot else part
            side = states if slot else weights
            side[unique] = replace(tensor, name=unique)
    opened = (file for cell in (state.whole, *state.cells) for file in cell.files)
    known = {file.path: file for file in (*state.torch_files, *opened)}
    files, folder = tuple(map(SourceFile.of, known.values())), state.location.tag_dir
    return ModelWeights(folder, weights, files), ModelWeights(folder, states, files)


def _named(cell: Cell) -> Iterator[tuple[str, str, StoredTensor]]:
    """Yield every tensor with its name and, of an optimizer state, its slot."""
    trained = set()
    for one in cell.trained():
        trained.add(one.name)
        for slot, dtype in slots_of(one).items():
            source = source_of(one, slot)
            tensor = StoredTensor(one.name, one.shape, dtype, one.role, source)
            yield one.name, "" if slot == MASTER else slot, tensor
    file = records_of(cell)[0].file
    for entry in module_entries(cell).values():
        name, ref = entry.owner, entry.ref
        if name in trained:
            continue
        if not entry.is_placeholder:
            yield name, "", StoredTensor(name, ref.shape, ref.dtype, Role.BUFFER, file.source(ref))
        elif (own := cell.parameters.get(name)) is not None:
            yield name, "", StoredTensor(name, own.shape, own.dtype, own.role, own.source())
