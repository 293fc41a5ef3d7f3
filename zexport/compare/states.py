"""Two trainings side by side: weights as those of models, every optimizer state by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from msgspec import structs

from zexport.checkpoint.state import (
    MASTER,
    Cell,
    Role,
    StoredTensor,
    TrainingState,
    raise_problems,
)
from zexport.compare.diff import Counts, DiffReport, diff_tensors, with_settings
from zexport.compare.folder import ModelWeights, has_rank_files, open_weights
from zexport.compare.roundings import Side
from zexport.compare.settings import of_trainings
from zexport.compare.tensor import Outcome
from zexport.compare.verdict import Cause, Verdict
from zexport.plan.plan import SourceFile
from zexport.printable import some
from zexport.resharding.model_files import module_entries
from zexport.resharding.resumable import resumable
from zexport.resharding.values import binding, records_of, slots_of, source_of
from zexport.run.progress import Progress
from zexport.weights.base_model import weights_file

_NAMED = 3


def are_checkpoints(*paths: Path) -> bool:
    """Whether all are folders with rank files right below them, and not all also hold a model.

    A file of ZeRO-3's empty placeholders is none.
    """
    return all(map(has_rank_files, paths)) and not all(
        weights_file(path) is not None and not open_weights(path).is_hollow for path in paths
    )


def diff_states(
    paths: tuple[Path, Path],
    opened: tuple[TrainingState, TrainingState],
    *,
    jobs: int,
    progress: Callable[[Progress], None] | None = None,
) -> DiffReport:
    """How two trainings differ; see ``zexport.api.compare.diff_states``."""
    for checkpoint in opened:
        raise_problems(checkpoint)
    steps = tuple(checkpoint.global_steps or 0 for checkpoint in opened)
    later = Side.B if steps[0] < steps[1] else Side.A
    if any(checkpoint.pruned_files for checkpoint in opened):
        a_alone, b_alone = map(_weights_alone, opened)
        found = diff_tensors(paths, (a_alone, b_alone), jobs=jobs, progress=progress, later=later)
        return replace(found, compared=_without_states(found, opened))
    opened = (resumable(opened[0]), resumable(opened[1]))
    a, b = map(_sides, opened)
    weights, states = (
        diff_tensors(paths, (one, other), jobs=jobs, progress=progress, later=later)
        for one, other in zip(a, b, strict=True)
    )
    counts = {outcome.value: weights.count(outcome) + states.count(outcome) for outcome in Outcome}
    cells = zip(*(state.cells for state in opened), strict=False)
    settings = dict.fromkeys(chain.from_iterable(of_trainings(*pair) for pair in cells))
    report = replace(
        weights,
        compared=f"{len(weights.tensors):,} weights and {len(states.tensors):,} optimizer states "
        "in the rank files",
        verdict=_with_states(weights.verdict, states),
        counts=Counts(**counts),
        nbytes_read=weights.nbytes_read + states.nbytes_read,
        tensors=(*weights.tensors, *states.tensors),
    )
    if steps[0] != steps[1] and weights.verdict.cause is not Cause.NONE:
        return replace(report, settings=tuple(settings))  # as of any two steps
    return with_settings(report, tuple(settings))


def _weights_alone(checkpoint: TrainingState) -> ModelWeights:
    """The weights by name, as an export has them in fp32; all that a pruned checkpoint has."""
    found = {one.name: one for one in checkpoint.tensors}
    files = tuple(map(SourceFile.of, checkpoint.torch_files))
    return ModelWeights(checkpoint.location.tag_dir, found, files)


def _without_states(report: DiffReport, opened: tuple[TrainingState, TrainingState]) -> str:
    """What was compared, and of which sides the optimizer's states were removed."""
    pruned = [side for side, one in zip("AB", opened, strict=True) if one.pruned_files]
    count = len(report.tensors)
    return (
        f"{count:,} weights in the rank files; zexport prune has removed the optimizer's states of "
        f"{' and '.join(pruned)}"
    )


def _sides(state: TrainingState) -> tuple[ModelWeights, ModelWeights]:
    """Return the weights by name, and the optimizer states as ``NAME (STATE)``."""
    weights: dict[str, StoredTensor] = {}
    states: dict[str, StoredTensor] = {}
    for cell in state.cells:
        with binding(state):
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


def _with_states(verdict: Verdict, states: DiffReport) -> Verdict:
    """What made the difference of the weights, and whether the optimizer's states differ."""
    count = len(states.tensors)
    unequal = sorted(one.name for one in states.tensors if one.outcome is not Outcome.EQUAL)
    if not unequal:
        equal = f"; the optimizer's {count:,} states are equal" if count else ""
        return structs.replace(verdict, sentence=verdict.sentence + equal)
    if len(unequal) == count and verdict.cause is not Cause.NONE:
        return verdict  # as of any two steps
    told = f"{len(unequal):,} of the optimizer's {count:,} states differ ({some(unequal, _NAMED)})"
    if verdict.cause is Cause.NONE:
        return Verdict(Cause.UNKNOWN, f"The weights are equal, and {told}")
    return structs.replace(verdict, sentence=f"{verdict.sentence}; {told}")
