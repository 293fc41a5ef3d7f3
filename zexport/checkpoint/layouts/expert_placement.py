"""Expert parallelism: which ranks share an expert, and how the ranks' experts make up a layer.

Source: DeepSpeed 0.10 to 0.19, ``utils/groups.py`` (``_create_expert_and_data_parallel``): the
ranks are cut into ``ep_size`` sets that hold the same experts, each set sharing its flat groups as
ZeRO shares a dense one; ``runtime/engine.py`` (``_save_moe_checkpoint``): the experts of set
``e`` come after those of set ``e - 1``; ``checkpoint/autoep_affine.py``: AutoEP writes down who
holds which.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

from zexport.errors import LayoutError


class Placement(Enum):
    """How the ranks are cut into sets with the same experts.

    ``BLOCKS`` is ``use_data_before_expert_parallelism``; without it neighbours differ.
    """

    INTERLEAVED = "interleaved"
    BLOCKS = "blocks"

    def ranks(self, ep_rank: int, ep_size: int, world_size: int) -> range:
        """The ranks that hold the experts of ``ep_rank``, in the order of their partitions."""
        if self is Placement.BLOCKS:
            count = world_size // ep_size
            return range(ep_rank * count, (ep_rank + 1) * count)
        return range(ep_rank, world_size, ep_size)


def ep_size_of(partition_count: int, world_size: int) -> int:
    """The expert-parallel degree of a flat group of ``partition_count`` partitions."""
    if partition_count < 1 or world_size % partition_count:
        raise LayoutError(
            "the partitions of the experts do not divide the ranks",
            f"{partition_count} partitions",
            f"a divisor of {world_size} ranks",
        )
    return world_size // partition_count


def same_where_shared(placement: Placement, ep_size: int, contents: Sequence[Hashable]) -> bool:
    """Whether ``contents``, one a rank, is the same on all ranks that hold the same partition.

    These hold it for different experts, whose parameters have the same local names.
    """
    world_size = len(contents)
    sets = [placement.ranks(ep_rank, ep_size, world_size) for ep_rank in range(ep_size)]
    return all(len({contents[rank] for rank in ranks}) == 1 for ranks in zip(*sets, strict=True))


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """``count`` experts that follow each other in the layer and in the tensor of one ``ep_rank``.

    Attributes:
        ep_rank: who holds them.
        position: place of the first among those that ``ep_rank`` holds.
        count: how many.
    """

    ep_rank: int
    position: int
    count: int


def expert_runs(held: Sequence[Sequence[int]]) -> list[ExpertRun]:
    """The experts of a layer in their own order, out of what each expert-parallel rank holds."""
    places = {
        expert: (ep_rank, position)
        for ep_rank, experts in enumerate(held)
        for position, expert in enumerate(experts)
    }
    named = sorted(expert for experts in held for expert in experts)
    if named != list(range(len(named))):
        raise LayoutError("the expert placement does not name each expert once", named, "0, 1, ...")
    runs: list[ExpertRun] = []
    for expert in named:
        ep_rank, position = places[expert]
        last = runs[-1] if runs else None
        if last and (last.ep_rank, last.position + last.count) == (ep_rank, position):
            runs[-1] = ExpertRun(ep_rank, last.position, last.count + 1)
        else:
            runs.append(ExpertRun(ep_rank, position, 1))
    return runs


def uniform(num_experts: int, ep_size: int) -> list[range]:
    """The experts of each expert-parallel rank, dealt in equal and consecutive shares."""
    if ep_size < 1 or num_experts % ep_size:
        raise LayoutError(
            "the experts cannot be dealt out equally", f"{num_experts} experts", f"{ep_size} shares"
        )
    count = num_experts // ep_size
    return [range(e * count, (e + 1) * count) for e in range(ep_size)]


def sharing_sets(sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The distinct sets of ranks that share a flat group, by their first rank.

    That is the order of their experts: in both placements of DeepSpeed the expert-parallel rank
    grows with the first rank of its set.
    """
    distinct = sorted(set(sets))
    if sorted(rank for ranks in distinct for rank in ranks) != list(range(len(sets))) or any(
        rank not in ranks for rank, ranks in enumerate(sets)
    ):
        raise LayoutError(
            "the ranks do not agree on who shares a flat group",
            [list(ranks) for ranks in distinct],
            f"sets that hold each of the ranks 0 to {len(sets) - 1} once",
        )
    return distinct
