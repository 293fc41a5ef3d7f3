"""What can be said of two runs of elements side by side: their difference, and what explains it.

Pure arithmetic on bytes; sums are double precision, and those of parts add up to those of the
whole.
"""

from __future__ import annotations

import math
from enum import Enum

import ml_dtypes
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import fields, replace

from zexport.ranges.casts import NUMPY, cast_into
from zexport.ranges.dtypes import DType

_Doubles = npt.NDArray[np.float64]
_Elements = npt.NDArray[np.generic]

_BLOCK_NUMEL = 1 << 13
"""Elements looked at together: their doubles stay in the cache, and in memory that the C library
hands out again without asking the system for it (below 128 KiB, glibc's ``M_MMAP_THRESHOLD``)."""
_PARTS = {DType.C64: 2}
"""Numbers of an element, where it is not one."""
_FLOAT8 = frozenset({DType.F8_E4M3, DType.F8_E5M2})
_NARROWER = {DType.F64: (DType.F32, DType.BF16, DType.F16), DType.F32: (DType.BF16, DType.F16)}
"""What values may have been rounded to on their way though they are stored wide again."""


class Side(Enum):
    """One of the two."""

    A = "a"
    B = "b"


class Rounding(Struct, frozen=True):
    """An explanation: the values of ``side``, rounded to ``dtype``, are those of the other."""

    side: Side
    dtype: DType


class PairSums(Struct, frozen=True):
    """What was seen of some pairs of elements; ``+`` joins a run and the run that follows it.

    A complex element counts as two. Sums and extremes are over the ``finite`` pairs, of which both
    numbers are finite.

    Attributes:
        unequal: pairs of other bits, or, where the element types differ, of other numbers.
        finite: pairs of finite numbers.
        abs_max: largest absolute difference.
        worst: index of the first pair that differs so much; ``None`` where none differs.
        abs_sum: sum of the absolute differences.
        difference_squares, a_squares, b_squares, products: sums of squares, and of A times B.
        a_nan, b_nan: elements that are NaN.
        nan_in_one: pairs of which one alone is NaN.
        inf_in_one: pairs without NaN, one infinite and the other not the same.
        roundings: what explains every pair.
    """

    roundings: frozenset[Rounding] = frozenset()
    unequal: int = 0
    finite: int = 0
    abs_max: float = 0.0
    worst: int | None = None
    abs_sum: float = 0.0
    difference_squares: float = 0.0
    a_squares: float = 0.0
    b_squares: float = 0.0
    products: float = 0.0
    a_nan: int = 0
    b_nan: int = 0
    nan_in_one: int = 0
    inf_in_one: int = 0

    def __add__(self, other: PairSums) -> PairSums:
        larger = other if other.abs_max > self.abs_max else self
        return PairSums(
            roundings=self.roundings & other.roundings,
            abs_max=larger.abs_max,
            worst=larger.worst,
            **{name: getattr(self, name) + getattr(other, name) for name in _ADDED},
        )

    @property
    def largest(self) -> float | None:
        """Largest absolute difference; ``None`` without finite pairs."""
        return _number(self.abs_max) if self.finite else None

    @property
    def abs_mean(self) -> float | None:
        """Mean absolute difference; ``None`` without finite pairs."""
        return _number(self.abs_sum / self.finite) if self.finite else None

    @property
    def cosine(self) -> float | None:
        """Of the angle between the two; ``None`` where one of them has no direction."""
        norms = math.sqrt(self.a_squares) * math.sqrt(self.b_squares)
        cosine = _number(self.products / norms) if norms else None
        return None if cosine is None else max(-1.0, min(1.0, cosine))

    @property
    def relative_norm(self) -> float | None:
        """Norm of the difference over the norm of A; ``None`` where A is zero and B is not."""
        if not self.difference_squares:
            return 0.0
        norm = math.sqrt(self.a_squares)
        return _number(math.sqrt(self.difference_squares) / norm) if norm else None


_ADDED = {one.name for one in fields(PairSums)} - {"roundings", "abs_max", "worst"}


def _number(value: float) -> float | None:
    """The value, unless it is beyond what a double holds."""
    return value if math.isfinite(value) else None


def possible_roundings(a: DType, b: DType) -> tuple[Rounding, ...]:
    """The explanations to try for two element types, the likeliest first.

    Types that differ: one is the other, rounded to its type (or, of integers, the same numbers).
    The same wide type twice: one went through a narrower type on its way.
    """
    if a is b:
        return tuple(Rounding(side, to) for to in _NARROWER.get(a, ()) for side in Side)
    tried = (Rounding(Side.A, b), Rounding(Side.B, a))
    return tuple(sorted(tried, key=lambda rounding: rounding.dtype.itemsize))


