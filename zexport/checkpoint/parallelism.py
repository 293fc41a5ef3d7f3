"""In how many ways a model was split, as far as its files say it, be they whole or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zexport.checkpoint.contents import Parallelism
from zexport.checkpoint.rank_files import RankFile, RankFileKind
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.states import ModelStates
from zexport.checkpoint.structure import Structure
from zexport.errors import LayoutError, ZexportError


def parallelism_of(
    structure: Structure, files: Sequence[RankFile], cells: Mapping[int, RankStates]
) -> Parallelism:
    """The degrees that a checkpoint states; ones where it says nothing that can be read.

    Args:
        structure: what ``recognise`` says.
        files: the rank files.
        cells: the states of each model-parallel index.
    """
    models = [cell.first_model for _, cell in sorted(cells.items()) if cell.first_model is not None]
    if structure in (Structure.DATA, Structure.UNIVERSAL) or not models:
        return Parallelism()
    try:
        if structure is Structure.TENSOR:
            return Parallelism(tensor_ranks=max(models[0].tensor_parallel, len(cells)))
        if structure is Structure.PIPELINE:
            return _stages(models[0], files)
        return _experts(models, files)
    except (ZexportError, LayoutError):  # assembling tells it as a problem
        return Parallelism()


def _stages(model: ModelStates, files: Sequence[RankFile]) -> Parallelism:
    from zexport.checkpoint.cells import recorded_grid  # noqa: PLC0415 - as in assemble

    grid = recorded_grid(model)
    if grid is not None:
        return Parallelism(grid.stages, grid.tensor)
    tensor = max((file.tensor_rank for file in files), default=0) + 1
    return Parallelism(max(model.tensor_parallel // tensor, 1), tensor)


def _experts(models: Sequence[ModelStates], files: Sequence[RankFile]) -> Parallelism:
    from zexport.checkpoint.cells import recorded_grid  # noqa: PLC0415 - as in assemble
    from zexport.checkpoint.layouts.expert_states import (  # noqa: PLC0415
        read_autoep_layers,
        read_num_experts,
    )

    grid = recorded_grid(models[0])
    layers = [layer for model in models for layer in read_autoep_layers(model)]
    degrees = {len(layer.held) for layer in layers}
    if not layers:
        degrees = set(_native_degrees(models[0], files))
    return Parallelism(
        stages=grid.stages if grid is not None else 1,
        tensor_ranks=grid.tensor if grid is not None else 1,
        expert_ranks=tuple(sorted(degrees)),
        experts=tuple(count for model in models for count in read_num_experts(model)),
    )


def _native_degrees(model: ModelStates, files: Sequence[RankFile]) -> Iterator[int]:
    """DeepSpeed-MoE: an optimizer file for every expert rank, or the share that one rank names."""
    from zexport.checkpoint.layouts.expert_states import (  # noqa: PLC0415 - as in assemble
        parse_native,
        read_num_experts,
    )

    ranks = [file.rank for file in files if file.kind is RankFileKind.EXPERT_OPTIMIZER]
    if ranks:
        yield max(ranks) + 1
        return
    named = [parse_native(name) for group in model.param_shapes for name in group]
    held: dict[str, set[int]] = {}
    for name in named:
        if name is not None:
            held.setdefault(name.prefix, set()).add(name.number)
    for count, own in zip(read_num_experts(model), held.values(), strict=False):
        yield count // len(own)
