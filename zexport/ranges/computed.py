"""Tensors that lie in no file: adapters merged into their base, casts, and zeros.

Descriptions only, and byte sources like any other: a window of one may be cut, laid end to end or
tiled. What its elements are is worked out where it is read (``zexport.ranges.calculator``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, Extent, all_within

_PLACE = Path("computed")
"""What stands for a file in an extent of bytes that are in none."""


class Elements(Struct, frozen=True):
    """Row-major elements of one type, and where they come from."""

    source: ByteSource
    dtype: DType


class ComputedExtent(Extent, frozen=True):
    """Bytes of a tensor that is computed; ``offset`` counts from its first."""

    of: Computed


class Recast(Struct, frozen=True):
    """The elements of another tensor, rounded to ``dtype``."""

    elements: Elements
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        stored = self.elements
        return stored.source.nbytes // stored.dtype.itemsize * self.dtype.itemsize

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The window, as one range of the result."""
        return _window(self, start, stop)

    def constituents(self) -> tuple[ByteSource, ...]:
        """Where the elements come from."""
        return (self.elements.source,)


class ScaledSum(Struct, frozen=True):
    """``base + scaling * addend`` in float32, element by element."""

    base: Elements
    addend: Elements
    scaling: float

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.base.source.nbytes // self.base.dtype.itemsize * DType.F32.itemsize

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The window, as one range of the result."""
        return _window(self, start, stop)

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


class LowRankUpdate(Struct, frozen=True):
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

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The window, as one range of the result."""
        return _window(self, start, stop)

    def constituents(self) -> tuple[ByteSource, ...]:
        """The base, both factors, and the magnitude."""
        magnitude = () if self.magnitude is None else (self.magnitude.source,)
        return self.base.source, self.factors.a.source, self.factors.b.source, *magnitude


class Zeros(Struct, frozen=True):
    """Zero bytes that are in no file, such as the padding of a flat group."""

    nbytes: int

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The window, as one range of the result."""
        return _window(self, start, stop)

    def constituents(self) -> tuple[ByteSource, ...]:
        """Nothing."""
        return ()


Computed: TypeAlias = Recast | ScaledSum | LowRankUpdate | Zeros


def _window(of: Computed, start: int, stop: int) -> Iterator[Extent]:
    if start < stop:
        yield ComputedExtent(_PLACE, start, stop - start, of)


def updates_in(sources: Iterable[ByteSource]) -> Iterator[LowRankUpdate]:
    """The low-rank updates that some of ``sources`` are, or are made of; each once."""
    return (source for source in all_within(sources) if isinstance(source, LowRankUpdate))
