"""Reading a checkpoint as the state of a training, whatever its layout."""

from __future__ import annotations

from zexport.checkpoint.contents import Structure, ZeroCheckpoint
from zexport.checkpoint.rank_files import RankFileKind
from zexport.checkpoint.ranks import RankStates, is_zero0
from zexport.checkpoint.reading import swapped_out
from zexport.errors import DamagedCheckpointError, LayoutError
from zexport.ranges.replicas import Replica
from zexport.resharding.read_cells import no_states, read_cell
from zexport.resharding.read_experts import read_experts
from zexport.resharding.read_universal import read_universal
from zexport.resharding.read_zero0 import read_zero0
from zexport.resharding.state import CellState, TrainingState, is_of


def read_state(checkpoint: ZeroCheckpoint) -> TrainingState:
    """The state in a checkpoint without problems."""
    tag_dir = checkpoint.location.tag_dir
    if checkpoint.pruned_files:
        raise no_states(tag_dir, "which zexport prune has removed")
    if (swapped := swapped_out(tag_dir)) is not None:
        raise swapped
    try:
        if checkpoint.structure is Structure.UNIVERSAL:
            return read_universal(checkpoint)
        cells, replicas = _cells(checkpoint)
    except LayoutError as error:
        raise DamagedCheckpointError(
            error.problem,
            path=tag_dir,
            found=error.found,
            expected=error.expected,
            hint="Copy all rank files of one save again",
        ) from error
    # The masters of experts without ZeRO are in the files that are made anew.
    own = {file.path for ranks in checkpoint.cells.values() for file in ranks.files}
    return TrainingState(
        cells=tuple(cells),
        carried=tuple(
            file
            for file in checkpoint.torch_files
            if file.path not in own and not is_of(file, RankFileKind.EXPERT_OPTIMIZER)
        ),
        replicas=tuple(replicas),
    )


def _cells(checkpoint: ZeroCheckpoint) -> tuple[list[CellState], list[Replica]]:
    """Every cell, and copies that must be equal."""
    if checkpoint.structure is Structure.EXPERTS:
        return read_experts(checkpoint)
    read = [_read(index, ranks) for index, ranks in sorted(checkpoint.cells.items())]
    return [cell for cell, _ in read], [copy for _, copies in read for copy in copies]


def _read(index: int, ranks: RankStates) -> tuple[CellState, tuple[Replica, ...]]:
    model = ranks.first_model
    if model is not None and is_zero0(ranks):
        return read_zero0(index, model)
    return read_cell(index, ranks)
