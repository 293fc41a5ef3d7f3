"""Describe a model on the meta device: names, shapes, ties, and how its files are made.

``save_pretrained`` calls ``revert_weight_conversion`` (transformers 5.23,
``core_model_loading.py``), which runs here on tensors without data. A view's storage, offset and
stride give its place, a copy is recorded as boxes, and operators that compute values are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count, product
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    build_glob_alternation,
    revert_weight_conversion,
)

from zexport.ranges.source import row_major

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Shapes = Mapping[str, tuple[int, ...]]
    Ways = Iterable[tuple[str, list[Any] | None]]

_aten = torch.ops.aten
_RESHAPES = {_aten.view, _aten._unsafe_view}
_JOINS = {_aten.cat, _aten.stack}

Entry = list[list[int]]
"""A tensor in JSON: its shape, then its boxes. See ``Trace.entry_of``."""

_PREFIX_RULES_MAX = 3
REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a conversion raises that does not fit the model."""

_BUFFERS_ONCE_SAVED = {
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
    "position_ids": r"(^|\.)position_ids$",
}
"""Endings of buffers that older versions saved, and the pattern that skips them on loading."""


def describe_model(model: PreTrainedModel, *, as_loaded: bool = False) -> dict[str, Any]:
    """Return ``ModelNames`` and the ways to save the model (``StoredLayout``), as JSON values."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unsaved = sorted(shapes.keys() & set(model._keys_to_ignore_on_save or ()))
    tied = {
        alias: source
        for alias, source in model.all_tied_weights_keys.items()
        if alias in shapes and source in shapes and source not in unsaved
    }
    kept = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        plan = model._get_dtype_plan(dtype)
        pattern = build_glob_alternation(list(plan))[0] if plan else None
        kept[name] = sorted(one for one in shapes if pattern and pattern.search(one))
    names: dict[str, Any] = {
        "architecture": type(model).__name__,
        "shapes": shapes,
        "buffers": sorted(shapes.keys() - parameters),
        "tied": tied,
        "unsaved": unsaved,
        "base_prefix": model.base_model_prefix,
        "keep_fp32": kept,
    }
    saved = {name: shape for name, shape in shapes.items() if name not in (*tied, *unsaved)}
    try:
        ways = [("", None)] if as_loaded else list(_ways(model))
        return {**names, "layouts": _layouts(model, ways, saved, tied)}
    except REFUSALS as error:
        return {**names, "refused": f"{type(error).__name__}: {error}"}


def ignored_names(model: PreTrainedModel) -> list[str]:
    """Return patterns of names that transformers skips when it loads the model.

    Source: transformers 5.23, ``modeling_utils.py`` (``_adjust_missing_and_unexpected_keys``).
    """
    buffers = [name for name, _ in model.named_buffers()]
    once_saved = {
        pattern
        for ending, pattern in _BUFFERS_ONCE_SAVED.items()
        if any(name.endswith(ending) for name in buffers)
    }
    return sorted(once_saved.union(model._keys_to_ignore_on_load_unexpected or ()))


def _ways(model: PreTrainedModel) -> Iterator[tuple[str, list[Any] | None]]:
    """Yield a label and the conversions to revert, for each way to save a live model.

    The first is that of a model that was not loaded from a file: transformers then leaves prefixes
    out. For a loaded model it restores the prefixes of the file. transformers never reverts a
    transposition that depends on the shape it finds, but a file may have it.
    """
    yield "", None
    prefixes = [
        rule.prefix_to_remove or f"no {rule.prefix_to_add}"
        for rule in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(rule, PrefixChange)
    ]
    every = range(len(prefixes))
    sizes = range(len(every), 0, -1) if len(every) <= _PREFIX_RULES_MAX else (len(every),)
    chosen = [kept for size in sizes for kept in combinations(every, size)]
    for kept, is_transposed in [*product(chosen, [False]), *product([(), *chosen], [True])]:
        label = f"prefix {', '.join(prefixes[number] for number in kept)}" if kept else ""
        numbers = count()
        rules = [
            rule
            for rule in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(rule, PrefixChange) or next(numbers) in kept
        ]
        if not is_transposed:
            yield f"with {label}", rules
        elif _force_transpositions(rules):
            yield f"transposed {label}".strip(), rules


def _force_transpositions(rules: Iterable[Any]) -> bool:
    """Make the rules revert transpositions of any shape; return whether there are any."""
    operations = [
        operation
        for rule in rules
        for operation in getattr(rule, "operations", ())
        if getattr(operation, "check_dims", False)
    ]
    for operation in operations:
        operation.check_dims = False
    return bool(operations)


def _layouts(model: Any, ways: Ways, saved: Shapes, tied: Mapping[str, str]) -> list[Any]:
    """Return the layout of each way to save that differs from those before it."""
    found: dict[str, dict[str, Any]] = {}
    for label, conversions in ways:
        if conversions is not None:
            model._weight_conversions = conversions
        layout = _layout(model, saved, tied)
        if layout not in found.values():
            taken = sum(other.startswith(label) for other in found)
            found[f"{label} ({taken})" if label and taken else label] = layout
    return [{"label": label, **layout} for label, layout in found.items()]


def _layout(model: PreTrainedModel, saved: Shapes, tied: Mapping[str, str]) -> dict[str, Any]:
    """Return hub name to entry, and the hub names of aliases that are only renamed."""
    trace, tensors = _reverted(model, saved)
    layout = {"tensors": tensors, "sources": list(saved), "parts": trace.parts()}
    if tied:
        everything = {**saved, **{alias: saved[source] for alias, source in tied.items()}}
        names, (_, entries) = list(everything), _reverted(model, everything)
        layout["aliases"] = {
            names[entry]: name
            for name, entry in entries.items()
            if isinstance(entry, int) and names[entry] in tied
        }
    return layout


def _reverted(model: PreTrainedModel, shapes: Shapes) -> tuple[Trace, dict[str, Any]]:
    with Trace(shapes) as trace:
        hub = revert_weight_conversion(model, dict(trace.tensors))
    return trace, {name: trace.entry_of(tensor) for name, tensor in hub.items()}


@dataclass(frozen=True)
class _Part:
    """A new tensor that was joined from others: its shape, and the start and source of each box."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], torch.Tensor], ...]


