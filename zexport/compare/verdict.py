"""What all tensors say together: training, a conversion that went wrong, or neither for certain.

A conclusion stands only where it explains every tensor. What training may do is never called an
error; what training does not do is never called training.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod

from msgspec import Struct

from zexport.compare.roundings import Side
from zexport.compare.tensor import COSINE_RELATED_MIN, Kind, Outcome, TensorDiff
from zexport.printable import some

_NAMED = 3
_LAYERS_MIN = 3
_DECAY = (0.5, 2.0)
"""Between these a factor may be what weight decay leaves where there is no gradient."""
_LONG_DECAY = (0.1, 10.0)
_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.)")
_NO_HEAD = re.compile(r"embed|wte|wpe|norm|ln_|\.\d+\.[^.]+\.[^.]+")
"""In names of what every model of a kind has, where a head is new with each task."""
_BUFFER = re.compile(r"rotary|inv_freq|position_ids|attn\.(masked_)?bias$|num_batches_tracked")
_LIMIT = re.compile(r"\.\d+\.")


_AS_MOVED = (Kind.MOVED, Kind.COARSE, Kind.UNRELATED)


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


class _Weight(Enum):
    """What a tensor speaks for."""

    NOTHING = 0
    ERROR = 1
    UNKNOWN = 2


@dataclass(frozen=True)
class _Models:
    """All tensors, and what is known beside them.

    Attributes:
        tensors: every one.
        exported: the side that is known to be an export, where one alone is.
    """

    tensors: Sequence[TensorDiff]
    exported: Side | None

    @property
    def trained(self) -> Side:
        """The side that training, or a conversion, made out of the other."""
        return self.exported or Side.A

    @cached_property
    def moved(self) -> Sequence[TensorDiff]:
        """Tensors that moved as training moves them."""
        return [tensor for tensor in self.tensors if tensor.kind in _AS_MOVED]

    def weight(self, tensor: TensorDiff) -> _Weight:
        """What this tensor speaks for."""
        rule = _RULES.get(tensor.kind)
        return _Weight.NOTHING if rule is None else rule(self, tensor)

    @cached_property
    def modules(self) -> frozenset[str]:
        """Modules of which both sides have something."""
        both = (t.name for t in self.tensors if t.a_name and t.b_name)
        return frozenset(name.rpartition(".")[0] for name in both) - {""}

    @cached_property
    def _layers(self) -> Mapping[str, Sequence[TensorDiff]]:
        layers: dict[str, list[TensorDiff]] = defaultdict(list)
        for tensor in self.tensors:
            layers[_skeleton(tensor.name)].append(tensor)
        return layers

    def peers(self, tensor: TensorDiff) -> Sequence[TensorDiff]:
        """The same tensor of every layer."""
        return self._layers[_skeleton(tensor.name)]

    def is_head(self, tensor: TensorDiff) -> bool:
        """Whether it may be new with its task: in no layer, neither embedding nor norm."""
        return _NO_HEAD.search(tensor.name) is None and len(self.peers(tensor)) < _LAYERS_MIN


def judge(
    tensors: Sequence[TensorDiff],
    adapters: tuple[bool, bool] = (False, False),
    exported: Side | None = None,
) -> Verdict:
    """What made the difference between two models, of whose tensors this was seen.

    Args:
        tensors: every tensor of both.
        adapters: of A and of B, whether it is a peft adapter without its base model.
        exported: the side that is an export where the other is not; by default A is.
    """
    compared = [tensor for tensor in tensors if tensor.values is not None]
    if not compared:
        return _nothing_compared(tensors, adapters)
    models = _Models(tensors, exported)
    weights = [(models.weight(tensor), tensor) for tensor in tensors]
    errors = [tensor for weight, tensor in weights if weight is _Weight.ERROR]
    unknown = [tensor for weight, tensor in weights if weight is _Weight.UNKNOWN]
    unrelated = [tensor for tensor in unknown if tensor.kind is Kind.UNRELATED]
    if 2 * sum(map(_numel, unrelated)) > sum(map(_numel, compared)):
        return Verdict(
            Cause.OTHER_MODEL,
            f"Cannot tell: {_count(unrelated)} of {len(compared):,} have nothing in common, as of "
            "two models that do not come from one another, or of one trained from its beginning",
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
    return _WORDS[tensor.kind].format(
        side="" if tensor.side is None else tensor.side.value.upper(),
        rounding=tensor.rounding,
        factor=(values and values.factor) or 0.0,
        shift=(values and values.shift) or 0.0,
    )


_WORDS = {
    Kind.EQUAL: "equal",
    Kind.ROUNDED: "{rounding}",
    Kind.MOVED: "moved as in training",
    Kind.SCALED: "A is {factor:.2g} times B",
    Kind.SHIFTED: "A is B {shift:+.2g}",
    Kind.ZEROED: "blocks of zeros in {side} alone",
    Kind.CONSTANT: "one number all over in {side} alone",
    Kind.REORDERED: "rows stand in another order",
    Kind.EXCHANGED: "A has the values of another tensor of B",
    Kind.TRANSPOSED: "transposed",
    Kind.COARSE: "few different numbers in {side} alone, as after quantization",
    Kind.NOT_FINITE: "NaN or Inf on one side alone",
    Kind.UNRELATED: "nothing in common",
    Kind.RESHAPED: "of another shape",
    Kind.RENAMED: "under another name on the other side",
    Kind.MISSING: "in {side} alone",
}


# --- rules: what a tensor of a kind speaks for ---


def _rounded(_: _Models, tensor: TensorDiff) -> _Weight:
    """Vectors near one number are explained by any rounding."""
    is_usual = tensor.rounding is None or tensor.rounding.is_usual
    return _Weight.NOTHING if is_usual or not tensor.is_matrix else _Weight.ERROR


def _scaled(models: _Models, tensor: TensorDiff) -> _Weight:
    factor = (tensor.values and tensor.values.factor) or 0.0
    if _DECAY[0] * 1.001 < factor < _DECAY[1] * 0.999:
        return _Weight.NOTHING if models.moved else _Weight.UNKNOWN
    is_power = tensor.values is not None and _is_power(abs(factor))
    is_far = not _LONG_DECAY[0] < factor < _LONG_DECAY[1]
    return _Weight.ERROR if is_power or is_far else _Weight.UNKNOWN


def _is_power(factor: float) -> bool:
    return any(abs(factor / 2.0**power - 1) <= 0.02 for power in range(-4, 5))  # noqa: PLR2004


def _zeroed(models: _Models, tensor: TensorDiff) -> _Weight:
    """Rows may begin at zero (padding, new tokens); that is B's matter, or it cannot be told."""
    values = tensor.values
    lost = 0 if values is None else values.a_zero if tensor.side is Side.A else values.b_zero
    is_all = values is not None and values.unequal == lost and not models.moved
    is_row = lost <= max(tensor.shape[-1:], default=1)
    if tensor.side is models.trained:
        is_sure = is_all or not is_row or models.exported is not None
        return _Weight.ERROR if is_sure else _Weight.UNKNOWN
    return _Weight.NOTHING if is_row and not is_all else _Weight.UNKNOWN


