"""BF16_Optimizer without ZeRO: slices name its parameters, so that it is read as ZeRO-1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from operator import itemgetter

from msgspec.structs import replace

from zexport.checkpoint.zero.ranks import Ranks
from zexport.checkpoint.zero.records import OptimizerStates, flat_optimizer
from zexport.errors import LayoutError
from zexport.ranges.dtypes import Shape

NAMED = "single_partition_of_fp32_groups"


def _named_in_model(ranks: Ranks) -> Mapping[int, OptimizerStates]:
    """Return the optimizer states files, or what the model states file has of rank 0."""
    root = ranks.first.root.get("optimizer")
    if ranks.optimizer or not root.has(NAMED):
        return ranks.optimizer
    return {0: flat_optimizer(ranks.first.file, root, None)}


def by_slices(ranks: Ranks, shapes: Mapping[str, Shape]) -> Ranks | None:
    """Return the ranks with ``param_shapes`` rebuilt from the slices that BF16_Optimizer records.

    ``None`` if there are no slices, or not of all partitions.
    """
    optimizer = _named_in_model(ranks)
    owners = [one for _, one in sorted(optimizer.items())]
    if not owners or max(owners[0].partition_counts, default=0) != len(owners):
        return None
    groups = []
    for slices in zip_longest(*(one.fragments for one in owners), fillvalue={}):
        places = [place for own in slices for place in sorted(own.items(), key=itemgetter(1))]
        if missing := [name for name, _ in places if name not in shapes]:
            raise LayoutError("fp32 master weights are of no weight", missing[0], "a weight")
        groups.append({name: shapes[name] for name, _ in places})
    model = replace(ranks.first, param_shapes=tuple(groups))
    return replace(ranks, model={0: model}, optimizer=optimizer, world_size=len(optimizer))


def slice_sizes(ranks: Ranks) -> dict[str, int]:
    """Return the number of elements of every parameter that BF16_Optimizer's slices name."""
    sizes: Counter[str] = Counter()
    for fragments in (own for one in _named_in_model(ranks).values() for own in one.fragments):
        sizes.update({name: numel for name, (_, numel) in fragments.items()})
    return sizes
