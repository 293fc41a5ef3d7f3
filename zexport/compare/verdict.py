"""How one tensor stands to its counterpart, and all of them: is it training or the conversion?

Training moves all of a matrix a little; a conversion that goes wrong leaves most tensors as they
are and makes a few into something else. The limits below err towards suspecting the conversion: a
suspicion can be checked (``zexport verify --against``), a wrong all-clear cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import numpy as np
from msgspec import Struct

from zexport.compare.values import PairSums, Rounding
from zexport.printable import some
from zexport.ranges.dtypes import DType

_COSINE_RELATED_MIN = 0.5
"""Below this two matrices have nothing in common: of random ones it is near 0."""
_NAMED = 3
_MATRIX_DIMS = 2


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


class Cause(Enum):
    """What made the difference."""

    NONE = "none"
    """There is none."""
    ROUNDING = "rounding"
    """Element types alone."""
    TENSORS = "tensors"
    """Names or shapes alone."""
    TRAINING = "training"
    """Values that moved, as training moves them."""
    CONVERSION = "conversion"
    """Values that training does not make."""
    OTHER_MODEL = "other_model"
    """Most of it has nothing in common."""


class Verdict(Struct, frozen=True):
    """What made the difference, as a word and in one sentence without a full stop."""

    cause: Cause
    sentence: str


def judge(tensors: Sequence[TensorDiff], adapters: tuple[bool, bool] = (False, False)) -> Verdict:
    """What made the difference between two models, of whose tensors this was seen.

    ``adapters`` tells of A and of B whether it is a peft adapter without its base model.
    """
    different = [t for t in tensors if t.outcome is Outcome.DIFFERENT]
    strange = [tensor for tensor in different if _is_strange(tensor)]
    compared = [tensor for tensor in tensors if tensor.sums is not None]
    if not compared and adapters[0] != adapters[1]:
        a, b = ("an adapter", "a model") if adapters[0] else ("a model", "an adapter")
        return Verdict(
            Cause.TENSORS,
            f"A is {a} and B is {b}, whose tensors have other names: zexport consolidate CKPT OUT "
            "--adapter merge --base DIR gives a model to compare",
        )
    if not compared:
        return Verdict(Cause.OTHER_MODEL, "They have no tensor of one name and shape in common")
    if not different:
        return _same_values(tensors)
    aside = _aside(tensors)
    if not strange:
        return Verdict(Cause.TRAINING, _training(different, compared) + aside)
    if _is_most(strange, compared):
        return Verdict(
            Cause.OTHER_MODEL,
            f"Neither: {_count(strange)} of {len(compared):,} have nothing in common "
            f"({_names(strange)}), as of two models that do not come from one another" + aside,
        )
    return Verdict(
        Cause.CONVERSION,
        f"Suspect the conversion: {_count(strange)} of {len(compared):,} became something "
        f"else ({_names(strange)}), as training does not make them; zexport verify --against the "
        "checkpoint tells" + aside,
    )


def _same_values(tensors: Sequence[TensorDiff]) -> Verdict:
    """Where no tensor that both have is of other values."""
    rounded = [t for t in tensors if t.outcome is Outcome.CAST_EQUAL]
    aside = _aside(tensors)
    if rounded:
        types = sorted({t.rounding.dtype.torch_name for t in rounded if t.rounding})
        return Verdict(
            Cause.ROUNDING,
            f"It is the conversion alone, and only its rounding: {_count(rounded)} on one side "
            f"are the other's in {' and '.join(types)}; nothing was trained" + aside,
        )
    if aside:
        return Verdict(
            Cause.TENSORS,
            "Neither training nor rounding: what both have is the same, byte for byte" + aside,
        )
    return Verdict(
        Cause.NONE, "There is no difference: every tensor is the same on both sides, byte for byte"
    )


def _training(different: Sequence[TensorDiff], compared: Sequence[TensorDiff]) -> str:
    changes = [t.sums.relative_norm for t in different if t.sums is not None]
    known = [change for change in changes if change is not None]
    by = f", by at most {max(known):.2g} of its norm" if known else ""
    return (
        f"It is the training, not the conversion: {_count(different)} of "
        f"{len(compared):,} moved{by}, and none became something else"
    )


def _is_strange(tensor: TensorDiff) -> bool:
    """Whether training would not have made the one out of the other.

    NaN or infinities on one side alone, all zero in A alone, or a matrix that points elsewhere.
    Vectors may turn in training: biases begin at zero.
    """
    sums = tensor.sums
    if sums is None:
        return False
    if sums.nan_in_one or sums.inf_in_one or (sums.b_squares and not sums.a_squares):
        return True
    is_matrix = sum(dim > 1 for dim in tensor.a_shape or ()) >= _MATRIX_DIMS
    return is_matrix and sums.cosine is not None and sums.cosine < _COSINE_RELATED_MIN


def _is_most(tensors: Iterable[TensorDiff], of: Sequence[TensorDiff]) -> bool:
    """Whether these are more than half of the elements."""
    return 2 * sum(map(_numel, tensors)) > sum(map(_numel, of))


def _numel(tensor: TensorDiff) -> int:
    return prod(tensor.a_shape or ())


def _aside(tensors: Sequence[TensorDiff]) -> str:
    """What is not there to be compared, as the end of a sentence."""
    counts = (
        (Outcome.ONLY_IN_A, "in A alone"),
        (Outcome.ONLY_IN_B, "in B alone"),
        (Outcome.SHAPE, "of another shape"),
    )
    outcomes = Counter(tensor.outcome for tensor in tensors)
    parts = [f"{outcomes[outcome]:,} {words}" for outcome, words in counts if outcomes[outcome]]
    return f"; besides, there are tensors not compared: {', '.join(parts)}" if parts else ""


def _count(tensors: Sequence[TensorDiff]) -> str:
    return f"{len(tensors):,} tensor" + ("" if len(tensors) == 1 else "s")


def _names(tensors: Sequence[TensorDiff]) -> str:
    return some([tensor.name for tensor in tensors], _NAMED)
