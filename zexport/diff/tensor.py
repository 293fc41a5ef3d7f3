"""What one tensor is to its counterpart: equal, rounded or changed, and how far apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum

import numpy as np

from zexport.diff.roundings import Rounding, Side
from zexport.diff.values import PairSums, number
from zexport.ranges.dtypes import DType, Shape
from zexport.storage.json import Natural
from zexport.text import brief


class Outcome(Enum):
    """How a tensor of A stands to that of B."""

    EQUAL = "equal"
    """The same shape, element type and bytes."""
    CAST_EQUAL = "cast_equal"
    """One is the other, rounded to an element type."""
    DIFFERENT = "different"
    """Other values."""
    SHAPE = "shape"
    """Another shape; the rows that both have are compared."""
    ONLY_IN_A = "only_in_a"
    """In A alone."""
    ONLY_IN_B = "only_in_b"
    """In B alone."""


@dataclass(frozen=True, slots=True)
class PairValues:
    """The values compared; a complex element counts as two.

    Means, norms and the cosine are of the pairs of finite numbers, and ``None`` where there are
    none or a double cannot hold them.

    Attributes:
        unequal: pairs of other bits or, where the element types differ, of other numbers.
        max_abs: largest absolute difference.
        mean_abs: mean absolute difference.
        norm: norm of A.
        relative_norm: norm of the difference over the norm of A.
        cosine: of the angle between the two; ``None`` where one is all zero.
        worst_at: index of the largest difference; ``None`` where there is none.
        a_nan: NaN in A.
        b_nan: NaN in B.
        nan_in_one: places where one side alone is NaN.
        inf_in_one: places without NaN where one side is infinite and the other is not the same.
        a_zero: places where A alone is zero.
        b_zero: places where B alone is zero.
        a_constant: whether A is one number over and over.
        b_constant: whether B is.
    """

    unequal: Natural
    max_abs: float | None
    mean_abs: float | None
    norm: float | None
    relative_norm: float | None
    cosine: float | None
    worst_at: tuple[Natural, ...] | None
    a_nan: Natural
    b_nan: Natural
    nan_in_one: Natural
    inf_in_one: Natural
    a_zero: Natural
    b_zero: Natural
    a_constant: bool
    b_constant: bool

    @classmethod
    def of(cls, sums: PairSums, shape: Shape, *, is_complex: bool) -> PairValues:
        """What is told of the sums of a tensor."""
        at = None if sums.worst is None else sums.worst // (2 if is_complex else 1)
        count, norm, apart = sums.finite, math.sqrt(sums.a_squares), sums.difference_squares
        relative = number(math.sqrt(apart) / norm) if norm else None
        return cls(
            max_abs=number(sums.abs_max) if count else None,
            mean_abs=number(sums.abs_sum / count) if count else None,
            norm=number(norm) if count else None,
            relative_norm=relative if apart else 0.0,
            worst_at=None if at is None else tuple(map(int, np.unravel_index(at, shape))),
            a_constant=sums.is_constant(Side.A),
            b_constant=sums.is_constant(Side.B),
            **{name: getattr(sums, name) for name in _AS_SUMMED},
        )


_AS_SUMMED = {one.name for one in fields(PairValues)} & {*dir(PairSums)}


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor of A, of B, or of both.

    Attributes:
        outcome: how the two stand to each other.
        a_name: name in A; ``None`` where it is not there. The names differ where a tied tensor is
            kept under another one.
        b_name: name in B.
        a_dtype: element type in A, as safetensors names it.
        b_dtype: element type in B.
        a_shape: shape in A.
        b_shape: shape in B.
        rounding: what explains a cast-equal tensor: one side's values, rounded, are the other's.
        values: the values compared; ``None`` where they were not.
    """

    outcome: Outcome
    a_name: str | None
    b_name: str | None
    a_dtype: DType | None = None
    b_dtype: DType | None = None
    a_shape: tuple[Natural, ...] | None = None
    b_shape: tuple[Natural, ...] | None = None
    rounding: Rounding | None = None
    values: PairValues | None = None

    __repr__ = brief

    @property
    def name(self) -> str:
        """The name in A, or where it is not there, in B."""
        return self.a_name or self.b_name or ""

    @property
    def shape(self) -> Shape:
        """The shape in A, or where it is not there, in B."""
        return (self.b_shape if self.a_shape is None else self.a_shape) or ()

    @property
    def is_alike(self) -> bool:
        """Whether both sides are equal, or equal after rounding without a new NaN or infinity."""
        is_cast = self.outcome is Outcome.CAST_EQUAL and not self.is_finite_on_one_side
        return self.outcome is Outcome.EQUAL or is_cast

    @property
    def is_finite_on_one_side(self) -> bool:
        """Whether one side is NaN or infinite where the other is not the same."""
        if self.values is None or self.outcome is Outcome.SHAPE:
            return False
        return self.values.nan_in_one + self.values.inf_in_one > 0

    @property
    def zero_side(self) -> str:
        """The side that is all zero where the other is not, as ``A`` or ``B``; else nothing."""
        values = self.values
        if values is None or self.outcome is not Outcome.DIFFERENT:
            return ""
        if values.a_constant and values.a_zero:
            return "A"
        return "B" if values.b_constant and values.b_zero else ""
