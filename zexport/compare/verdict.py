"""What all tensors say together: training, a conversion that went wrong, or neither for certain.

A conclusion stands only where it explains every tensor. What training may do is never called an
error; what training does not do is never called training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from math import prod

from msgspec import Struct

from zexport.compare.roundings import Side
from zexport.compare.rules import Evidence, Models
from zexport.compare.tensor import Kind, Outcome, TensorDiff
from zexport.printable import some

_NAMED = 3
_COSINE_LITTLE_MIN = 0.1
"""Below this a cosine of two matrices is chance."""
_LIMIT = re.compile(r"\.\d+\.")


class Cause(Enum):
    """What made the difference."""

    NONE = "none"
    """There is none."""
    ROUNDING = "rounding"
    """Element types alone."""
    TENSORS = "tensors"
    """Names or shapes alone."""
    TRAINING = "training"
    """It looks like training."""
    CONVERSION = "conversion"
    """A conversion error is likely."""
    OTHER_MODEL = "other_model"
    """Most of it has nothing in common."""
    UNKNOWN = "unknown"
    """No one explanation covers every tensor."""


class Verdict(Struct, frozen=True):
    """What made the difference.

    Attributes:
        cause: in a word.
        sentence: in words, without a full stop.
    """

    cause: Cause
    sentence: str


def judge(
    tensors: Sequence[TensorDiff],
    adapters: tuple[bool, bool] = (False, False),
    exported: Side | None = None,
    later: Side | None = None,
) -> Verdict:
    """What made the difference between two models, of whose tensors this was seen.

    ``adapters`` says of A and of B whether it is a peft adapter without its base model,
    ``exported`` which side is an export where the other is not; by default A is.
    """
    compared = [tensor for tensor in tensors if tensor.values is not None]
    if not compared:
        return _nothing_compared(tensors, adapters)
    models = Models(tensors, exported, later)
    evidence = [(models.evidence(tensor), tensor) for tensor in tensors]
    errors = [tensor for said, tensor in evidence if said is Evidence.ERROR]
    unknown = [tensor for said, tensor in evidence if said is Evidence.UNKNOWN]
    unrelated = [tensor for tensor in unknown if tensor.kind in (Kind.UNRELATED, Kind.UNTIED)]
    if 2 * sum(map(_numel, unrelated)) > sum(map(_numel, compared)):
        return Verdict(
            Cause.OTHER_MODEL,
            f"Cannot tell: {_count(unrelated)} of {len(compared):,} have little or nothing in "
            "common, as of two models that do not come from one another, or of one trained from "
            "its beginning",
        )
    if unknown:
        kinds = seen([*unknown, *errors], _NAMED)
        return Verdict(Cause.UNKNOWN, f"Cannot tell: {kinds}" + _advice(models))
    if errors:
        return Verdict(
            Cause.CONVERSION,
            f"A conversion error is likely: {seen(errors, _NAMED)}" + _advice(models),
        )
    if any(
        t.values is not None and t.values.unequal and t.kind is not Kind.ROUNDED for t in tensors
    ):
        return Verdict(Cause.TRAINING, _training(models) + _aside(tensors))
    return _same_values(tensors)


def seen(tensors: Iterable[TensorDiff], named: int) -> str:
    """What is seen of tensors, kind by kind, each with some of their names."""
    by_words: dict[str, list[str]] = {}
    for tensor in tensors:
        name = f"{tensor.name} is {tensor.partner}" if tensor.partner else tensor.name
        by_words.setdefault(words(tensor), []).append(name)
    return "; ".join(f"{said} ({some(names, named)})" for said, names in by_words.items())


def words(tensor: TensorDiff) -> str:
    """What is seen of one tensor."""
    values = tensor.values
    cosine = (values and values.cosine) or 0.0
    return _WORDS[tensor.kind].format(
        side="" if tensor.side is None else tensor.side.value.upper(),
        rounding=tensor.rounding,
        moved="only a part in common" if tensor.is_far else "moved as in training",
        factor=(values and values.factor) or 0.0,
        shift=(values and values.shift) or 0.0,
        common="nothing in common"
        if abs(cosine) < _COSINE_LITTLE_MIN
        else f"little in common (cosine {cosine:.1f})",
    )


_WORDS = {
    Kind.EQUAL: "equal",
    Kind.ROUNDED: "{rounding}",
    Kind.MOVED: "{moved}",
    Kind.SCALED: "A is {factor:.2g} times B",
    Kind.SHIFTED: "A is B {shift:+.2g}",
    Kind.ZEROED: "blocks of zeros in {side} alone",
    Kind.PRUNED: "zeros here and there in {side} alone, as after pruning",
    Kind.CONSTANT: "one number in every place, in {side} alone",
    Kind.REORDERED: "rows stand in another order",
    Kind.EXCHANGED: "A has the values of another tensor of B",
    Kind.TRANSPOSED: "transposed",
    Kind.COARSE: "few different numbers in {side} alone, as after quantization",
    Kind.LIMITED: "cut off at one number in {side} alone",
    Kind.NOT_FINITE: "NaN or Inf on one side alone",
    Kind.UNRELATED: "{common}",
    Kind.UNTIED: "tied in {side}, a tensor of its own on the other side",
    Kind.RESHAPED: "of another shape",
    Kind.RENAMED: "under another name on the other side",
    Kind.MISSING: "in {side} alone",
}


def _nothing_compared(tensors: Sequence[TensorDiff], adapters: tuple[bool, bool]) -> Verdict:
    if adapters[0] != adapters[1]:
        a, b = ("an adapter", "a model") if adapters[0] else ("a model", "an adapter")
        return Verdict(
            Cause.TENSORS,
            f"A is {a} and B is {b}, whose tensors have other names: zexport consolidate CKPT OUT "
            "--adapter merge --base MODEL gives a model to compare",
        )
    if renamed := [tensor for tensor in tensors if tensor.kind is Kind.RENAMED]:
        return Verdict(Cause.TENSORS, f"Cannot tell: {seen(renamed, 1)}")
    return Verdict(Cause.OTHER_MODEL, "They have no tensor of one name and shape in common")


def _same_values(tensors: Sequence[TensorDiff]) -> Verdict:
    """Where no tensor that both have is of other values."""
    rounded = [t for t in tensors if t.outcome is Outcome.CAST_EQUAL]
    aside = _aside(tensors)
    if rounded:
        ways = Counter(words(tensor) for tensor in rounded)
        said = " and ".join(f"{way} ({_times(count)})" for way, count in ways.items())
        return Verdict(Cause.ROUNDING, f"Only rounding: {said}; there is nothing beside it" + aside)
    if aside:
        return Verdict(
            Cause.TENSORS,
            "Neither training nor rounding: what both have is the same, byte for byte" + aside,
        )
    return Verdict(
        Cause.NONE, "There is no difference: every tensor is the same on both sides, byte for byte"
    )


def _training(models: Models) -> str:
    is_new = {Kind.UNRELATED, Kind.RESHAPED}
    moved = [t for t in models.tensors if t.outcome is Outcome.DIFFERENT and t.kind not in is_new]
    known = [t.values.relative_norm for t in moved if t.values and t.values.relative_norm]
    by = f" by {share(min(known))} to {share(max(known))} of their norm" if known else ""
    modules = Counter(_module(tensor.name) for tensor in moved)
    counted = [f"{count:,} in {module}" for module, count in modules.most_common()]
    where = some(counted, _NAMED) + " modules" * (len(counted) > _NAMED)
    parts = [f"{_count(moved)} moved{by} ({where})"] if moved else []
    if heads := [tensor.name for tensor in models.tensors if tensor.kind is Kind.UNRELATED]:
        parts.append(f"new is the head ({some(heads, _NAMED)})")
    if reshaped := [tensor for tensor in models.tensors if tensor.kind is Kind.RESHAPED]:
        parts.append(seen(reshaped, _NAMED))
    return f"Looks like training: {'; '.join(parts)}"


def share(value: float) -> str:
    """A part of one, as people write it."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _module(name: str) -> str:
    """The part of a layer, or of the model, that a tensor belongs to."""
    inner = _LIMIT.split(name)[-1].removeprefix("model.")
    return inner.split(".")[0]


def _advice(models: Models) -> str:
    moved = [one for one in models.moved if one.kind is Kind.MOVED and not one.is_far]
    beside = f"; {_count(moved)} besides moved as in training" if moved else ""
    more = "" if models.later else "; zexport verify --against the checkpoint tells more"
    return beside + more


def _numel(tensor: TensorDiff) -> int:
    return prod(tensor.shape)


def _aside(tensors: Sequence[TensorDiff]) -> str:
    """What is not there on both sides in one shape, as the end of a sentence."""
    counts = (
        (Outcome.ONLY_IN_A, "in A alone"),
        (Outcome.ONLY_IN_B, "in B alone"),
        (Outcome.SHAPE, "of another shape"),
    )
    outcomes = Counter(tensor.outcome for tensor in tensors)
    parts = [f"{_times(outcomes[it])} {said}" for it, said in counts if outcomes[it]]
    return f"; besides, {' and '.join(parts)}" if parts else ""


def _count(tensors: Sequence[TensorDiff]) -> str:
    return _times(len(tensors))


def _times(count: int) -> str:
    return f"{count:,} tensor" + ("" if count == 1 else "s")
