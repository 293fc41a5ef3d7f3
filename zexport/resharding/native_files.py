"""A state as the rank files of another world size or stage, which ``load_checkpoint`` takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from zexport.checkpoint.layouts.expert_groups import Placement
from zexport.checkpoint.model_states import ZERO3
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.errors import UsageError
from zexport.plan.plan import FilePlan, plan_torch_file
from zexport.resharding.model_files import ModelFiles
from zexport.resharding.optimizer_files import Place, cuts_of, optimizer_value
from zexport.resharding.settings import TargetSettings
from zexport.resharding.state import CellState, TrainingState, is_of
from zexport.resharding.values import with_leaves

_OF_ADAGRAD = "initial_accumulator_value"
"""A setting that torch's Adagrad alone has."""


def native_files(
    state: TrainingState, settings: TargetSettings, tag: str, dropped: Collection[str] = ()
) -> Iterator[FilePlan]:
    """Every rank file, in the folder of its tag; ``dropped`` are client keys to leave out."""
    _check_experts(state, settings)
    _check_adagrad(state, settings)
    is_zero3 = settings.stage == ZERO3
    kind = RankFileKind.MODEL_PER_RANK if is_zero3 else RankFileKind.MODEL
    prefix = "bf16_" if settings.is_bf16 else ""
    for file in state.carried:
        if not (is_zero3 and is_of(file, RankFileKind.EXPERT)):  # which ZeRO-3 does without
            yield plan_torch_file(f"{tag}/{file.path.name}", with_leaves(file.value, file))
    for cell in state.cells:
        for name, content in () if is_zero3 else cell.expert_files:
            yield plan_torch_file(f"{tag}/{name}", dict(content))
        groups = cuts_of(cell, settings)
        flat_groups = [cut.parameters for group in groups for cut in group.cuts]
        models = ModelFiles(cell, flat_groups, settings, dropped)
        places = _places(cell, settings)
        for place in places if is_zero3 else (one for one in places if one.rank == 0):
            name = rank_file_name(kind, place.rank, cell.index)
            yield plan_torch_file(f"{tag}/{name}", models.value(place))
        for place in places:
            name = rank_file_name(RankFileKind.OPTIMIZER, place.rank, cell.index, prefix=prefix)
            yield plan_torch_file(
                f"{tag}/{name}", optimizer_value(cell, groups, settings, place, dropped)
            )


def _places(cell: CellState, settings: TargetSettings) -> list[Place]:
    """The ranks that have this state: all, or those with the experts of one expert-parallel rank.

    Source: DeepSpeed 0.19.8, ``utils/groups.py`` (``_create_expert_and_data_parallel``).
    """
    placement = Placement.BLOCKS if settings.is_data_before_experts else Placement.INTERLEAVED
    sharing = placement.sets(cell.expert_ranks, settings.world_size)[cell.expert_rank]
    return [Place(rank, sharing, settings.world_size) for rank in sharing]


def _check_adagrad(state: TrainingState, settings: TargetSettings) -> None:
    """Refuse torch's Adagrad under ZeRO-3, where DeepSpeed does not load what it saves either.

    It has made the optimizer anew from its flat groups, and adds them a second time to load them.
    Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py`` (``initialize_optimizer_states``,
    ``_rigid_load_state_dict``).
    """
    said = (
        group.settings.values for cell in state.cells for group in cell.groups if group.settings
    )
    if settings.stage == ZERO3 and any(_OF_ADAGRAD in one for one in said):
        raise UsageError(
            "DeepSpeed cannot go on with torch's Adagrad under ZeRO-3: it loads none of its states",
            path=state.cells[0].optimizer.file.path,
            found=f"{_OF_ADAGRAD} in a parameter group",
            hint="Pass --stage 2, or --stage 1",
        )


def _check_experts(state: TrainingState, settings: TargetSettings) -> None:
    """Refuse a number of ranks that the experts cannot be spread over as they are.

    Each expert-parallel rank keeps its experts: the optimizer's partitions hold what one rank has
    of several layers end to end, and with another degree DeepSpeed would make other groups.
    """
    degree = state.cells[0].expert_ranks
    if settings.world_size % degree:
        raise UsageError(
            f"experts that {degree} ranks share among them stay so, which --world-size must allow",
            path=state.cells[0].model.file.path,
            found=settings.world_size,
            expected=f"a multiple of {degree}",
        )
