"""Bytes that lie in no file: adapters merged into their base, casts, and ranks' parts with zeros.

Descriptions only, and byte sources like any other: a window of one may be cut, laid end to end or
tiled. What its elements are is worked out where it is read (``zexport.ranges.calculator``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path

from msgspec import Struct

from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Extent, all_within

_PLACE = Path("computed")
"""What stands for a file in an extent of bytes that are in none."""


class Elements(Struct, frozen=True):
    """Row-major elements of one type, and where they come from."""

    source: ByteSource
    dtype: DType


class Computed(Struct, frozen=True):
    """What is worked out where it is read: any window of it is one range of the result."""

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The window, as one range of the result."""
        if start < stop:
            yield ComputedExtent(_PLACE, start, stop - start, self)


class ComputedExtent(Extent, frozen=True):
    """Bytes of a tensor that is computed; ``offset`` counts from its first."""

    of: Computed


class Recast(Computed, frozen=True):
    """The elements of another tensor, rounded to ``dtype``."""

    elements: Elements
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        stored = self.elements
        return stored.source.nbytes // stored.dtype.itemsize * self.dtype.itemsize

    def constituents(self) -> tuple[ByteSource, ...]:
        """Where the elements come from."""
        return (self.elements.source,)


class ScaledSum(Computed, frozen=True):
    """``base + scaling * addend`` in float32, element by element."""

    base: Elements
    addend: Elements
    scaling: float

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.base.source.nbytes // self.base.dtype.itemsize * DType.F32.itemsize

    def constituents(self) -> tuple[ByteSource, ...]:
        """Both terms."""
        return self.base.source, self.addend.source


class Factors(Struct, frozen=True):
    """The two factors of a low-rank matrix, or of a stack of them, as peft stores them.

    ``a`` is ``(matrices, rank, inputs)`` and ``b`` is ``(outputs, rank, matrices)``, row-major;
    the product is ``b @ a``, ``(outputs, inputs)``, for each matrix by itself. For one matrix these
    are the weights of ``lora_A`` and ``lora_B``; for a stack of experts peft 0.21
    (``tuners/lora/layer.py``, ``ParamWrapper.get_delta_weight``) cuts them this way.
    """

    a: Elements
    b: Elements
    inputs: int
    outputs: int
    rank: int
    matrices: int = 1


class LowRankUpdate(Computed, frozen=True):
    """``base + scaling * (b @ a)`` in float32, each row or column then scaled to a magnitude.

    DoRA's, an element for each output. Each matrix of ``base`` is ``(outputs, inputs)``, unless
    transposed.
    """

    base: Elements
    factors: Factors
    scaling: float
    is_transposed: bool = False
    magnitude: Elements | None = None

    @property
    def rows(self) -> int:
        """Rows of a matrix as it is stored."""
        return self.factors.inputs if self.is_transposed else self.factors.outputs

    @property
    def columns(self) -> int:
        """Columns of a matrix as it is stored."""
        return self.factors.outputs if self.is_transposed else self.factors.inputs

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return prod((self.factors.matrices, self.rows, self.columns)) * DType.F32.itemsize

    def constituents(self) -> tuple[ByteSource, ...]:
        """The base, both factors, and the magnitude."""
        magnitude = () if self.magnitude is None else (self.magnitude.source,)
        return self.base.source, self.factors.a.source, self.factors.b.source, *magnitude


class Zeros(Computed, frozen=True):
    """Zero bytes that are in no file, such as the padding of a flat group."""

    nbytes: int

    def constituents(self) -> tuple[ByteSource, ...]:
        """Nothing."""
        return ()


def updates_in(sources: Iterable[ByteSource]) -> Iterator[LowRankUpdate]:
    """The low-rank updates that some of ``sources`` are, or are made of; each once."""
    return (source for source in all_within(sources) if isinstance(source, LowRankUpdate))


@dataclass(frozen=True, slots=True)
class Stripes:
    """Several runs, each cut into stripes of ``nbytes`` of its own; all ranks' stripes share it."""

    runs: tuple[ByteSource, ...]
    nbytes: tuple[int, ...]
    ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", tuple(accumulate(self.nbytes)))


class Stripe(Struct, frozen=True):
    """Stripe ``rank`` of every run, end to end; where a run has ended, zeros fill it up."""

    of: Stripes
    rank: int

    @property
    def nbytes(self) -> int:
        """Bytes of one rank, padding included."""
        return self.of.ends[-1] if self.of.ends else 0

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The ranges of a window, run after run."""
        index = bisect_right(self.of.ends, start)
        while start < stop:
            run, size, end = self.of.runs[index], self.of.nbytes[index], self.of.ends[index]
            until = min(stop, end)
            first = self.rank * size + start - (end - size)
            last = first + until - start
            kept = min(last, run.nbytes)
            if first < kept:
                yield from run.extents(first, kept)
            if (lacking := last - max(first, kept)) > 0:
                yield from Zeros(lacking).extents(0, lacking)
            start = max(start, until)
            index += 1

    def constituents(self) -> tuple[ByteSource, ...]:
        """The runs."""
        return self.of.runs
