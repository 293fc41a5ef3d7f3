"""What a tensor speaks for, by what is seen of it: training, an error, or neither for certain.

What training may do is never called an error; what training does not do is never called training.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from zexport.compare.roundings import Side
from zexport.compare.tensor import COSINE_RELATED_MIN, Kind, TensorDiff

_LAYERS_MIN = 3
_DECAY = (0.5, 2.0)
"""Between these a factor may be what weight decay leaves where there is no gradient."""
_LONG_DECAY = (0.1, 10.0)
_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.)")
_NO_HEAD = re.compile(r"embed|wte|wpe|norm|ln_|\.\d+\.[^.]+\.[^.]+")
"""In names of what every model of a kind has, where a head is new with each task."""
_BUFFER = re.compile(r"rotary|inv_freq|position_ids|attn\.(masked_)?bias$|num_batches_tracked")
_AS_MOVED = (Kind.MOVED, Kind.COARSE, Kind.UNRELATED)


class Evidence(Enum):
    """What a tensor speaks for."""

    NOTHING = 0
    ERROR = 1
    UNKNOWN = 2


@dataclass(frozen=True)
class Models:
    """All tensors, the side that alone is known to be an export, and that of more steps."""

    tensors: Sequence[TensorDiff]
    exported: Side | None
    later: Side | None = None

    @property
    def trained(self) -> Side:
        """The side that training, or a conversion, made out of the other."""
        return self.exported or self.later or Side.A

    @cached_property
    def moved(self) -> Sequence[TensorDiff]:
        """Tensors that moved as training moves them."""
        return [tensor for tensor in self.tensors if tensor.kind in _AS_MOVED]

    def evidence(self, tensor: TensorDiff) -> Evidence:
        """What this tensor speaks for."""
        rule = _RULES.get(tensor.kind, Evidence.NOTHING)
        return rule if isinstance(rule, Evidence) else rule(self, tensor)

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


def _rounded(_: Models, tensor: TensorDiff) -> Evidence:
    """Vectors near one number are explained by any rounding."""
    is_usual = tensor.rounding is None or tensor.rounding.is_usual
    return Evidence.NOTHING if is_usual or not tensor.is_matrix else Evidence.ERROR


def _scaled(models: Models, tensor: TensorDiff) -> Evidence:
    factor = (tensor.values and tensor.values.factor) or 0.0
    if _DECAY[0] * 1.001 < factor < _DECAY[1] * 0.999:
        return Evidence.NOTHING if models.moved else Evidence.UNKNOWN
    powers = (2.0**power for power in range(-4, 5))
    is_power = tensor.values is not None and any(abs(abs(factor) / p - 1) <= 0.02 for p in powers)
    is_far = not _LONG_DECAY[0] < factor < _LONG_DECAY[1]
    return Evidence.ERROR if is_power or is_far else Evidence.UNKNOWN


def _zeroed(models: Models, tensor: TensorDiff) -> Evidence:
    """Rows may begin at zero (padding, new tokens); that is B's matter, or it cannot be told."""
    values = tensor.values
    lost = 0 if values is None else values.a_zero if tensor.side is Side.A else values.b_zero
    is_all = values is not None and values.unequal == lost and not models.moved
    is_row = lost <= max(tensor.shape[-1:], default=1)
    if tensor.side is models.trained:
        is_sure = is_all or not is_row or models.exported is not None
        return Evidence.ERROR if is_sure else Evidence.UNKNOWN
    return Evidence.NOTHING if is_row and not is_all else Evidence.UNKNOWN


def _constant(models: Models, tensor: TensorDiff) -> Evidence:
    """Norms and biases begin as one number, in every layer alike."""
    peers = [t.values for t in models.peers(tensor) if t.values is not None]
    is_alike = all(v.a_constant if tensor.side is Side.A else v.b_constant for v in peers)
    if tensor.side is not models.trained:
        return Evidence.NOTHING if models.moved else Evidence.UNKNOWN
    is_sure = not is_alike or models.exported is not None
    return Evidence.ERROR if is_sure else Evidence.UNKNOWN


def _not_finite(models: Models, tensor: TensorDiff) -> Evidence:
    """Training that diverged leaves NaN everywhere; what rounding made infinite was too large."""
    bad = [t for t in models.tensors if t.kind is Kind.NOT_FINITE]
    if tensor.rounding is not None:
        return Evidence.ERROR
    return Evidence.UNKNOWN if len(bad) > len(models.tensors) / 2 else Evidence.ERROR


def _unrelated(models: Models, tensor: TensorDiff) -> Evidence:
    return Evidence.NOTHING if models.is_head(tensor) else Evidence.UNKNOWN


def _moved(models: Models, tensor: TensorDiff) -> Evidence:
    """Training goes far from where it began, but for heads and adapters, only if it is long."""
    is_known = models.is_head(tensor) or "lora_" in tensor.name
    return Evidence.UNKNOWN if tensor.is_far and not is_known else Evidence.NOTHING


def _reshaped(models: Models, tensor: TensorDiff) -> Evidence:
    """Heads and vocabularies change their size; of the latter the rows are the same."""
    values = tensor.values
    is_same = values is not None and (values.cosine or 0) >= COSINE_RELATED_MIN
    return Evidence.NOTHING if is_same or models.is_head(tensor) else Evidence.UNKNOWN


def _coarse(models: Models, tensor: TensorDiff) -> Evidence:
    """What training began from may have been quantized, cut off or pruned."""
    return Evidence.UNKNOWN if tensor.side is models.trained else Evidence.NOTHING


def _missing(models: Models, tensor: TensorDiff) -> Evidence:
    """A layer, or a part of a module that is there, is lost; heads and buffers come and go."""
    is_lost = tensor.side is models.trained.other
    comes_and_goes = models.is_head(tensor) or _BUFFER.search(tensor.name) is not None
    is_layer = any(peer.a_name and peer.b_name for peer in models.peers(tensor))
    if is_layer or (is_lost and tensor.name.rpartition(".")[0] in models.modules):
        return Evidence.ERROR if is_lost or not models.moved else Evidence.UNKNOWN
    return Evidence.UNKNOWN if is_lost and not comes_and_goes else Evidence.NOTHING


_RULES: Mapping[Kind, Evidence | Callable[[Models, TensorDiff], Evidence]] = {
    Kind.ROUNDED: _rounded,
    Kind.MOVED: _moved,
    Kind.SCALED: _scaled,
    Kind.SHIFTED: Evidence.ERROR,
    Kind.ZEROED: _zeroed,
    Kind.PRUNED: _coarse,
    Kind.CONSTANT: _constant,
    Kind.REORDERED: Evidence.ERROR,
    Kind.EXCHANGED: Evidence.ERROR,
    Kind.TRANSPOSED: Evidence.ERROR,
    Kind.COARSE: _coarse,
    Kind.LIMITED: _coarse,
    Kind.NOT_FINITE: _not_finite,
    Kind.UNRELATED: _unrelated,
    Kind.UNTIED: Evidence.UNKNOWN,
    Kind.RESHAPED: _reshaped,
    Kind.RENAMED: Evidence.UNKNOWN,
    Kind.MISSING: _missing,
}


def _skeleton(name: str) -> str:
    return _NUMBERED.sub("*", name)
