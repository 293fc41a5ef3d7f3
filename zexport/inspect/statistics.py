"""Norm, min, max, mean, NaN and Inf counts of every tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from mmap import mmap

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zexport.checkpoint.state import TrainingState
from zexport.errors import DamagedCheckpointError, UnsupportedError, ZexportError
from zexport.export.checked_reader import WeightReader, account
from zexport.export.report import Meter, Progress
from zexport.ranges.ahead import announced
from zexport.ranges.cast import NUMPY

_BUFFER_NBYTES = 1 << 20
"""A block stays in the CPU cache while it is read several times."""


class TensorStatistics(Struct, frozen=True):
    """Statistics of one tensor; a complex element counts as two.

    Norm, min, max (exact) and mean are those of the finite elements. If there are none, the norm is
    0 and the others are ``None``.
    """

    name: str
    norm: float
    min: float | int | None
    max: float | int | None
    mean: float | None
    nan: int
    inf: int


class Measured(Struct, frozen=True):
    """Statistics of every tensor that has values, and values that an export would refuse."""

    tensors: tuple[TensorStatistics, ...]
    problems: tuple[ZexportError, ...]


def measure(
    checkpoint: TrainingState,
    *,
    progress: Callable[[Progress], None] | None = None,
    buffer_nbytes: int = _BUFFER_NBYTES,
) -> Measured:
    """Return the statistics of a checkpoint's tensors; memory does not grow with them.

    Raises:
        DamagedCheckpointError: a checksum differs.
    """
    sources = [
        (tensor, tensor.source) for tensor in checkpoint.tensors if tensor.source is not None
    ]
    meter = Meter(progress, to_verify=sum(source.nbytes for _, source in sources))
    buffer = memoryview(mmap(-1, max(buffer_nbytes, 8)))
    step = buffer.nbytes - buffer.nbytes % 8  # whole elements of every dtype
    blocks = (
        (tensor, source, start, min(start + step, source.nbytes))
        for tensor, source in sources
        for start in range(0, source.nbytes, step)
    )
    found = {tensor.name: _Statistics() for tensor, _ in sources}
    with (
        np.errstate(all="ignore"),
        WeightReader(checkpoint.torch_files, checkpoint.replicas) as reader,
    ):
        problems = tuple(_problems(checkpoint, reader))
        for tensor, source, start, stop in announced(
            blocks, lambda block: block[3] - block[2], lambda block: [block[1:]], reader.expect
        ):
            block = buffer[: stop - start]
            reader.read_into(source, start, block)
            found[tensor.name].add(np.frombuffer(block, NUMPY[tensor.dtype]))
            meter.verified(block.nbytes)
        reader.finish()
    return Measured(tuple(one.of(name) for name, one in found.items()), problems)


def _problems(checkpoint: TrainingState, reader: WeightReader) -> Iterator[ZexportError]:
    """Yield what an export would refuse: replicas that differ, elements of no parameter."""
    try:
        reader.compare()
    except DamagedCheckpointError as error:
        yield error
    if checkpoint.problems:
        return  # coverage needs all files
    try:
        account(checkpoint, checkpoint.tensors)
    except UnsupportedError as error:
        yield error


class _Statistics(Struct):
    """Statistics of the elements so far."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    norm: float = 0.0
    mean: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    def add(self, stored: npt.NDArray[np.generic]) -> None:
        if not stored.size:
            return
        values = stored.astype(np.float64)
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):  # NaN makes both NaN
            self.nan += int(np.count_nonzero(np.isnan(values)))
            self.inf += int(np.count_nonzero(np.isinf(values)))
            self.add(values[np.isfinite(values)])
            return
        # float64 does not represent every 64-bit integer.
        is_whole = np.issubdtype(stored.dtype, np.integer)
        self.minimum = min(self.minimum, stored.min().item() if is_whole else low)
        self.maximum = max(self.maximum, stored.max().item() if is_whole else high)
        # Scaled by a power of two, sums and squares cannot overflow. np.square, unlike a BLAS,
        # starts no threads.
        scale = math.ldexp(1.0, math.frexp(max(abs(low), abs(high)))[1] - 1)
        values /= scale
        self.count += values.size
        weight = values.size / self.count
        self.mean = self.mean * (1 - weight) + float(values.mean()) * scale * weight
        np.square(values, out=values)
        self.norm = math.hypot(self.norm, math.sqrt(float(values.sum())) * scale)

    def of(self, name: str) -> TensorStatistics:
        low, high, mean = self.minimum, self.maximum, self.mean
        if not self.count:
            return TensorStatistics(name, self.norm, None, None, None, self.nan, self.inf)
        return TensorStatistics(name, self.norm, low, high, mean, self.nan, self.inf)
