"""What all tensors and settings add up to, in a word and in a sentence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum

from msgspec import Struct

from zexport.diff.tensor import Outcome, TensorDiff
from zexport.text import some

_NAMED = 3
_LAYER = re.compile(r"\.\d+\.")


class Cause(Enum):
    """The kind of difference; if there are several, the last one of these."""

    NONE = "none"
    """There is none."""
    ROUNDING = "rounding"
    """Tensors are equal after rounding to a dtype."""
    SETTINGS = "settings"
    """Settings differ, but no tensor does except by rounding."""
    TENSORS = "tensors"
    """Tensors are missing on one side, or have another shape."""
    VALUES = "values"
    """Tensors have other values, or NaN or infinities on one side only."""


class Verdict(Struct, frozen=True):
    """What the difference is.

    Attributes:
        cause: the kind of difference; of several, values, then tensors, then settings.
        sentence: in words, without a full stop.
    """

    cause: Cause
    sentence: str


def judge(
    weights: Sequence[TensorDiff],
    states: Sequence[TensorDiff] = (),
    *,
    are_set_otherwise: bool = False,
    adapters: tuple[bool, bool] = (False, False),
) -> Verdict:
    """Return what differs between two models or checkpoints.

    ``states`` are optimizer states, ``are_set_otherwise`` says whether settings differ, and
    ``adapters`` whether A and B are PEFT adapters without their base models.
    """
    tensors = [*weights, *states]
    cause = _cause(tensors, are_set_otherwise=are_set_otherwise)
    if cause is Cause.NONE:
        first = "There is no difference: every tensor is the same on both sides, byte for byte"
    elif all(tensor.outcome is Outcome.EQUAL for tensor in weights):
        first = "The weights are equal" if states else "Every tensor is equal"
    else:
        first = _of_weights(weights, adapters)
    of_settings = "what is set beside the tensors differs" if are_set_otherwise else ""
    return Verdict(cause, _joined(first, _of_states(states), of_settings))


def words(tensor: TensorDiff) -> str:
    """Return what is seen of one tensor."""
    if tensor.outcome in _WORDS:
        return _WORDS[tensor.outcome]
    if tensor.is_finite_on_one_side:
        return "NaN or Inf on one side alone"
    if tensor.rounding is not None:
        return str(tensor.rounding)
    return f"all zero in {tensor.zero_side}" if tensor.zero_side else "changed"


_WORDS = {
    Outcome.EQUAL: "equal",
    Outcome.SHAPE: "of another shape",
    Outcome.ONLY_IN_A: "in A alone",
    Outcome.ONLY_IN_B: "in B alone",
}


def share(value: float) -> str:
    """Return a part of one as people write it."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _cause(tensors: Iterable[TensorDiff], *, are_set_otherwise: bool) -> Cause:
    causes = {Cause.VALUES if t.is_finite_on_one_side else _CAUSES[t.outcome] for t in tensors}
    if are_set_otherwise:
        causes.add(Cause.SETTINGS)
    return next((cause for cause in reversed(Cause) if cause in causes), Cause.NONE)


_CAUSES = {
    Outcome.EQUAL: Cause.NONE,
    Outcome.CAST_EQUAL: Cause.ROUNDING,
    Outcome.DIFFERENT: Cause.VALUES,
    Outcome.SHAPE: Cause.TENSORS,
    Outcome.ONLY_IN_A: Cause.TENSORS,
    Outcome.ONLY_IN_B: Cause.TENSORS,
}


def _of_weights(tensors: Sequence[TensorDiff], adapters: tuple[bool, bool]) -> str:
    """Return what differs between weights of which some are not equal."""
    compared = [tensor for tensor in tensors if tensor.values is not None]
    if not compared:
        return _nothing_compared(adapters)
    rounded = _rounded(compared)
    if _cause(tensors, are_set_otherwise=False) is Cause.ROUNDING:
        return f"Only rounding: {rounded}; there is nothing beside it"
    of_both = _joined(_changed(compared), rounded, _not_finite_or_zero(compared))
    return _joined(of_both or "What both have is the same, byte for byte", _besides(tensors))


def _nothing_compared(adapters: tuple[bool, bool]) -> str:
    if adapters[0] == adapters[1]:
        return "They have no tensor of one name and shape in common"
    a, b = ("an adapter", "a model") if adapters[0] else ("a model", "an adapter")
    return (
        f"A is {a} and B is {b}, whose tensors have other names: zexport consolidate CKPT OUT "
        "--adapter merge --base MODEL gives a model to compare"
    )


def _changed(compared: Sequence[TensorDiff]) -> str:
    """Return how many tensors changed, by how much, and in which modules."""
    changed = [tensor for tensor in compared if tensor.outcome is Outcome.DIFFERENT]
    if not changed:
        return ""
    norms = [t.values.relative_norm for t in changed if t.values and t.values.relative_norm]
    bounds = dict.fromkeys((share(min(norms)), share(max(norms)))) if norms else ()
    by = f" by {' to '.join(bounds)} of their norm" if norms else ""
    modules = Counter(_module(tensor.name) for tensor in changed).most_common()
    counted = [f"{count:,} in {module}" for module, count in modules]
    where = some(counted, _NAMED) + " modules" * (len(counted) > _NAMED)
    return f"{len(changed):,} of {_times(len(compared))} changed{by} ({where})"


def _module(name: str) -> str:
    """Return the part of a layer, or of the model, that a tensor belongs to."""
    return _LAYER.split(name)[-1].removeprefix("model.").split(".")[0]


def _rounded(compared: Sequence[TensorDiff]) -> str:
    rounded = [t for t in compared if t.rounding is not None and not t.is_finite_on_one_side]
    ways = Counter(map(words, rounded))
    return " and ".join(f"{way} ({_times(count)})" for way, count in ways.items())


def _not_finite_or_zero(compared: Sequence[TensorDiff]) -> str:
    names: dict[str, list[str]] = {}
    for tensor in compared:
        if tensor.is_finite_on_one_side or tensor.zero_side:
            names.setdefault(words(tensor), []).append(tensor.name)
    return _joined(*(f"{said} ({some(group, _NAMED)})" for said, group in names.items()))


def _besides(tensors: Sequence[TensorDiff]) -> str:
    """Return how many tensors are missing on one side or have another shape."""
    outcomes = Counter(tensor.outcome for tensor in tensors)
    kinds = (Outcome.ONLY_IN_A, Outcome.ONLY_IN_B, Outcome.SHAPE)
    parts = [f"{_times(outcomes[kind])} {_WORDS[kind]}" for kind in kinds if outcomes[kind]]
    return f"besides, {' and '.join(parts)}" if parts else ""


def _of_states(states: Sequence[TensorDiff]) -> str:
    if not states:
        return ""
    unequal = sorted(one.name for one in states if one.outcome is not Outcome.EQUAL)
    if not unequal:
        return f"the optimizer's {len(states):,} states are equal"
    if len(unequal) == len(states):
        return f"the optimizer's {len(states):,} states differ"
    named = some(unequal, _NAMED)
    return f"{len(unequal):,} of the optimizer's {len(states):,} states differ ({named})"


def _times(count: int) -> str:
    return f"{count:,} tensor" + ("" if count == 1 else "s")


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))
