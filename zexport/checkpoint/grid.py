"""The cells of a model-parallel grid: which there must be, and whether they are of one save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from zexport.checkpoint.agreement import stated_by_rank, step_of
from zexport.checkpoint.rank_files import RankFileKind, ranges_of, rank_file_name
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.states import MAX_DEGREE
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, ZexportError
from zexport.facts import statements as facts
from zexport.facts.table import Fact


def tag_dir_of(cells: Mapping[int, RankStates]) -> Path | None:
    """The folder that the cells' files lie in, if there is any file."""
    models = [states.file.path for cell in cells.values() for states in cell.model.values()]
    others = [states.file.path for cell in cells.values() for states in cell.optimizer.values()]
    return next((path.parent for path in (*models, *others)), None)


def check_cells(cells: Mapping[int, RankStates], count: int, what: str) -> None:
    """Refuse a grid in which cells are missing or in excess."""
    if count > MAX_DEGREE:
        raise DamagedCheckpointError(
            f"records an impossible number of {what}",
            path=tag_dir_of(cells),
            found=count,
            expected=f"1 to {MAX_DEGREE}",
            hint="Copy the model files again",
        )
    have = {index for index, cell in cells.items() if cell.first_model is not None}
    missing = sorted(set(range(count)) - have)
    if missing:
        name = rank_file_name(RankFileKind.MODEL, mp_rank=missing[0])
        raise IncompleteCheckpointError(
            f"lacks the model files of {what} {ranges_of(missing)}",
            path=tag_dir_of(cells),
            found=f"{what} {ranges_of(have)}",
            expected=f"{count} of them, *{name} and the like",
            hint="Copy them from the nodes that wrote them",
        )
    if surplus := sorted(set(cells) - set(range(count))):
        raise DamagedCheckpointError(
            f"has files of {what} {ranges_of(surplus)}, more than it records",
            path=tag_dir_of(cells),
            found=f"{len(cells)} model-parallel indices",
            expected=count,
            hint="Remove what another save left here",
        )


def disagreements(tag_dir: Path, cells: Mapping[int, RankStates]) -> Iterator[ZexportError]:
    """Facts that every model-parallel index of one save states alike, and these do not."""
    models = {i: cell.first_model for i, cell in sorted(cells.items()) if cell.first_model}
    steps = {i: step_of(one) for i in models if (one := cells[i].first_optimizer) is not None}
    stated: list[tuple[Fact, Mapping[int, object]]] = [
        (Fact.GLOBAL_STEP, {i: m.global_steps for i, m in models.items()}),
        (Fact.OPTIMIZER_STEP, steps),
        (Fact.DEEPSPEED_VERSION, {i: m.ds_version for i, m in models.items()}),
        (Fact.CELL_WORLD_SIZE, {i: cells[i].world_size for i in models}),
        (Fact.STAGE, {i: cells[i].is_zero3 for i in models}),
    ]
    for found in facts.disagreements(stated_by_rank(stated)):
        yield found.error(tag_dir, _name_cells)


def _name_cells(cells: Iterable[int]) -> str:
    return f"model-parallel ranks {ranges_of(cells)}"
