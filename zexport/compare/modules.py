"""What differs by module: which layer moved, and how far."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from zexport.compare.tensor import Outcome, TensorDiff
from zexport.store.json import Natural

_LAYER = re.compile(r"(.*?\.\d+)\.")


class ModuleDiff(Struct, frozen=True):
    """The tensors of one layer, or of one module that is in none.

    Attributes:
        name: the layer with its number, or the tensor's name less its last part.
        tensors: how many of them were compared.
        unequal: how many of those are not the same, byte for byte.
        relative_norm: norm of all their differences over the norm of A; ``None`` where A is zero.
    """

    name: str
    tensors: Natural
    unequal: Natural
    relative_norm: float | None


def by_module(tensors: Iterable[TensorDiff]) -> tuple[ModuleDiff, ...]:
    """The modules of the tensors that were compared, those that differ most first."""
    groups: dict[str, list[TensorDiff]] = {}
    for tensor in tensors:
        if tensor.values is not None:
            groups.setdefault(module_of(tensor.name), []).append(tensor)
    found = [_module(name, group) for name, group in groups.items()]
    return tuple(sorted(found, key=_order))


def module_of(name: str) -> str:
    """The layer that a tensor is in, or else its name less the last part."""
    layer = _LAYER.match(name)
    return layer[1] if layer else name.rpartition(".")[0] or name


def _module(name: str, tensors: Sequence[TensorDiff]) -> ModuleDiff:
    values = [tensor.values for tensor in tensors if tensor.values is not None]
    norm = math.hypot(*(one.norm or 0.0 for one in values))
    apart = math.hypot(*((one.relative_norm or 0.0) * (one.norm or 0.0) for one in values))
    return ModuleDiff(
        name=name,
        tensors=len(tensors),
        unequal=sum(tensor.outcome is not Outcome.EQUAL for tensor in tensors),
        relative_norm=apart / norm if norm else None,
    )


def _order(module: ModuleDiff) -> tuple[float, bool, str]:
    return -(module.relative_norm or 0.0), not module.unequal, module.name
