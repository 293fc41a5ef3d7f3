"""Estimate how much of an adapter update survives rounding to the output dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from zexport.export.checked_reader import WeightReader
from zexport.export.plan import ExportPlan, TensorPlan
from zexport.findings import Finding, FindingKind, Findings
from zexport.ranges.cast import bits_seen_as
from zexport.ranges.computed import ComputedExtent, LowRankUpdate, ScaledSum
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Read

_TENSORS_MAX = 128
_SAMPLE_NUMEL = 1024
_LEAST_KEPT = 20
"""One in 20 changed elements must survive rounding; of honest updates, one in 10 or more do."""

_Window: TypeAlias = "tuple[LowRankUpdate | ScaledSum, int, int]"
"""An update, and the first and the number of its elements to compare."""


def compare_roundings(plan: ExportPlan, sources: WeightReader) -> Findings:
    """Return a finding if rounding turns nearly all changed weights back into those of the base.

    A 16-bit dtype stores the base exactly, and loses an update of less than half its last place.
    Only samples of merged tensors are read.
    """
    updated = [
        tensor
        for file in plan.shards
        for tensor in file.tensors
        if tensor.dtype is not tensor.stored_dtype and any(_updates_in(tensor))
    ]
    if not updated:
        return ()
    changed = kept = 0
    with sources.samples() as samples:
        for tensor in updated[:: -(-len(updated) // _TENSORS_MAX)]:
            for update, first, numel in _updates_in(tensor):
                window = (first, numel, samples.read_into)
                before = _elements(update.base.source, update.base.dtype, *window)
                after = _elements(update, DType.F32, *window)
                changed += _count(before, after, DType.F32)
                kept += _count(before, after, tensor.dtype)
    if kept * _LEAST_KEPT >= changed:
        return ()
    dtype = updated[0].dtype.value.lower()
    share = f"{100 * kept / changed:.1f} % of what the adapter changes differs from the base"
    found = FindingKind.UPDATE_LOST
    return (Finding(found, "", 0, f"as {dtype}, {share}", accepted=found in plan.allow),)


def _updates_in(tensor: TensorPlan) -> Iterator[_Window]:
    """Yield the updates in the middle of a tensor."""
    itemsize, numel = tensor.stored_dtype.itemsize, min(tensor.numel, _SAMPLE_NUMEL)
    start = (tensor.numel - numel) // 2
    for extent in tensor.source.extents(start * itemsize, (start + numel) * itemsize):
        if isinstance(extent, ComputedExtent) and isinstance(extent.of, LowRankUpdate | ScaledSum):
            yield extent.of, extent.offset // itemsize, extent.nbytes // itemsize


def _elements(
    source: ByteSource, dtype: DType, first: int, numel: int, read: Read
) -> tuple[bytearray, DType]:
    elements = bytearray(numel * dtype.itemsize)
    read(source, first * dtype.itemsize, memoryview(elements))
    return elements, dtype


def _count(before: tuple[bytearray, DType], after: tuple[bytearray, DType], dtype: DType) -> int:
    return int(np.count_nonzero(bits_seen_as(*before, dtype) != bits_seen_as(*after, dtype)))
