"""Heads beside a model: weights that its class does not know and that stand apart from it.

Such is the value head of TRL's ``AutoModelForCausalLMWithValueHead`` (``pretrained_model.*`` and
``v_head.summary.weight``; TRL, ``models/modeling_value_head.py``), and that of the critics that
RLHF trainers build around a model without a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zexport.model.fit import Fit, best_fit, wrapper_prefixes
from zexport.ranges.dtypes import Shape

_TENSORS_MAX = 16
_VALUE_HEADS = ("v_head", "value_head", "reward_head", "critic_head")


def is_value_head(name: str) -> bool:
    """Whether a tensor is of a head that is known by name, whatever the model is."""
    return _first(name) in _VALUE_HEADS


def shared_prefix(stored: Iterable[str]) -> str:
    """What wrappers put before every name, heads included."""
    *_, prefix = wrapper_prefixes(stored)
    return prefix


def without_value_heads(stored: Mapping[str, Shape | None]) -> dict[str, Shape | None]:
    """The names but for those of value heads, which stand where all wrappers are left behind."""
    prefix = shared_prefix(stored)
    return {n: shape for n, shape in stored.items() if not is_value_head(n.removeprefix(prefix))}


def head_names(fit: Fit, stored: Mapping[str, Shape | None]) -> frozenset[str]:
    """The names of the heads; none where the rest would not be the model.

    A head has a first part in its names, at the level where the model begins, that the model does
    not have. It is small, and without it no name is left that the model does not know: anything
    else is no head but another model than the config says. What transformers passes over when it
    loads the model is no head either, but the business of the model's files.
    """
    names = fit.model
    read = {name: shape for name, shape in stored.items() if not names.ignores(name)}
    whole = fit if len(read) == len(stored) else best_fit(names, read)
    if not whole.difference.unexpected:
        return frozenset()
    firsts = {_first(name) for name in names.shapes}
    firsts |= {_first(name) for layout in names.layouts for name in layout.tensors}
    heads = _beside(firsts, read)
    trunk = {name: shape for name, shape in read.items() if name not in heads}
    if not trunk or len(heads) > min(_TENSORS_MAX, len(trunk)):
        return frozenset()
    return frozenset() if best_fit(names, trunk).difference.unexpected else heads


def _beside(firsts: set[str], stored: Iterable[str]) -> frozenset[str]:
    """The names beside the model, which begins where one of its first parts is met.

    Above that level there are wrappers: of what lies side by side there, the model is in the one
    with most names.
    """
    beside: set[str] = set()
    inside, prefix = list(stored), ""
    while inside:
        parts: dict[str, list[str]] = {}
        for name in inside:
            parts.setdefault(_first(name.removeprefix(prefix)), []).append(name)
        if firsts & parts.keys():
            beside.update(
                n for part, members in parts.items() for n in members if part not in firsts
            )
            return frozenset(beside)
        main = max(parts, key=lambda part: len(parts[part]))
        beside.update(n for part, members in parts.items() for n in members if part != main)
        prefix += f"{main}."
        inside = [name for name in parts[main] if name.startswith(prefix)]
    return frozenset()


def _first(name: str) -> str:
    return name.partition(".")[0]
