"""What one tensor is to its counterpart: how far apart, and by which kind of difference.

Pure judgement of sums; what needs another look at the values is for ``suspects``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum

import numpy as np

from zexport.compare.roundings import Rounding, Side
from zexport.compare.values import ROW_NUMEL_MIN, PairSums, number
from zexport.printable import brief
from zexport.ranges.dtypes import DType, Shape
from zexport.store.json import Natural

COSINE_RELATED_MIN = 0.5
"""Below this two matrices have nothing in common: of random ones it is near 0."""
MATRIX_DIMS = 2
_NUMEL_MIN = ROW_NUMEL_MIN
"""Fewer numbers are alike by chance."""
_RUN_MIN = 16
_LOST_SHARE_MIN = 0.25
"""What was zeroed was of the size of the rest; what was rounded to zero was small."""
_PRUNED_SHARE_MIN = 0.05
"""Training makes no weight zero; rounding does so to few."""
_SHIFT = 1.0
"""What Gemma's norms are kept less, and the norms of others are not."""
_EXACT = 1e-6
_EPSILON = {DType.BF16: 2**-8, DType.F16: 2**-11, DType.F32: 2**-24, DType.F64: 2**-53}
_COSINE_NEAR_MIN = 0.8
"""Of a matrix and a stranger, half of each, it is 0.7; training stays nearer unless it is long."""
_FACTOR_MIN = 0.01
"""A factor nearer to 1 is no factor."""
_NEAR = {True: (0.02, 0.6), False: (0.02, 0.2)}
_NEAR_VECTOR = (0.01, 0.05)
"""How far a factor that training came on top of may be from a power of two, and how much of the
tensor may be beside it; weight decay halves too, but not without moving the rest."""


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


