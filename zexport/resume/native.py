"""A state as the rank files of another world size or stage, which ``load_checkpoint`` takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.checkpoint.states import ZERO3
from zexport.plan.plan import FilePlan, plan_torch_file
from zexport.resume.cuts import cuts_of
from zexport.resume.model_files import ModelFiles
from zexport.resume.optimizer_files import optimizer_value
from zexport.resume.settings import TargetSettings
from zexport.resume.state import TrainingState
from zexport.resume.values import with_leaves


def native_files(
    state: TrainingState, settings: TargetSettings, tag: str, dropped: Collection[str] = ()
) -> Iterator[FilePlan]:
    """Every rank file, in the folder of its tag; ``dropped`` are client keys to leave out.

    Raises:
        UnsafeError: a value to be carried is none that can be written safely.
        UnsupportedError: a group's states are not alike, and cannot lie in one run.
    """
    ranks = range(settings.world_size)
    is_zero3 = settings.stage == ZERO3
    kind = RankFileKind.MODEL_PER_RANK if is_zero3 else RankFileKind.MODEL
    prefix = "bf16_" if settings.is_bf16 else ""
    for file in state.carried:
        yield plan_torch_file(f"{tag}/{file.path.name}", with_leaves(file.value, file))
    for cell in state.cells:
        groups = cuts_of(cell, settings)
        flat_groups = [cut.parameters for group in groups for cut in group.cuts]
        models = ModelFiles(cell, flat_groups, settings, dropped)
        for rank in ranks if is_zero3 else ranks[:1]:
            name = rank_file_name(kind, rank, cell.index)
            yield plan_torch_file(f"{tag}/{name}", models.value(rank))
        for rank in ranks:
            name = rank_file_name(RankFileKind.OPTIMIZER, rank, cell.index, prefix=prefix)
            yield plan_torch_file(
                f"{tag}/{name}", optimizer_value(cell, groups, settings, rank, dropped)
            )