def compare(
    a: memoryview,
    a_dtype: DType,
    b: memoryview,
    b_dtype: DType,
    *,
    start: int,
    tried: frozenset[Rounding],
) -> PairSums:
    """What is seen of equally many elements of A and B.

    ``start`` is the place of the first of them in the tensor; ``tried`` are the explanations that
    are still worth a trial.
    """
    a_run = _Run(np.frombuffer(a, NUMPY[a_dtype]), a_dtype)
    b_run = _Run(np.frombuffer(b, NUMPY[b_dtype]), b_dtype)
    sums = PairSums(tried)
    with np.errstate(all="ignore"):
        for begin in range(0, a.nbytes // a_dtype.itemsize, _BLOCK_NUMEL):
            a_block, b_block = (run.block(begin) for run in (a_run, b_run))
            sums += _block_sums(a_block, b_block, start + begin, sums.roundings)
    return sums


class _Run(Struct, frozen=True):
    """Some elements of one side."""

    stored: _Elements
    dtype: DType

    def block(self, begin: int) -> _Run:
        """The elements from ``begin`` on, as many as are looked at together."""
        parts = _PARTS.get(self.dtype, 1)
        return _Run(self.stored[begin * parts : (begin + _BLOCK_NUMEL) * parts], self.dtype)


def _block_sums(a: _Run, b: _Run, start: int, tried: frozenset[Rounding]) -> PairSums:
    a_values = _doubles(a, b.dtype)
    unequal = int(np.count_nonzero(_bits(a.stored) != _bits(b.stored))) if a.dtype is b.dtype else 0
    if a.dtype is b.dtype and not unequal:
        sums = _same(a_values)
    else:
        b_values = _doubles(b, a.dtype)
        sums = _different(
            a_values, b_values, start * max(_PARTS.get(d, 1) for d in (a.dtype, b.dtype))
        )
        if a.dtype is not b.dtype:
            unequal = _unequal(a_values, b_values)
    roundings = frozenset(r for r in tried if _explains(r, a, b))
    return replace(sums, unequal=unequal, roundings=roundings)


def _bits(values: _Elements) -> _Elements:
    return values.view(np.dtype(f"u{values.itemsize}"))


def _unequal(a: _Doubles, b: _Doubles) -> int:
    """How many pairs are of other numbers; NaN is as good as NaN."""
    unequal = int(np.count_nonzero(a != b))
    return unequal and unequal - int(np.count_nonzero(np.isnan(a) & np.isnan(b)))


def _doubles(run: _Run, other: DType) -> _Doubles:
    """The numbers in double precision; beside complex ones, with imaginary parts of zero."""
    values = run.stored.astype(np.float64)
    if run.dtype in _PARTS or other not in _PARTS:
        return values
    pairs = np.zeros(2 * values.size)
    pairs[::2] = values
    return pairs


def _same(values: _Doubles) -> PairSums:
    """The sums of a run that is the same on both sides."""
    squares = float(np.square(values).sum())
    if not math.isfinite(squares):
        return _different(values, values, 0)
    return PairSums(finite=values.size, a_squares=squares, b_squares=squares, products=squares)


def _different(a: _Doubles, b: _Doubles, start: int) -> PairSums:
    """The sums alone, of any two runs; NaN, infinities and overflow among them take longer."""
    difference = np.abs(a - b)
    if math.isfinite(float(difference.sum())):
        return _finite_sums(a, b, difference, start)
    a_nan, b_nan = np.isnan(a), np.isnan(b)
    is_finite = np.isfinite(a) & np.isfinite(b)
    places = np.flatnonzero(is_finite)
    sums = _finite_sums(a[is_finite], b[is_finite], difference[is_finite], 0)
    return replace(
        sums,
        worst=None if sums.worst is None else start + int(places[sums.worst]),
        a_nan=int(np.count_nonzero(a_nan)),
        b_nan=int(np.count_nonzero(b_nan)),
        nan_in_one=int(np.count_nonzero(a_nan != b_nan)),
        inf_in_one=int(np.count_nonzero((a != b) & ~is_finite & ~a_nan & ~b_nan)),
    )


def _finite_sums(a: _Doubles, b: _Doubles, difference: _Doubles, start: int) -> PairSums:
    """The sums of pairs of finite numbers."""
    largest = float(difference.max(initial=0.0))
    return PairSums(
        finite=difference.size,
        abs_max=largest,
        worst=start + int(difference.argmax()) if largest else None,
        abs_sum=float(difference.sum()),
        difference_squares=float(np.square(difference).sum()),
        a_squares=float(np.square(a).sum()),
        b_squares=float(np.square(b).sum()),
        products=float((a * b).sum()),
    )


def _explains(rounding: Rounding, a: _Run, b: _Run) -> bool:
    """Whether the one side, rounded, is the other to the last bit; NaN is NaN."""
    run, other = (a, b) if rounding.side is Side.A else (b, a)
    if run.dtype in _PARTS or other.dtype in _PARTS:
        return False
    if not (_is_real(run.dtype) and _is_real(other.dtype)):
        there, back = _cast(run, other.dtype).stored, _cast(other, run.dtype).stored
        return bool(np.all((there == other.stored) & (back == run.stored)))
    rounded = _cast(_cast(run, rounding.dtype), other.dtype).stored
    is_alike = _bits(rounded) == _bits(other.stored)
    return bool(is_alike.all() or (is_alike | (_is_nan(rounded) & _is_nan(other.stored))).all())


def _is_real(dtype: DType) -> bool:
    return dtype.is_floating or dtype in _FLOAT8


def _is_nan(values: _Elements) -> npt.NDArray[np.bool_]:
    return np.isnan(values.astype(np.float32))


def _cast(run: _Run, to: DType) -> _Run:
    """The elements as another type, rounded as torch rounds them.

    To and from 8-bit floats it goes by way of float, as in torch (torch 2.13,
    ``c10/util/Float8_e4m3fn.h`` and ``Float8_e5m2.h`` convert from float alone), and what is beyond
    E4M3, which has no infinity, becomes its largest number.
    """
    if run.dtype is to:
        return run
    if run.dtype.is_floating and to.is_floating:
        out = np.empty(run.stored.size * to.itemsize, np.uint8)
        cast_into(run.stored.view(np.uint8).data, run.dtype, to, out.data)
        return _Run(out.view(NUMPY[to]), to)
    if _is_real(run.dtype) and _is_real(to) and DType.F32 not in (run.dtype, to):
        return _cast(_cast(run, DType.F32), to)
    if to is DType.F8_E4M3 and run.dtype is DType.F32:
        largest = np.float32(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
        return _Run(np.clip(run.stored, -largest, largest).astype(NUMPY[to]), to)
    return _Run(run.stored.astype(NUMPY[to]), to)