class Trace(TorchDispatchMode):
    """While active, records where elements of ``tensors``, which have no data, end up."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        self._parts: list[_Part] = []
        self._kept = list(self.tensors.values())  # the number of a freed storage is reused
        self._roots = {tensor.untyped_storage()._cdata: n for n, tensor in enumerate(self._kept)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator without data and record the place of its result."""
        packet, kwargs = func.overloadpacket, kwargs or {}
        if packet is _aten.clone:
            return _aten.alias(args[0])  # a copy has the place of its source
        if packet in _RESHAPES:
            return self._reshaped(func, args[0], args[1])
        if packet in _JOINS:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return self._joined(args[0], dim, is_stack=packet is _aten.stack)
        if func.is_view:
            return func(*args, **kwargs)
        raise ValueError(f"{func} computes values")

    def entry_of(self, tensor: torch.Tensor) -> int | Entry:
        """Return a result as JSON: the number of a source that it equals, else shape and boxes.

        Sources are the tensors of ``shapes`` in order, then :meth:`parts`. A box is
        ``[source, offset, *stride, *start, *shape]``: its elements in the source and its place in
        the result. A dense box that is all of the result is ``[source, offset]``.
        """
        source = self._source_of(tensor)
        part = source - len(self.tensors)
        is_whole = _place(tensor) == _place(self._kept[source])
        if is_whole and part < 0:
            return source
        return self._entry(self._parts[part] if is_whole else _all_of(tensor))

    def parts(self) -> list[Entry]:
        """Intermediate joined tensors in the order they were made, each of earlier ones."""
        return [self._entry(part) for part in self._parts]

    def _entry(self, part: _Part) -> Entry:
        entry: Entry = [list(part.shape)]
        for start, box in part.boxes:
            shape, stride = tuple(box.shape), box.stride()
            place = [self._source_of(box), box.storage_offset()]
            if shape != part.shape or stride != row_major(shape):
                place += [*stride, *start, *shape]
            entry.append(place)
        return entry

    def _reshaped(self, func: Any, tensor: torch.Tensor, shape: Any) -> Any:
        try:
            return func(tensor, shape)
        except RuntimeError:  # no view has that shape
            return func(self._made(_all_of(tensor)), shape)

    def _joined(self, tensors: Sequence[torch.Tensor], dim: int, *, is_stack: bool) -> torch.Tensor:
        if is_stack:
            tensors = [_aten.unsqueeze(tensor, dim) for tensor in tensors]
        boxes, begin, dims = [], 0, tensors[0].dim()
        dim %= dims
        for tensor in tensors:
            start = tuple(begin if index == dim else 0 for index in range(dims))
            if tensor.numel():
                boxes.append((start, tensor))
            begin += tensor.shape[dim]
        shape = [begin if index == dim else n for index, n in enumerate(tensors[0].shape)]
        return self._made(_Part(tuple(shape), tuple(boxes)))

    def _made(self, part: _Part) -> torch.Tensor:
        self._parts.append(part)
        made = torch.empty(part.shape, device="meta")
        self._roots[made.untyped_storage()._cdata] = len(self._kept)
        self._kept.append(made)
        return made

    def _source_of(self, tensor: torch.Tensor) -> int:
        source = self._roots.get(tensor.untyped_storage()._cdata)
        if source is None:
            raise ValueError("a result comes from none of the tensors")
        return source


def _all_of(tensor: torch.Tensor) -> _Part:
    return _Part(tuple(tensor.shape), (((0,) * tensor.dim(), tensor),))


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()
