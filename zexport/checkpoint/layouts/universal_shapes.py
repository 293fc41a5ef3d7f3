"""Universal checkpoints: one file a weight, already whole, held against the shapes of the shards.

Source: DeepSpeed 0.19, ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``,
``merge_zero3_slices``) and ``checkpoint/autoep_universal.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from zexport.checkpoint.layouts.zero3 import stripe_numel
from zexport.errors import LayoutError
from zexport.ranges.dtypes import Shape


def check_whole(
    name: str, whole: Shape, shards: Sequence[Shape], *, experts: int | None, cut: bool
) -> None:
    """Hold a whole weight against its shape in each model-parallel rank's ``param_shapes``."""
    if experts is not None:
        fits = whole[:1] == (experts,) and all(shard[1:] == whole[1:] for shard in shards)
    elif cut:
        rows = sum(shard[0] for shard in shards if shard)
        fits = all(shard[1:] == whole[1:] for shard in shards) and 0 < whole[0] <= rows
    else:
        fits = all(shard == whole for shard in shards) or _is_split(whole, shards)
    if not fits:
        raise LayoutError(
            f"the weight {name!r} has another shape than the model files say",
            list(whole),
            " and ".join(str(list(shard)) for shard in shards),
        )


def _is_split(whole: Shape, shards: Sequence[Shape]) -> bool:
    """Whether shards may be pieces of the whole: none is larger, and together they suffice."""
    return (
        len(shards) > 1
        and all(len(shard) == len(whole) for shard in shards)
        and all(n <= size for shard in shards for n, size in zip(shard, whole, strict=True))
        and prod(whole) <= sum(prod(shard) for shard in shards)
    )


def shape_of_flat(
    name: str, numel: int, shards: Sequence[Shape], world_size: int | None = None
) -> Shape:
    """The shape of a weight that is stored flat, as from ZeRO-3 without tensor parallelism."""
    whole = prod(shards[0])
    lengths = {whole, _with_padding(whole, world_size)} if world_size else {whole}
    if len(set(shards)) != 1 or numel not in lengths:
        raise LayoutError(
            f"the weight {name!r} has another length than the model files say",
            f"{numel} elements",
            " and ".join(str(list(shard)) for shard in shards),
        )
    return shards[0]


def _with_padding(numel: int, world_size: int) -> int:
    """The length that a converter gives a weight some of whose stripes are padding alone.

    It leaves behind the weight all stripes of padding but one, as it strips the absolute number of
    elements by which a stripe is beyond the end. Source: DeepSpeed 0.15 to 0.19.2,
    ``checkpoint/ds_to_universal.py`` (``extract_zero_shards_stage3``); 0.19.8 leaves none.
    """
    return max(numel, (world_size - 1) * stripe_numel(numel, world_size))