def _constant(models: _Models, tensor: TensorDiff) -> _Weight:
    """Norms and biases begin as one number, in every layer alike."""
    peers = [t.values for t in models.peers(tensor) if t.values is not None]
    is_alike = all(v.a_constant if tensor.side is Side.A else v.b_constant for v in peers)
    if tensor.side is not models.trained:
        return _Weight.NOTHING if models.moved else _Weight.UNKNOWN
    is_sure = not is_alike or models.exported is not None
    return _Weight.ERROR if is_sure else _Weight.UNKNOWN


def _not_finite(models: _Models, tensor: TensorDiff) -> _Weight:
    """Training that diverged leaves NaN everywhere; what rounding made infinite was too large."""
    bad = [t for t in models.tensors if t.kind is Kind.NOT_FINITE]
    if tensor.rounding is not None:
        return _Weight.ERROR
    return _Weight.UNKNOWN if len(bad) > len(models.tensors) / 2 else _Weight.ERROR


def _unrelated(models: _Models, tensor: TensorDiff) -> _Weight:
    return _Weight.NOTHING if models.is_head(tensor) else _Weight.UNKNOWN


def _reshaped(models: _Models, tensor: TensorDiff) -> _Weight:
    """Heads and vocabularies change their size; of the latter the rows are the same."""
    values = tensor.values
    is_same = values is not None and (values.cosine or 0) >= COSINE_RELATED_MIN
    return _Weight.NOTHING if is_same or models.is_head(tensor) else _Weight.UNKNOWN


