"""Pipelines without ZeRO: the names of a flat group, out of the slices that its ranks hold.

Source: DeepSpeed 0.19.8, ``runtime/bf16_optimizer.py`` (``_create_param_mapping``): each rank
records, for every parameter that reaches into its partition, where in the partition its part begins
and how many elements it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zexport.errors import LayoutError


def order_slices(
    partitions: Sequence[Mapping[str, tuple[int, int]]], partition_numel: int
) -> dict[str, int]:
    """Every parameter of a group and its number of elements, in the order of the flat data.

    Args:
        partitions: for each rank, name to first element in the partition and number of elements.
        partition_numel: elements of a rank's partition.

    Raises:
        LayoutError: the slices do not follow one another without gaps.
    """
    numels: dict[str, int] = {}
    end, last = 0, None
    for rank, slices in enumerate(partitions):
        for name, (start, numel) in sorted(slices.items(), key=lambda item: item[1]):
            begins = rank * partition_numel + start
            fits = min(start, numel) >= 0 and start + numel <= partition_numel
            if not fits or begins != end or (name in numels and name != last):
                raise LayoutError(
                    f"rank {rank}'s slice of {name!r} does not follow the one before it",
                    f"elements {begins} to {begins + numel}",
                    f"a slice of its partition from element {end} on",
                )
            numels[name] = numels.get(name, 0) + numel
            end, last = begins + numel, name
    return numels
