"""Dividing a plan among workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from zexport.export.plan import FilePlan, TensorPlan
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Extent
from zexport.run.shares import divide

_SIZES = st.lists(st.lists(st.integers(0, 50_000), max_size=6), min_size=1, max_size=4)


def _files(numels: Sequence[Sequence[int]], dtype: DType = DType.F32) -> list[FilePlan]:
    return [_file(number, own, dtype) for number, own in enumerate(numels)]


def _file(number: int, numels: Sequence[int], dtype: DType) -> FilePlan:
    tensors = []
    offset = 8
    for index, numel in enumerate(numels):
        name, source = f"{number}.{index}", Extent(Path("ckpt"), 0, numel * dtype.itemsize)
        tensors.append(TensorPlan(name, (numel,), dtype, name, dtype, source, offset))
        offset += numel * dtype.itemsize
    return FilePlan(f"{number}.safetensors", bytes(8), tuple(tensors))


@given(_SIZES, st.integers(1, 9))
def test_shares_are_everything_once_and_in_order(numels: list[list[int]], count: int) -> None:
    files = _files(numels)
    shares = divide(files, count)
    assert len(shares) == count
    for file in files:
        own = [s for share in shares for s in share if s.file.filename == file.filename]
        assert own[0].start == 0
        assert own[-1].stop == file.data_nbytes
        assert all(one.stop == other.start for one, other in pairwise(own))
        assert all(stretch.start % 4 == 0 for stretch in own)
