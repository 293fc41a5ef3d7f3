"""Whether two ranks' optimizer files are one file twice, where no name within them tells."""

from __future__ import annotations

from collections.abc import Iterator

from zexport.checkpoint.layouts.zero3 import StripedParameter, stripe_parameters
from zexport.checkpoint.model_states import ZERO3
from zexport.checkpoint.optimizer_states import OptimizerStates
from zexport.checkpoint.rank_files import written_as
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.same_save import step_of
from zexport.errors import DamagedCheckpointError, ZexportError
from zexport.ranges.extents import ByteSource, Chain
from zexport.store.contents import read_range, same_bytes

_SAMPLE_NUMEL = 1024
_DISTINCT_MIN = 64
"""Values that a sample must have, so that equal ones are no coincidence of constants."""


def copied_files(ranks: RankStates) -> Iterator[ZexportError]:
    """ZeRO-3's optimizer files that are those of another rank to the last byte.

    No key in them says which rank wrote them. Only files are compared whose container does not say
    it either, and that have equal samples of the largest weight.

    Nor are files of ranks beyond those that the weights are striped over, since further groups of
    ranks hold rightful copies (MiCS).
    """
    model, world_size = ranks.model.get(0), ranks.world_size
    optimizer = {r: s for r, s in ranks.optimizer.items() if world_size is None or r < world_size}
    counts = {count for states in optimizer.values() for count in states.partition_counts}
    if model is None or len(counts) != 1 or not all(map(_is_anonymous, optimizer.values())):
        return
    parameters = stripe_parameters(model.param_shapes, max(1, *counts))
    largest = max(parameters, key=lambda one: one.stripe_numel, default=None)
    if largest is None:
        return
    first: dict[bytes, int] = {}
    for rank, states in sorted(optimizer.items()):
        sample = _sample(states, rank, largest)
        other = first.setdefault(sample, rank) if sample else rank
        path, kept = states.file.path, optimizer[other].file.path
        if other != rank and same_bytes(kept, path):
            yield DamagedCheckpointError(
                f"is the optimizer file of rank {other} to the last byte: one is the other's copy",
                path=path,
                found=f"the same {states.file.version.nbytes} bytes as {kept.name}",
                expected=f"the stripes of rank {rank}",
                hint="Copy the files of both ranks again from where they were written",
            )


def _is_anonymous(states: OptimizerStates) -> bool:
    """Whether it is a file of plain ZeRO-3 whose container does not say which rank's it is."""
    return states.stage == ZERO3 and not states.stripes_experts and written_as(states.file) is None


def _sample(states: OptimizerStates, rank: int, largest: StripedParameter) -> bytes:
    """Elements of the rank's stripe of the largest weight that no other rank's can equal.

    Nothing where that may be: a stripe with padding, few values, or a weight that was not stepped
    (as it was made, by a rule that may repeat itself).
    """
    numel = min(largest.stripe_numel, _SAMPLE_NUMEL)
    is_whole = (rank + 1) * largest.stripe_numel <= largest.numel
    if not is_whole or not (step_of(states) or 0) >= 1 or not states.flat_groups:
        return b""
    try:
        flat = Chain(tuple(states.file.source(group) for group in states.flat_groups))
    except ZexportError:
        return b""  # whoever lays out the weights meets it as well, and tells
    size = states.flat_groups[0].dtype.itemsize
    begin, end = largest.offset * size, (largest.offset + numel) * size
    sample = _read(flat, begin, end) if end <= flat.nbytes else b""
    values = {sample[at : at + size] for at in range(0, len(sample), size)}
    return sample if len(values) >= _DISTINCT_MIN else b""


def _read(source: ByteSource, begin: int, end: int) -> bytes:
    extents = source.extents(begin, end)
    return b"".join(read_range(one.path, one.offset, one.nbytes) for one in extents)
