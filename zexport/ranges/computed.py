"""Byte sources that are computed when they are read: merged adapters, casts, padding.

``zexport.ranges.calculator`` computes the elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path

from msgspec import Struct

from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Extent, all_within, overlaps

_NO_FILE = Path("computed")


class Elements(Struct, frozen=True):
    """Row-major elements of a dtype."""

    source: ByteSource
    dtype: DType


class Computed(Struct, frozen=True):
    """A source without a file: any window is one ``ComputedExtent``."""

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        if start < stop:
            yield ComputedExtent(_NO_FILE, start, stop - start, self)


class ComputedExtent(Extent, frozen=True):
    """Bytes of a computed tensor; ``offset`` counts from its first."""

    of: Computed


class Recast(Computed, frozen=True):
    """The elements of another tensor, cast to ``dtype``."""

    elements: Elements
    dtype: DType

    @property
    def nbytes(self) -> int:
        stored = self.elements
        return stored.source.nbytes // stored.dtype.itemsize * self.dtype.itemsize

    def constituents(self) -> tuple[ByteSource, ...]:
        return (self.elements.source,)


class ScaledSum(Computed, frozen=True):
    """``base + scaling * addend`` in float32, element by element."""

    base: Elements
    addend: Elements
    scaling: float

    @property
    def nbytes(self) -> int:
        return self.base.source.nbytes // self.base.dtype.itemsize * DType.F32.itemsize

    def constituents(self) -> tuple[ByteSource, ...]:
        return self.base.source, self.addend.source


class Factors(Struct, frozen=True):
    """The factors of a low-rank matrix, or of a stack of matrices, as peft stores them.

    ``a`` is ``(matrices, rank, inputs)``, ``b`` is ``(outputs, rank, matrices)``; the product is
    ``b @ a``, ``(outputs, inputs)``, for each matrix. One matrix: ``lora_A`` and ``lora_B``; a
    stack of experts: peft 0.21, ``tuners/lora/layer.py`` (``ParamWrapper.get_delta_weight``).
    """

    a: Elements
    b: Elements
    inputs: int
    outputs: int
    rank: int
    matrices: int = 1


class LowRankUpdate(Computed, frozen=True):
    """``base + scaling * (b @ a)`` in float32, with DoRA then scaled to a magnitude per output.

    Each matrix of ``base`` is ``(outputs, inputs)``, unless transposed.
    """

    base: Elements
    factors: Factors
    scaling: float
    is_transposed: bool = False
    magnitude: Elements | None = None

    @property
    def rows(self) -> int:
        return self.factors.inputs if self.is_transposed else self.factors.outputs

    @property
    def columns(self) -> int:
        return self.factors.outputs if self.is_transposed else self.factors.inputs

    @property
    def nbytes(self) -> int:
        return prod((self.factors.matrices, self.rows, self.columns)) * DType.F32.itemsize

    def constituents(self) -> tuple[ByteSource, ...]:
        magnitude = () if self.magnitude is None else (self.magnitude.source,)
        return self.base.source, self.factors.a.source, self.factors.b.source, *magnitude


class Zeros(Computed, frozen=True):
    """Zero bytes, such as the padding of a flat group."""

    nbytes: int

    def constituents(self) -> tuple[ByteSource, ...]:
        return ()


def updates_in(sources: Iterable[ByteSource]) -> Iterator[LowRankUpdate]:
    """Yield the low-rank updates among ``sources`` and their constituents, each once."""
    return (source for source in all_within(sources) if isinstance(source, LowRankUpdate))


class Partitions(Struct, frozen=True, dict=True):
    """Several sources to partition: each rank gets ``nbytes[i]`` of source ``i``."""

    sources: tuple[ByteSource, ...]
    nbytes: tuple[int, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each source's part ends in a partition."""
        return tuple(accumulate(self.nbytes))


class Partition(Struct, frozen=True):
    """A rank's partition of several sources, padded with zeros."""

    of: Partitions
    rank: int

    @property
    def nbytes(self) -> int:
        return self.of.ends[-1] if self.of.ends else 0

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        for index, first, last in overlaps(self.of.ends, start, stop):
            source, begin = self.of.sources[index], self.rank * self.of.nbytes[index]
            stored = max(begin + first, min(begin + last, source.nbytes))
            yield from source.extents(begin + first, stored)
            padding = begin + last - stored
            yield from Zeros(padding).extents(0, padding)

    def constituents(self) -> tuple[ByteSource, ...]:
        return self.of.sources
