"""ZeRO-3: every parameter is cut into equal stripes, one a rank, padded by itself.

Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/partition_parameters.py`` (``_partition_param``) and
``runtime/zero/stage3.py`` (``_set_fp32_optimizer_param_groups``): stripe ``d`` of a parameter of
``n`` elements holds elements ``d * k`` to ``(d + 1) * k``, ``k = ceil(n / world_size)``; a rank's
flat data is the stripes of all parameters in the order of ``param_shapes``, end to end. A group's
data is cut between parameters into sub-groups (``_create_fp16_sub_groups``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from msgspec import Struct

from zexport.errors import LayoutError
from zexport.ranges.dtypes import Shape


class StripedParameter(Struct, frozen=True):
    """Where one parameter lies: its stripe is at the same ``offset`` of every rank's flat data."""

    name: str
    shape: Shape
    numel: int
    offset: int
    stripe_numel: int


def stripe_numel(numel: int, world_size: int) -> int:
    """Elements that each rank holds of a parameter of ``numel`` elements, padding included."""
    return -(-numel // world_size)


def stripe_parameters(
    param_shapes: Sequence[Mapping[str, Shape]], world_size: int
) -> Iterator[StripedParameter]:
    """Every parameter with its place, in the order of ``param_shapes`` (one dict per sub-group)."""
    offset = 0
    for shapes in param_shapes:
        for name, shape in shapes.items():
            numel = prod(shape)
            stripe = stripe_numel(numel, world_size)
            yield StripedParameter(name, shape, numel, offset, stripe)
            offset += stripe


def sub_groups(numels: Sequence[int], world_size: int, size: int | None) -> list[range]:
    """Which parameters of a group, of so many elements each, are a sub-group together.

    One is full when its stripes reach ``size`` elements, and the last takes what is left.
    """
    stripes = [stripe_numel(numel, world_size) for numel in numels]
    if size is None or size >= sum(stripes):
        return [range(len(numels))]
    found, begin, held = [], 0, 0
    for index, stripe in enumerate(stripes):
        held += stripe
        if held >= size or index == len(stripes) - 1:
            found.append(range(begin, index + 1))
            begin, held = index + 1, 0
    return found


def padding_numel(parameters: Iterable[StripedParameter], world_size: int) -> int:
    """Elements of the last ranks' stripes, over all parameters, that belong to none."""
    return sum(one.stripe_numel * world_size - one.numel for one in parameters)


def check_flat_numels(
    param_shapes: Sequence[Mapping[str, Shape]], flat_numels: Sequence[int]
) -> None:
    """Hold every rank's flat length against the shapes: they must agree to the element.

    Source of the hint: DeepSpeed 0.19.8, ``runtime/zero/partition_parameters.py`` cuts for all
    ranks, and ``runtime/engine.py`` (``_get_zero_ckpt_name``) counts those of the mesh's data axis.
    """
    world_size = len(flat_numels)
    numels = [prod(shape) for shapes in param_shapes for shape in shapes.values()]
    expected = sum(stripe_numel(numel, world_size) for numel in numels)
    for rank, found in enumerate(flat_numels):
        if found != expected:
            more = world_size * round(expected / max(found, 1))
            is_of_more = found == sum(stripe_numel(numel, more) for numel in numels)
            raise LayoutError(
                f"the flat groups of rank {rank} do not add up to the parameters",
                f"{found} elements",
                f"{expected}, the stripes of all parameters on {world_size} ranks",
                _WRITTEN_OVER.format(more) if is_of_more else None,
            )


_WRITTEN_OVER = (
    "These are stripes on {} ranks, and the other files are not there. Where DeepSpeed's "
    "configuration has data_parallel_size and sequence_parallel_size, ranks that share a sequence "
    "write over each other's files under ZeRO-3, and what they held is lost. Train with an mpu in "
    "their place, such as DeepSpeed's parallel_state_sp"
)
