"""Compare two checkpoints: weights, and optimizer states by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from zexport.diff.config import compare_training_settings
from zexport.diff.folders import (
    DiffReport,
    Weights,
    compare_weights,
    has_rank_files,
    make_report,
    open_weights,
)
from zexport.errors import layout_of
from zexport.export.base_model import weights_file
from zexport.export.plan import SourceFile
from zexport.export.report import Progress
from zexport.resharding.reshardable import reshardable
from zexport.resharding.values import module_entries, records_of, slots_of, source_of
from zexport.storage.location import place


def are_checkpoints(a: Path, b: Path) -> bool:
    """Return whether both folders contain rank files, and not both contain a model too.

    A safetensors file of ZeRO-3 placeholders is not a model.
    """
    return all(map(has_rank_files, (a, b))) and not all(
        weights_file(path) is not None and not open_weights(path).has_placeholders
        for path in (a, b)
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
        b: another checkpoint, such as one that ``reshard`` wrote.
        jobs: worker threads; by default one per core, up to 4.
        progress: called at every step.

    Raises:
        CheckpointError: a side is not a checkpoint, has problems, or lacks states.
        UnsupportedError: optimizer states cannot be matched by name.
    """
    paths = place(a), place(b)
    opened = [open_checkpoint(path) for path in paths]
    for state in opened:
        raise_problems(state)
    named = [*zip("AB", opened, strict=True)]
    pruned = [f"{name} were pruned" for name, state in named if state.pruned_files]
    others = [name for name, state in named if not state.location.is_zero]
    of_fsdp = [f"{name}, by FSDP, are not compared" for name in others]
    if left_out := [*pruned, *of_fsdp]:
        weights = compare_weights(*map(_weights, opened), jobs=jobs, progress=progress)
        compared = (
            f"{len(weights.tensors):,} weights in the rank files; optimizer states of "
            f"{' and of '.join(left_out)}"
        )
        return make_report(paths, compared, weights)
    opened = [reshardable(state) for state in opened]
    (a_weights, a_states), (b_weights, b_states) = map(_weights_and_states, opened)
    weights = compare_weights(a_weights, b_weights, jobs=jobs, progress=progress)
    states = compare_weights(a_states, b_states, jobs=jobs, progress=progress)
    compared = (
        f"{len(weights.tensors):,} weights and {len(states.tensors):,} optimizer states in the "
        "rank files"
    )
    settings = dict.fromkeys(
        setting
        for cells in zip(opened[0].cells, opened[1].cells, strict=False)
        for setting in compare_training_settings(*cells)
    )
    return make_report(paths, compared, weights, states, settings=settings)


def _weights(checkpoint: TrainingState) -> Weights:
    """Return the weights as an fp32 export has them; a pruned checkpoint has no more."""
    tensors = {one.name: one for one in checkpoint.tensors}
    files = tuple(map(SourceFile.of, checkpoint.torch_files))
    return Weights(checkpoint.location.tag_dir, tensors, files, checkpoint.aliases)


def _weights_and_states(state: TrainingState) -> tuple[Weights, Weights]:
    """Return the weights by name, and the optimizer states as ``NAME (STATE)``."""
    weights: dict[str, StoredTensor] = {}
    states: dict[str, StoredTensor] = {}
    folder = state.location.tag_dir
    for cell in state.cells:
        prefix = "" if len(state.cells) == 1 else f"{cell.label}: "
        with layout_of(folder):
            for slot, tensor in _slots(cell):
                name = f"{prefix}{tensor.name}" + (f" ({slot})" if slot else "")
                (states if slot else weights)[name] = replace(tensor, name=name)
    opened = (file for cell in (state.whole, *state.cells) for file in cell.files)
    known = {file.path: file for file in (*state.torch_files, *opened)}
    files = tuple(map(SourceFile.of, known.values()))
    return Weights(folder, weights, files), Weights(folder, states, files)


def _slots(cell: Cell) -> Iterator[tuple[str, StoredTensor]]:
    """Yield weights with an empty slot, and optimizer states with their slot."""
    trained = set()
    for one in cell.trained():
        trained.add(one.name)
        for slot, dtype in slots_of(one).items():
            tensor = StoredTensor(one.name, one.shape, dtype, one.role, source_of(one, slot))
            yield "" if slot == MASTER else slot, tensor
    file = records_of(cell)[0].file
    for entry in module_entries(cell).values():
        name, ref = entry.owner, entry.ref
        if name in trained:
            continue
        if not entry.is_placeholder:
            yield "", StoredTensor(name, ref.shape, ref.dtype, Role.BUFFER, file.source(ref))
        elif (own := cell.parameters.get(name)) is not None:
            yield "", StoredTensor(name, own.shape, own.dtype, own.role, own.source())
