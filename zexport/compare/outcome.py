"""How one tensor of a model stands to its counterpart in another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from zexport.compare.values import PairSums, Rounding
from zexport.ranges.dtypes import DType


class Outcome(Enum):
    """How a tensor of A stands to that of B."""

    EQUAL = "equal"
    """The same shape, element type and bytes."""
    CAST_EQUAL = "cast_equal"
    """One is the other, rounded to an element type."""
    DIFFERENT = "different"
    """Other values."""
    SHAPE = "shape"
    """Another shape; values are not compared."""
    ONLY_IN_A = "only_in_a"
    ONLY_IN_B = "only_in_b"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor of A, of B, or of both.

    Attributes:
        outcome: how the two stand to each other.
        a_name, b_name: its name on either side, ``None`` where it is not there; they differ where
            one side holds a tied tensor under its other name.
        a_dtype, b_dtype: element types.
        a_shape, b_shape: shapes.
        sums: what was seen of the values; ``None`` where they were not compared.
        rounding: what explains a cast-equal tensor.
    """

    outcome: Outcome
    a_name: str | None
    b_name: str | None
    a_dtype: DType | None = None
    b_dtype: DType | None = None
    a_shape: tuple[int, ...] | None = None
    b_shape: tuple[int, ...] | None = None
    sums: PairSums | None = None
    rounding: Rounding | None = None

    @property
    def name(self) -> str:
        """The name in A, or where it is not there, in B."""
        return self.a_name or self.b_name or ""

    @property
    def worst_at(self) -> tuple[int, ...] | None:
        """Where the largest difference is, one index a dimension."""
        if self.sums is None or self.sums.worst is None or self.a_shape is None:
            return None
        is_complex = DType.C64 in (self.a_dtype, self.b_dtype)
        at = self.sums.worst // (2 if is_complex else 1)
        return tuple(map(int, np.unravel_index(at, self.a_shape)))
