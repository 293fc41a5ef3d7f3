"""What a model without data tells: names, shapes, ties, and what its tensors become in files.

The rules are transformers' own, run over traced tensors: ``revert_weight_conversion``, which
``save_pretrained`` calls (transformers 5.23, ``core_model_loading.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    build_glob_alternation,
    revert_weight_conversion,
)

from zexport.model.trace import Trace, UntraceableError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFIX_RULES_MAX = 3
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a conversion raises that does not fit the model after all."""

_BUFFERS_ONCE_SAVED = {
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
    "position_ids": r"(^|\.)position_ids$",
}
"""Endings of buffers that older versions saved, to the names that are passed over for them."""


def describe_model(model: PreTrainedModel, *, as_loaded: bool = False) -> dict[str, Any]:
    """The model's state dict and the ways in which it may be saved, as JSON values."""
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    declared: Mapping[str, str] = model.all_tied_weights_keys
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    unsaved = sorted(shapes.keys() & set(model._keys_to_ignore_on_save or ()))
    tied = {a: s for a, s in declared.items() if a in shapes and s in shapes and s not in unsaved}
    description: dict[str, Any] = {
        "architecture": type(model).__name__,
        "shapes": shapes,
        "buffers": sorted(set(state) - parameters),
        "tied": tied,
        "unsaved": unsaved,
        "base_prefix": model.base_model_prefix,
        "keep_fp32": {
            name: _kept_in_fp32(model, shapes, dtype)
            for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))
        },
    }
    saved = {name: shape for name, shape in shapes.items() if name not in (*tied, *unsaved)}
    try:
        ways = [("", None)] if as_loaded else list(_ways(model))
        description["layouts"] = list(_layouts(model, ways, saved, tied))
    except (UntraceableError, *_REFUSALS) as error:
        description["refused"] = f"{type(error).__name__}: {error}"
    return description


def ignored_names(model: PreTrainedModel) -> list[str]:
    """Patterns of names that transformers passes over when it loads the model.

    Source: transformers 5.23, ``modeling_utils.py``, ``_adjust_missing_and_unexpected_keys``.
    """
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = tuple(name for name, _ in model.named_buffers())
    for ending, pattern in _BUFFERS_ONCE_SAVED.items():
        if any(name.endswith(ending) for name in buffers):
            patterns.add(pattern)
    return sorted(patterns)


def _kept_in_fp32(model: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> list[str]:
    """Names that transformers leaves in float32 when it loads the model in ``dtype``."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return []
    pattern, _, _ = build_glob_alternation(list(plan))
    return sorted(name for name in names if pattern.search(name))


def _ways(model: PreTrainedModel) -> Iterator[tuple[str, list[Any] | None]]:
    """A label and the conversions to revert, for each way that a live model may be saved in.

    The first is that of a model that was not loaded from a file, in which transformers leaves
    prefixes out. One that was loaded restores the prefixes of its file. A transposition that
    depends on the shape found is never reverted by transformers; a file may have it nonetheless.
    """
    yield "", None
    count = sum(isinstance(rule, PrefixChange) for rule in _rules(model))
    numbers = range(count)
    sizes = range(count, 0, -1) if count <= _PREFIX_RULES_MAX else (count,)
    chosen = [some for size in sizes for some in combinations(numbers, size)]
    for prefixes in chosen:
        yield f"with {_label(model, prefixes)}", _with_prefixes(_rules(model), prefixes)
    for prefixes in ((), *chosen):
        rules = _with_prefixes(_rules(model), prefixes)
        if _force_transpositions(rules):
            yield f"transposed {_label(model, prefixes)}".strip(), rules


def _rules(model: PreTrainedModel) -> list[Any]:
    rules: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return rules


def _with_prefixes(rules: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
    prefixes = [rule for rule in rules if isinstance(rule, PrefixChange)]
    kept = [prefixes[number] for number in chosen]
    return [rule for rule in rules if not isinstance(rule, PrefixChange) or rule in kept]


def _label(model: PreTrainedModel, chosen: Sequence[int]) -> str:
    prefixes = [rule for rule in _rules(model) if isinstance(rule, PrefixChange)]
    words = [prefixes[n].prefix_to_remove or f"no {prefixes[n].prefix_to_add}" for n in chosen]
    return f"prefix {', '.join(words)}" if words else ""


def _force_transpositions(rules: Iterable[Any]) -> bool:
    """Have transpositions reverted whatever the shape is; whether there are any."""
    operations = [
        operation
        for rule in rules
        for operation in getattr(rule, "operations", ())
        if getattr(operation, "check_dims", False)
    ]
    for operation in operations:
        operation.check_dims = False
    return bool(operations)


def _layouts(
    model: PreTrainedModel,
    ways: Iterable[tuple[str, list[Any] | None]],
    saved: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """Each way's hub tensors; those that are as an earlier way has them are left out."""
    seen: list[dict[str, Any]] = []
    for label, conversions in ways:
        if conversions is not None:
            model._weight_conversions = conversions
        taken = sum(other["label"].startswith(label) for other in seen)
        unique = f"{label} ({taken})" if label and taken else label
        layout = {"label": unique, **_layout(model, saved, tied)}
        if all({**layout, "label": ""} != {**other, "label": ""} for other in seen):
            seen.append(layout)
            yield layout


def _layout(
    model: PreTrainedModel, saved: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> dict[str, Any]:
    """Hub name to entry, and the names that aliases would have if they were no aliases."""
    with Trace(saved) as trace:
        hub = revert_weight_conversion(model, dict(trace.tensors))
    layout: dict[str, Any] = {
        "tensors": {name: trace.entry_of(tensor) for name, tensor in hub.items()},
        "sources": list(saved),
        "parts": trace.parts(),
    }
    if tied:
        layout["aliases"] = _alias_names(model, saved, tied)
    return layout


def _alias_names(
    model: PreTrainedModel, saved: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> dict[str, str]:
    """Hub name of each alias that a renaming alone gives one."""
    everything = {**saved, **{alias: saved[source] for alias, source in tied.items()}}
    names = list(everything)
    with Trace(everything) as trace:
        hub = revert_weight_conversion(model, dict(trace.tensors))
    entries = {name: trace.entry_of(tensor) for name, tensor in hub.items()}
    return {
        names[entry]: name
        for name, entry in entries.items()
        if isinstance(entry, int) and names[entry] in tied
    }