class Kind(Enum):
    """What is seen of a difference."""

    EQUAL = "equal"
    ROUNDED = "rounded"
    MOVED = "moved"
    """Values near those of the other side, as training moves them."""
    SCALED = "scaled"
    SHIFTED = "shifted"
    ZEROED = "zeroed"
    """Zeros, in rows or blocks, on one side alone."""
    PRUNED = "pruned"
    """Zeros, here and there, on one side alone."""
    CONSTANT = "constant"
    """One number over and over on one side alone."""
    REORDERED = "reordered"
    """Rows of one side stand elsewhere on the other."""
    EXCHANGED = "exchanged"
    """The values of a tensor of another name."""
    TRANSPOSED = "transposed"
    COARSE = "coarse"
    """Few different numbers on one side alone, as after quantization."""
    LIMITED = "limited"
    """Many elements as large as the largest on one side alone, as after a cast that saturates."""
    NOT_FINITE = "not_finite"
    """NaN or infinities on one side alone."""
    UNRELATED = "unrelated"
    UNTIED = "untied"
    """One tensor here, where the other side has two that have little in common."""
    RESHAPED = "reshaped"
    RENAMED = "renamed"
    """On one side alone by this name; the other has it by another."""
    MISSING = "missing"


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
        factor: the number by which B comes closest to A.
        shift: mean of A less that of B.
        worst_at: index of the largest difference; ``None`` where there is none.
        a_nan: NaN in A.
        b_nan: NaN in B.
        nan_in_one: places where one side alone is NaN.
        inf_in_one: places without NaN where one side is infinite and the other is not the same.
        a_zero: places where A alone is zero.
        b_zero: places where B alone is zero.
        a_constant: whether A is one number over and over.
        b_constant: whether B is.
        rows_apart: rows, or parts of long ones, that differ by more than half of themselves.
    """

    unequal: Natural
    max_abs: float | None
    mean_abs: float | None
    norm: float | None
    relative_norm: float | None
    cosine: float | None
    factor: float | None
    shift: float | None
    worst_at: tuple[Natural, ...] | None
    a_nan: Natural
    b_nan: Natural
    nan_in_one: Natural
    inf_in_one: Natural
    a_zero: Natural
    b_zero: Natural
    a_constant: bool
    b_constant: bool
    rows_apart: Natural

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
            a_zero=sums.a_lost.count,
            b_zero=sums.b_lost.count,
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
        kind: what is seen of the difference.
        side: on which side it is seen, where it is on one alone.
        partner: the tensor of the other side that has these values by another name.
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
    kind: Kind = Kind.MISSING
    side: Side | None = None
    partner: str | None = None
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
    def is_matrix(self) -> bool:
        """Whether it has more than one dimension worth the name."""
        return sum(dim > 1 for dim in self.shape) >= MATRIX_DIMS

    @property
    def is_far(self) -> bool:
        """Whether much of a matrix is something else, whatever its factor."""
        cosine = None if self.values is None else self.values.cosine
        return self.is_matrix and cosine is not None and abs(cosine) < _COSINE_NEAR_MIN


def kind_of(tensor: TensorDiff, sums: PairSums) -> tuple[Kind, Side | None]:
    """What the sums of a tensor that both have tell, and of which side."""
    if sums.nan_in_one or sums.inf_in_one:
        return Kind.NOT_FINITE, None
    if tensor.outcome is Outcome.EQUAL:
        return Kind.EQUAL, None
    if tensor.rounding is not None:
        return Kind.ROUNDED, None
    if sums.finite >= _NUMEL_MIN and (pattern := _pattern(tensor, sums)):
        return pattern
    if tensor.is_matrix and sums.cosine is not None and sums.cosine < COSINE_RELATED_MIN:
        return Kind.UNRELATED, None
    return Kind.MOVED, None


def _pattern(tensor: TensorDiff, sums: PairSums) -> tuple[Kind, Side | None] | None:
    """A difference that follows a rule, as that of training does not."""
    if _is_shifted(sums):
        return Kind.SHIFTED, None
    constant = [side for side in Side if sums.is_constant(side)]
    if len(constant) == 1:
        return Kind.CONSTANT, constant[0]
    for side in Side:
        if _is_zeroed(sums, side, is_matrix=tensor.is_matrix):
            return Kind.ZEROED, side
        if tensor.is_matrix and sums.lost(side).count >= _PRUNED_SHARE_MIN * sums.finite:
            return Kind.PRUNED, side
    if _is_scaled(tensor, sums, is_constant=bool(constant)):
        return Kind.SCALED, None
    return None


def _is_shifted(sums: PairSums) -> bool:
    """Whether the one is the other and one more, with no more of training than a little."""
    rest = max(abs(abs(sums.shift or 0.0) - _SHIFT) / 0.05, sums.shift_rest / 0.1)
    return rest <= _SHIFT


def _is_zeroed(sums: PairSums, side: Side, *, is_matrix: bool) -> bool:
    """Whether this side lost what is as large as the rest; in vectors, single zeros are chance."""
    lost = sums.lost(side)
    if lost.count < _NUMEL_MIN or not (is_matrix or lost.run >= _RUN_MIN):
        return False
    squares = sums.b_squares if side is Side.A else sums.a_squares
    return lost.squares / lost.count >= _LOST_SHARE_MIN * squares / sums.finite


def _is_scaled(tensor: TensorDiff, sums: PairSums, *, is_constant: bool) -> bool:
    """Whether the one is a multiple of the other, exactly, or (by a power of two) nearly.

    What began at zero is after two steps twice what it was after one: biases do not count, nor the
    matrices of an adapter.
    """
    factor, cosine = sums.factor, sums.cosine
    if not factor or not cosine or "lora_" in tensor.name:
        return False
    rms = math.sqrt(sums.b_squares / sums.finite)
    if not tensor.is_matrix and abs(sums.b_sum) / sums.finite < rms / 2:
        return False
    rest = math.sqrt(max(0.0, 1 - cosine * cosine))
    power = round(math.log2(abs(factor)))
    off = abs(abs(factor) / 2**power - 1)
    is_power = power != 0 or factor < 0
    if is_constant:
        return is_power and off <= _EXACT
    dtypes = (tensor.a_dtype, tensor.b_dtype)
    exact = max(_EPSILON.get(dtype, _EXACT) for dtype in dtypes if dtype is not None)
    if rest <= max(exact, _EXACT) and abs(factor - 1) > max(_FACTOR_MIN, 10 * rest):
        return True
    power_off, rest_most = _NEAR_VECTOR if not tensor.is_matrix else _NEAR[power > 0]
    return is_power and off <= power_off and rest <= rest_most
