"""Which rank files are not there, by their names: what to fetch from the nodes that wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zexport.checkpoint.assembly.structure import Structure
from zexport.checkpoint.contents import Parallelism, Role
from zexport.checkpoint.rank_files import RankFile, RankFileKind
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.tensors import Inventory


def missing_files(
    structure: Structure,
    parallelism: Parallelism,
    files: Sequence[RankFile],
    cells: Mapping[int, RankStates],
    inventory: Inventory,
) -> tuple[str, ...]:
    """Names of the rank files that an export needs and that are not there.

    Model files but the first of ZeRO-3 are needed for their parts of frozen weights alone.

    Args:
        structure: what ``recognise`` says.
        parallelism: the degrees, which say how many model-parallel indices there must be.
        files: those that are there.
        cells: the states of each model-parallel index.
        inventory: the tensors; without a source where files are missing.
    """
    if not cells:
        return ()
    has_stripes = any(t.role is Role.FROZEN and t.source is None for t in inventory.tensors)
    expected = max(parallelism.stages * parallelism.tensor_ranks, max(cells) + 1)
    pattern = next(iter(cells.values()))
    names: list[str] = []
    for index in range(expected):
        cell = cells.get(index)
        optimizer_ranks = cell.missing_ranks if cell else range(pattern.world_size or 0)
        model_ranks = cell.missing_model_ranks if cell else (0,)
        if structure is not Structure.UNIVERSAL and (cell or pattern.optimizer):
            names += _optimizer_files(files, index, optimizer_ranks)
        names += _model_files(
            files,
            index,
            (rank for rank in model_ranks if rank == 0 or has_stripes),
            per_rank=(cell or pattern).is_zero3,
        )
    return tuple(names)


def _optimizer_files(files: Sequence[RankFile], index: int, ranks: Sequence[int]) -> Iterator[str]:
    prefix = "bf16_" if any(file.path.name.startswith("bf16_") for file in files) else ""
    for rank in ranks:
        yield f"{prefix}zero_pp_rank_{rank}_mp_rank_{index:02d}_optim_states.pt"


def _model_files(
    files: Sequence[RankFile], index: int, ranks: Iterator[int], *, per_rank: bool
) -> Iterator[str]:
    per_rank = per_rank or any(file.kind is RankFileKind.MODEL_PER_RANK for file in files)
    for rank in ranks:
        start = f"zero_pp_rank_{rank}_" if per_rank else ""
        yield f"{start}mp_rank_{index:02d}_model_states.pt"
