"""What can be said of two runs of elements side by side: their difference, and what explains it.

Pure arithmetic on bytes; sums are double precision, and those of parts add up to those of the
whole.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import fields, replace

from zexport.diff.roundings import Rounding, Run, Side, bits, explains
from zexport.ranges.cast import NUMPY
from zexport.ranges.dtypes import DType

Doubles = npt.NDArray[np.float64]

_BLOCK_NUMEL = 1 << 13
"""Elements looked at together: their doubles stay in the cache, and in memory that the C library
hands out again without asking the system for it (below 128 KiB, glibc's ``M_MMAP_THRESHOLD``)."""
_PARTS = {DType.C64: 2}
"""Numbers of an element, where it is not one."""


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
        a_sum, b_sum: sums of the numbers.
        difference_squares, a_squares, b_squares, products: sums of squares, and of A times B.
        a_nan, b_nan: elements that are NaN.
        nan_in_one: pairs of which one alone is NaN.
        inf_in_one: pairs without NaN, one infinite and the other not the same.
        a_zero, b_zero: finite pairs of which this side alone is zero.
        roundings: what explains every pair.
    """

    roundings: frozenset[Rounding] = frozenset()
    unequal: int = 0
    finite: int = 0
    abs_max: float = 0.0
    worst: int | None = None
    abs_sum: float = 0.0
    a_sum: float = 0.0
    b_sum: float = 0.0
    difference_squares: float = 0.0
    a_squares: float = 0.0
    b_squares: float = 0.0
    products: float = 0.0
    a_nan: int = 0
    b_nan: int = 0
    nan_in_one: int = 0
    inf_in_one: int = 0
    a_zero: int = 0
    b_zero: int = 0

    def __add__(self, other: PairSums) -> PairSums:
        larger = other if other.abs_max > self.abs_max else self
        return PairSums(
            roundings=self.roundings & other.roundings,
            abs_max=larger.abs_max,
            worst=larger.worst,
            **{name: getattr(self, name) + getattr(other, name) for name in _ADDED},
        )

    @property
    def cosine(self) -> float | None:
        """Of the angle between the two; ``None`` where one of them has no direction."""
        norms = math.sqrt(self.a_squares) * math.sqrt(self.b_squares)
        cosine = number(self.products / norms) if norms else None
        return None if cosine is None else max(-1.0, min(1.0, cosine))

    def is_constant(self, side: Side) -> bool:
        """Whether this side is one number over and over, as far as doubles can tell."""
        squares = self.a_squares if side is Side.A else self.b_squares
        total = self.a_sum if side is Side.A else self.b_sum
        if not self.finite or not math.isfinite(squares):
            return False
        return squares - total * total / self.finite <= _NO_SPREAD * squares


_NO_SPREAD = 1e-12
_ADDED = {one.name for one in fields(PairSums)} - {"roundings", "abs_max", "worst"}


def number(value: float) -> float | None:
    """The value, unless it is beyond what a double holds."""
    return value if math.isfinite(value) else None


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
    a_run = Run(np.frombuffer(a, NUMPY[a_dtype]), a_dtype)
    b_run = Run(np.frombuffer(b, NUMPY[b_dtype]), b_dtype)
    sums = PairSums(tried)
    with np.errstate(all="ignore"):
        for begin in range(0, a.nbytes // a_dtype.itemsize, _BLOCK_NUMEL):
            a_block, b_block = (_block(run, begin) for run in (a_run, b_run))
            sums += _block_sums(a_block, b_block, start + begin, sums.roundings)
    return sums


def _block(run: Run, begin: int) -> Run:
    parts = _PARTS.get(run.dtype, 1)
    return Run(run.stored[begin * parts : (begin + _BLOCK_NUMEL) * parts], run.dtype)


def _block_sums(a: Run, b: Run, start: int, tried: frozenset[Rounding]) -> PairSums:
    a_values = _doubles(a, b.dtype)
    unequal = int(np.count_nonzero(bits(a.stored) != bits(b.stored))) if a.dtype is b.dtype else 0
    if a.dtype is b.dtype and not unequal:
        sums = _same(a_values)
    else:
        b_values = _doubles(b, a.dtype)
        parts = max(_PARTS.get(d, 1) for d in (a.dtype, b.dtype))
        sums = _different(a_values, b_values, start * parts)
        if a.dtype is not b.dtype:
            unequal = _unequal(a_values, b_values)
    roundings = frozenset(r for r in tried if explains(r, a, b))
    return replace(sums, unequal=unequal, roundings=roundings)


def _unequal(a: Doubles, b: Doubles) -> int:
    """How many pairs are of other numbers; NaN is as good as NaN."""
    unequal = int(np.count_nonzero(a != b))
    return unequal and unequal - int(np.count_nonzero(np.isnan(a) & np.isnan(b)))


def _doubles(run: Run, other: DType) -> Doubles:
    """The numbers in double precision; beside complex ones, with imaginary parts of zero."""
    values = run.stored.astype(np.float64)
    if run.dtype in _PARTS or other not in _PARTS:
        return values
    pairs = np.zeros(2 * values.size)
    pairs[::2] = values
    return pairs


def _same(values: Doubles) -> PairSums:
    """The sums of a run that is the same on both sides."""
    squares = float(np.square(values).sum())
    if not math.isfinite(squares):
        return _different(values, values, 0)
    total = float(values.sum())
    return PairSums(
        finite=values.size,
        a_sum=total,
        b_sum=total,
        a_squares=squares,
        b_squares=squares,
        products=squares,
    )


def _different(a: Doubles, b: Doubles, start: int) -> PairSums:
    """The sums of any two runs; NaN, infinities and overflow among them take longer."""
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


def _finite_sums(a: Doubles, b: Doubles, difference: Doubles, start: int) -> PairSums:
    """The sums of pairs of finite numbers."""
    largest = float(difference.max(initial=0.0))
    return PairSums(
        finite=difference.size,
        abs_max=largest,
        worst=start + int(difference.argmax()) if largest else None,
        abs_sum=float(difference.sum()),
        a_sum=float(a.sum()),
        b_sum=float(b.sum()),
        difference_squares=float(np.square(difference).sum()),
        a_squares=float(np.square(a).sum()),
        b_squares=float(np.square(b).sum()),
        products=float((a * b).sum()),
        a_zero=int(np.count_nonzero((a == 0) & (b != 0))),
        b_zero=int(np.count_nonzero((b == 0) & (a != 0))),
    )
