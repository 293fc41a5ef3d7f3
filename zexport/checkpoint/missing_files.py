"""Which rank files are not there, by their names: what to fetch from the nodes that wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from zexport.checkpoint.contents import Parallelism, Role
from zexport.checkpoint.layouts.data import Inventory
from zexport.checkpoint.rank_files import RankFile, RankFileKind, rank_file_name
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.structure import Structure

_MAX_NAMES = 100_000
"""Names that are given; a damaged file may claim any number of ranks."""


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
    there = {file.path.name for file in files}
    needed = _needed(structure, parallelism, files, cells, inventory)
    return tuple(islice((name for name in needed if name not in there), _MAX_NAMES))


def _needed(
    structure: Structure,
    parallelism: Parallelism,
    files: Sequence[RankFile],
    cells: Mapping[int, RankStates],
    inventory: Inventory,
) -> Iterator[str]:
    known = [cell.world_size for cell in cells.values() if cell.world_size is not None]
    world = range(max(known, default=1))
    has_stripes = any(t.role is Role.FROZEN and t.source is None for t in inventory.tensors)
    per_rank = any(cell.is_zero3 for cell in cells.values())
    has_masters = any(cell.optimizer or cell.missing_ranks for cell in cells.values())
    prefix = next((file.prefix for file in files if file.prefix), "")
    kind = RankFileKind.MODEL_PER_RANK if per_rank else RankFileKind.MODEL
    for index in range(parallelism.stages * parallelism.tensor_ranks) if cells else ():
        if has_masters and structure is not Structure.UNIVERSAL:
            for rank in world:
                yield rank_file_name(RankFileKind.OPTIMIZER, rank, index, prefix=prefix)
        for rank in world if per_rank and has_stripes else (0,):
            yield rank_file_name(kind, rank, index)
