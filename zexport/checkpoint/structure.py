"""Which kind of parallelism wrote a tag folder, by its files' names and by what they say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path

from zexport.checkpoint.rank_files import RankFile, RankFileKind
from zexport.checkpoint.ranks import RankStates


class Structure(Enum):
    """How the model was split, beside the data parallelism that there always is."""

    DATA = "data parallelism alone"
    TENSOR = "tensor parallelism"
    PIPELINE = "pipeline parallelism"
    EXPERTS = "expert parallelism"
    UNIVERSAL = "none: converted to a universal checkpoint"


def recognise(
    tag_dir: Path, files: Iterable[RankFile], cells: Mapping[int, RankStates]
) -> Structure:
    """The structure of the checkpoint in ``tag_dir``.

    Args:
        tag_dir: the tag folder.
        files: its rank files.
        cells: the states of each model-parallel index.
    """
    kinds = {file.kind for file in files}
    models = [cell.first_model for cell in cells.values() if cell.first_model is not None]
    optimizers = [cell.first_optimizer for cell in cells.values()]
    if (tag_dir / "zero").is_dir() and RankFileKind.OPTIMIZER not in kinds:
        return Structure.UNIVERSAL
    if RankFileKind.PIPELINE_LAYER in kinds:
        return Structure.PIPELINE
    if kinds & {RankFileKind.EXPERT, RankFileKind.EXPERT_OPTIMIZER} or (
        any(model.has_experts for model in models)
        or any(states is not None and states.stripes_experts for states in optimizers)
    ):
        return Structure.EXPERTS
    if max(cells, default=0) > 0 or any(model.tensor_parallel > 1 for model in models):
        return Structure.TENSOR
    return Structure.DATA


def lacking_optimizer_files(
    structure: Structure, files: Iterable[RankFile], cells: Mapping[int, RankStates]
) -> list[int]:
    """The model-parallel indices without any of the optimizer files that their weights lie in.

    Wherever ZeRO holds weights, ``param_shapes`` names them; under ZeRO-0 it is ``None``. Only a
    conversion to universal moves them elsewhere.
    """
    if structure is Structure.UNIVERSAL:
        return []
    written = {file.mp_rank for file in files if file.kind is RankFileKind.OPTIMIZER}
    models = {index: cell.first_model for index, cell in cells.items() if index not in written}
    return [index for index, model in models.items() if model and any(model.param_shapes)]
