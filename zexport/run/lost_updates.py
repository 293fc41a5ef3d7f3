"""How much of an adapter's update the type of an export keeps, by samples of what is merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from zexport.export.plan import ExportPlan, TensorPlan
from zexport.export.proof import WeightReader
from zexport.findings import Finding, FindingKind
from zexport.ranges.casts import bits_seen_as
from zexport.ranges.computed import ComputedExtent, LowRankUpdate, ScaledSum
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Read

_TENSORS_MAX = 128
_SAMPLE_NUMEL = 1024
_Window: TypeAlias = "tuple[LowRankUpdate | ScaledSum, int, int]"
"""Some elements of what is worked out: from which on, and how many."""

_Read: TypeAlias = tuple[bytearray, DType]
"""Elements, and their type."""

_LEAST_KEPT = 20
"""One element in so many has to stay changed. A tenth of honest updates' elements and more do."""


def compare_roundings(plan: ExportPlan, sources: WeightReader) -> tuple[Finding, ...]:
    """A finding where nearly all that an adapter changes is the base again, once it is rounded.

    A base's own 16-bit values are exact in such a type, and what is added to them is lost wherever
    it is less than half of a last place. Other updates are taken as they are: nothing is read.
    """
    updated = [
        tensor
        for file in plan.shards
        for tensor in file.tensors
        if tensor.dtype is not tensor.stored_dtype and next(_updated(tensor), None) is not None
    ]
    if not updated:
        return ()
    changed = kept = 0
    with sources.samples() as samples:
        for tensor in updated[:: -(-len(updated) // _TENSORS_MAX)]:
            for window in _updated(tensor):
                base, merged = _sides(window, samples.read_into)
                changed += _unlike(base, merged, DType.F32)
                kept += _unlike(base, merged, tensor.dtype)
    if kept * _LEAST_KEPT >= changed:
        return ()
    dtype = updated[0].dtype.value.lower()
    share = f"{100 * kept / changed:.1f} % of what the adapter changes differs from the base"
    found = FindingKind.UPDATE_LOST
    return (Finding(found, "", 0, f"as {dtype}, {share}", accepted=found in plan.allow),)


def _updated(tensor: TensorPlan) -> Iterator[_Window]:
    """The middle of a tensor, as far as it is a base with an update."""
    itemsize, numel = tensor.stored_dtype.itemsize, min(tensor.numel, _SAMPLE_NUMEL)
    start = (tensor.numel - numel) // 2
    for extent in tensor.source.extents(start * itemsize, (start + numel) * itemsize):
        if isinstance(extent, ComputedExtent) and isinstance(extent.of, LowRankUpdate | ScaledSum):
            yield extent.of, extent.offset // itemsize, extent.nbytes // itemsize


def _sides(window: _Window, read: Read) -> tuple[_Read, _Read]:
    """The elements of the base, and of base and update together."""
    update, first, numel = window
    sides = (update.base.source, update.base.dtype), (update, DType.F32)
    found = []
    for source, dtype in sides:
        elements = bytearray(numel * dtype.itemsize)
        read(source, first * dtype.itemsize, memoryview(elements))
        found.append((elements, dtype))
    base, merged = found
    return base, merged


def _unlike(one: _Read, other: _Read, seen_as: DType) -> int:
    """How many elements differ once both are of a type."""
    bits = (bits_seen_as(*side, seen_as) for side in (one, other))
    return int(np.count_nonzero(np.not_equal(*bits)))