def _coarse(models: _Models, tensor: TensorDiff) -> _Weight:
    """What training began from may have been quantized."""
    return _Weight.UNKNOWN if tensor.side is models.trained else _Weight.NOTHING


def _missing(models: _Models, tensor: TensorDiff) -> _Weight:
    """A layer, or a part of a module that is there, is lost; heads and buffers come and go."""
    is_lost = tensor.side is models.trained.other
    comes_and_goes = models.is_head(tensor) or _BUFFER.search(tensor.name) is not None
    is_layer = any(peer.a_name and peer.b_name for peer in models.peers(tensor))
    if is_layer or (is_lost and tensor.name.rpartition(".")[0] in models.modules):
        return _Weight.ERROR if is_lost or not models.moved else _Weight.UNKNOWN
    return _Weight.UNKNOWN if is_lost and not comes_and_goes else _Weight.NOTHING


def _error(_: _Models, __: TensorDiff) -> _Weight:
    return _Weight.ERROR


def _unknown(_: _Models, __: TensorDiff) -> _Weight:
    return _Weight.UNKNOWN


_RULES: Mapping[Kind, Callable[[_Models, TensorDiff], _Weight]] = {
    Kind.ROUNDED: _rounded,
    Kind.SCALED: _scaled,
    Kind.SHIFTED: _error,
    Kind.ZEROED: _zeroed,
    Kind.CONSTANT: _constant,
    Kind.REORDERED: _error,
    Kind.EXCHANGED: _error,
    Kind.TRANSPOSED: _error,
    Kind.COARSE: _coarse,
    Kind.NOT_FINITE: _not_finite,
    Kind.UNRELATED: _unrelated,
    Kind.RESHAPED: _reshaped,
    Kind.RENAMED: _unknown,
    Kind.MISSING: _missing,
}


def _skeleton(name: str) -> str:
    return _NUMBERED.sub("*", name)


# --- sentences ---


def _nothing_compared(tensors: Sequence[TensorDiff], adapters: tuple[bool, bool]) -> Verdict:
    if adapters[0] != adapters[1]:
        a, b = ("an adapter", "a model") if adapters[0] else ("a model", "an adapter")
        return Verdict(
            Cause.TENSORS,
            f"A is {a} and B is {b}, whose tensors have other names: zexport consolidate CKPT OUT "
            "--adapter merge --base DIR gives a model to compare",
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


def _training(models: _Models) -> str:
    is_new = {Kind.UNRELATED, Kind.RESHAPED}
    moved = [t for t in models.tensors if t.outcome is Outcome.DIFFERENT and t.kind not in is_new]
    known = [t.values.relative_norm for t in moved if t.values and t.values.relative_norm]
    by = f" by {share(min(known))} to {share(max(known))} of their norm" if known else ""
    modules = Counter(_module(tensor.name) for tensor in moved)
    where = some([f"{module} {count:,}" for module, count in modules.most_common()], _NAMED)
    parts = [f"{_count(moved)} moved{by} ({where})"] if moved else []
    if heads := [tensor.name for tensor in models.tensors if tensor.kind is Kind.UNRELATED]:
        parts.append(f"new is the head ({some(heads, _NAMED)})")
    if reshaped := [tensor for tensor in models.tensors if tensor.kind is Kind.RESHAPED]:
        parts.append(seen(reshaped, _NAMED))
    return f"Looks like training: {'; '.join(parts)}"


def share(value: float) -> str:
    """A part of one, as people write it."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"  # noqa: PLR2004


def _module(name: str) -> str:
    """The part of a layer, or of the model, that a tensor belongs to."""
    inner = _LIMIT.split(name)[-1].removeprefix("model.")
    return inner.split(".")[0]


def _advice(models: _Models) -> str:
    moved = [tensor for tensor in models.moved if tensor.kind is Kind.MOVED]
    beside = f"; {_count(moved)} besides moved as in training" if moved else ""
    return f"{beside}; zexport verify --against the checkpoint tells more"


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
