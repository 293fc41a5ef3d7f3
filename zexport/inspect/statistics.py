"""What the values of a checkpoint are like: norm, extremes, mean, NaN and Inf of every tensor.

Values are read with proof, through one buffer of fixed size, and added up in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from mmap import mmap
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zexport.checkpoint.state import StoredTensor, TrainingState
from zexport.errors import DamagedCheckpointError, UnsupportedError, ZexportError
from zexport.export.progress import Meter, Progress
from zexport.export.proof import WeightReader, account
from zexport.ranges.ahead import announced
from zexport.ranges.cast import NUMPY
from zexport.ranges.source import ByteSource

_BUFFER_NBYTES = 1 << 20
"""Small enough that a block stays in the cache while it is looked at several times."""

# Squares of numbers in this range neither overflow nor vanish when added up.
_SAFE_MIN, _SAFE_MAX = 1e-140, 1e140


class TensorStatistics(Struct, frozen=True):
    """What the elements of one tensor are like; a complex element counts as two.

    Norm, extremes (exact) and mean are those of the finite elements; without any, the norm is 0 and
    the others are ``None``.
    """

    name: str
    norm: float
    min: float | int | None
    max: float | int | None
    mean: float | None
    nan: int
    inf: int


class Measured(Struct, frozen=True):
    """Of every tensor whose values are there; and for what values an export would be refused."""

    tensors: tuple[TensorStatistics, ...]
    problems: tuple[ZexportError, ...]


def measure(
    checkpoint: TrainingState,
    *,
    progress: Callable[[Progress], None] | None = None,
    buffer_nbytes: int = _BUFFER_NBYTES,
) -> Measured:
    """The statistics of a checkpoint's tensors, and what is wrong with their values.

    Memory does not grow with the tensors; every byte is read once, but for those of second copies.
    """
    sources = [(t, t.source) for t in checkpoint.tensors if t.source is not None]
    meter = Meter(progress, to_verify=sum(source.nbytes for _, source in sources))
    buffer = memoryview(mmap(-1, max(buffer_nbytes, 8)))
    with WeightReader(checkpoint.torch_files, checkpoint.replicas) as reader:
        problems = tuple(_problems(checkpoint, reader))
        found = []
        groups = groupby(_parts(sources, reader, buffer), key=lambda part: part[0])
        for (tensor, source), (_, parts) in zip(sources, groups, strict=True):
            found.append(_measured(tensor, (part for _, part in parts)))
            meter.verified(source.nbytes)
        reader.finish()
    return Measured(tuple(found), problems)


def _problems(checkpoint: TrainingState, reader: WeightReader) -> Iterator[ZexportError]:
    """What an export would be refused for once it reads; a difference can still be looked at."""
    try:
        reader.compare()
    except DamagedCheckpointError as error:
        yield error
    if checkpoint.problems:
        return  # what is missing is in no account
    try:
        account(checkpoint, checkpoint.tensors)
    except UnsupportedError as error:
        yield error


def _measured(tensor: StoredTensor, parts: Iterable[memoryview]) -> TensorStatistics:
    sums = _Sums()
    with np.errstate(all="ignore"):
        for part in parts:
            sums.add(np.frombuffer(part, NUMPY[tensor.dtype]))
    low, high, mean = (sums.minimum, sums.maximum, sums.mean) if sums.count else (None, None, None)
    return TensorStatistics(tensor.name, sums.norm, low, high, mean, sums.nan, sums.inf)


_Part: TypeAlias = tuple[StoredTensor, ByteSource, int, int]


def _parts(
    sources: Sequence[tuple[StoredTensor, ByteSource]], reader: WeightReader, buffer: memoryview
) -> Iterator[tuple[StoredTensor, memoryview]]:
    """The bytes of each, a buffer at a time; a buffer holds whole elements of any type."""
    step = buffer.nbytes - buffer.nbytes % 8
    every: Iterator[_Part] = (
        (tensor, source, start, min(start + step, source.nbytes))
        for tensor, source in sources
        for start in range(0, max(source.nbytes, 1), step)
    )
    told = announced(every, lambda one: one[3] - one[2], lambda one: [one[1:]], reader.expect)
    for tensor, source, start, stop in told:
        reader.read_into(source, start, buffer[: stop - start])
        yield tensor, buffer[: stop - start]


class _Sums(Struct):
    """What has been seen so far."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    norm: float = 0.0
    mean: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    def add(self, stored: npt.NDArray[np.generic]) -> None:
        """Take some elements into account."""
        if not stored.size:
            return
        values = stored.astype(np.float64)
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):  # NaN makes both of them NaN
            self.nan += int(np.count_nonzero(np.isnan(values)))
            self.inf += int(np.count_nonzero(np.isinf(values)))
            self.add(values[np.isfinite(values)])
            return
        # A double does not hold every 64-bit integer, so that integers are compared as such.
        is_whole = np.issubdtype(stored.dtype, np.integer)
        self.minimum = min(self.minimum, stored.min().item() if is_whole else low)
        self.maximum = max(self.maximum, stored.max().item() if is_whole else high)
        self._add_up(values, max(abs(low), abs(high)))

    def _add_up(self, values: npt.NDArray[np.float64], largest: float) -> None:
        """Norm and mean of finite values; ``values`` is scratch room afterwards.

        The mean is carried as such, since a sum of doubles may overflow. The squares are added by
        numpy and not by a BLAS, whose threads cost more than they save on arrays of this size.
        """
        scale = 1.0 if not largest or _SAFE_MIN < largest < _SAFE_MAX else largest
        if scale != 1.0:
            values /= scale
        self.count += values.size
        share = values.size / self.count
        self.mean = self.mean * (1 - share) + float(values.mean()) * scale * share
        np.square(values, out=values)
        self.norm = math.hypot(self.norm, math.sqrt(float(values.sum())) * scale)
