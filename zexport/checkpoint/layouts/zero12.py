"""ZeRO-1 and ZeRO-2: the parameters of a group lie end to end, and the ranks share the whole.

Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py`` (``flatten_dense_tensors_aligned``
and ``_get_groups_without_padding``) and ``runtime/bf16_optimizer.py``: a group is padded at its end
to a multiple of ``2 * world_size`` elements and cut into equal partitions; ZeRO-1/2 saves a
partition without the padding that falls into it, BF16_Optimizer saves it whole. With
``round_robin_gradients`` the parameters are dealt out first (``_round_robin_reorder``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from msgspec import Struct

from zexport.errors import LayoutError
from zexport.ranges.dtypes import Shape

_ALIGNMENT = 2
"""Elements of a rank's partition are a multiple of these (``nccl_start_alignment_factor``)."""


class FlatParameter(Struct, frozen=True):
    """Where one parameter lies: ``offset`` elements into its group's partitions, in rank order."""

    name: str
    shape: Shape
    numel: int
    offset: int


def place_parameters(
    shapes: Mapping[str, Shape], paddings: Sequence[int] = ()
) -> Iterator[FlatParameter]:
    """Every parameter of one group with its place, in order.

    ``paddings`` are elements of padding after each one (``param_alignment_paddings``, written by
    DeepSpeed 0.19 where ``parameter_alignment`` is on); empty where there are none.
    """
    _check_paddings(shapes, paddings)
    offset = 0
    for index, (name, shape) in enumerate(shapes.items()):
        numel = prod(shape)
        yield FlatParameter(name, shape, numel, offset)
        offset += numel + (paddings[index] if paddings else 0)


def _check_paddings(shapes: Mapping[str, Shape], paddings: Sequence[int]) -> None:
    if paddings and (len(paddings) != len(shapes) or min(paddings) < 0):
        raise LayoutError(
            "param_alignment_paddings does not fit param_shapes",
            list(paddings),
            f"{len(shapes)} numbers, 0 or more",
        )


def partition_numel(numel: int, world_size: int) -> int:
    """Elements of each partition of a group of ``numel`` elements, padding included."""
    return -(-numel // (_ALIGNMENT * world_size)) * _ALIGNMENT


def padding_in(numel: int, world_size: int, partition: int) -> int:
    """Elements of one partition that lie behind the group's ``numel``; a small group's are many."""
    full = partition_numel(numel, world_size)
    return min(full, max(0, (partition + 1) * full - numel))


def dealt_out(count: int, world_size: int) -> list[int]:
    """The order of ``count`` parameters under round robin, by their places in the group."""
    return [index for rank in range(world_size) for index in range(rank, count, world_size)]


def padding_numel(parameters: Iterable[FlatParameter], numel: int) -> int:
    """Elements of a group's ``numel`` that belong to no parameter: after each of them, and last.

    The parameters are in the order of their offsets.
    """
    end = padding = 0
    for parameter in parameters:
        padding += parameter.offset - end
        end = parameter.offset + parameter.numel
    return padding + numel - end


def fragments(
    parameters: Iterable[FlatParameter], partition_numel: int, partition: int
) -> dict[str, tuple[int, int]]:
    """First element and number of elements of every parameter that lies in one partition."""
    begin, end = partition * partition_numel, (partition + 1) * partition_numel
    found = {}
    for parameter in parameters:
        first = max(parameter.offset, begin)
        last = min(parameter.offset + parameter.numel, end)
        if first < last:
            found[parameter.name] = (first - begin, last - first)
    return found


def check_fragments(
    parameters: Sequence[FlatParameter],
    partition_numel: int,
    recorded: Sequence[Mapping[str, tuple[int, int]]],
) -> None:
    """Hold what each rank records of its partition against the places of the parameters.

    It shows rank files that were exchanged and parameters in another order, where lengths do not.
    Where no rank records anything there is nothing to hold.
    """
    for rank, found in enumerate(recorded if any(recorded) else ()):
        expected = fragments(parameters, partition_numel, rank)
        if found != expected:
            name = next(n for n in {**expected, **found} if found.get(n) != expected.get(n))
            raise LayoutError(
                f"the partition of rank {rank} is another than its number says",
                f"{name!r} at {found.get(name)} in its param_slice_mappings",
                f"{expected.get(name)}, first element and length, by param_shapes",
            )


def check_partitions(
    shapes: Mapping[str, Shape],
    partition_numels: Sequence[int],
    *,
    paddings: Sequence[int] = (),
) -> None:
    """Hold the lengths of one group's partitions against its shapes.

    Every partition that the parameters reach into is long enough, and all before the last of these
    are equal, so that laying the partitions end to end puts each parameter at its offset. What is
    left over is at most the padding to a multiple of ``2 * world_size`` elements.
    """
    _check_paddings(shapes, paddings)
    world_size = len(partition_numels)
    full = partition_numels[0]
    used = sum(prod(shape) for shape in shapes.values()) + sum(paddings)
    alignment = _ALIGNMENT * world_size
    if not used <= full * world_size <= -(-used // alignment) * alignment:
        raise LayoutError(
            "the partitions do not add up to the parameters",
            f"{world_size} partitions of {full} elements",
            f"{used} in all, and at most the padding to a multiple of {alignment}",
        )
    for rank, numel in enumerate(partition_numels):
        needed = min(full, max(0, used - rank * full))
        if not needed <= numel <= full:
            raise LayoutError(
                f"the partition of rank {rank} has the wrong length",
                f"{numel} elements",
                f"{needed} to {full}",
            )
