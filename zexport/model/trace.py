"""What a conversion does to its tensors, learnt by running it on tensors without data.

Views tell their place by storage, offset and stride. Copies are recorded as boxes of what they are
copied from. Anything that computes cannot be told as a place and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zexport.ranges.mosaic import row_major

_aten = torch.ops.aten

_VIEWS = {
    _aten.alias,
    _aten.as_strided,
    _aten.detach,
    _aten.expand,
    _aten.permute,
    _aten.select,
    _aten.slice,
    _aten.split,
    _aten.split_with_sizes,
    _aten.squeeze,
    _aten.t,
    _aten.transpose,
    _aten.unbind,
    _aten.unsqueeze,
}
"""Operators whose results lie in the storage of their argument."""

_RESHAPES = {_aten.view, _aten._unsafe_view}
_JOINS = {_aten.cat, _aten.stack}

Entry = list[Any]
"""A tensor in JSON: its shape, then its boxes. See ``Trace.entry_of``."""


class UntraceableError(Exception):
    """A conversion computes something, so that its result is no rearrangement of bytes."""


@dataclass(frozen=True)
class _Part:
    """A new tensor that was laid together: its shape, and where each box of it comes from."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], torch.Tensor], ...]


class Trace(TorchDispatchMode):
    """While active, records what becomes of ``tensors``, which have no data."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        self._parts: list[_Part] = []
        self._kept: list[torch.Tensor] = []  # a storage's number is its own only while it lives
        self._roots: dict[int, int] = {}
        for tensor in self.tensors.values():
            self._add_root(tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of an operator, without data, its place recorded."""
        packet, kwargs = func.overloadpacket, kwargs or {}
        if packet in _VIEWS:
            return func(*args, **kwargs)
        if packet is _aten.clone:
            return _aten.alias(args[0])  # the copy's place is where it is copied from
        if packet in _RESHAPES:
            return self._reshaped(func, args[0], args[1])
        if packet in _JOINS:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return self._joined(args[0], dim, is_stack=packet is _aten.stack)
        raise UntraceableError(f"{func} is more than a rearrangement")

    def entry_of(self, tensor: torch.Tensor) -> int | Entry:
        """A result as JSON: a number where it is all of a source as it is, else shape and boxes.

        Sources are numbered: the tensors of ``shapes`` in order, then :meth:`parts`. A box is
        ``[source, offset, stride, start, shape]``: the element of the source that it begins with,
        and its place in the result. What is left out at its end is as it most often is: offset 0,
        the stride of a dense tensor, and the box being all of the result.
        """
        source = self._source_of(tensor)
        part = source - len(self.tensors)
        whole = self._kept[source]
        is_whole = _place(tensor) == _place(whole)
        if is_whole and part < 0:
            return source
        return self._entry(self._parts[part] if is_whole else _all_of(tensor))

    def parts(self) -> list[Entry]:
        """What was laid together on the way, each of tensors before it."""
        return [self._entry(part) for part in self._parts]

    def _entry(self, part: _Part) -> Entry:
        boxes = (self._box(start, box, part.shape) for start, box in part.boxes)
        return [list(part.shape), *boxes]

    def _box(self, start: tuple[int, ...], box: torch.Tensor, whole: tuple[int, ...]) -> Entry:
        place = (box.stride(), start, box.shape)
        entry: Entry = [self._source_of(box), box.storage_offset(), *map(list, place)]
        if tuple(box.shape) != whole:
            return entry
        del entry[3:]
        if box.stride() == row_major(box.shape):
            del entry[2:]
            if entry[1] == 0:
                del entry[1:]
        return entry

    def _reshaped(
        self, func: Callable[..., torch.Tensor], tensor: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        try:
            return func(tensor, shape)
        except RuntimeError:  # its elements do not lie so that they could be seen in that shape
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
        shape = list(tensors[0].shape)
        shape[dim] = begin
        return self._made(_Part(tuple(shape), tuple(boxes)))

    def _made(self, part: _Part) -> torch.Tensor:
        self._parts.append(part)
        made = torch.empty(part.shape, device="meta")
        self._add_root(made)
        return made

    def _add_root(self, tensor: torch.Tensor) -> None:
        self._roots[_storage_number(tensor)] = len(self._kept)
        self._kept.append(tensor)

    def _source_of(self, tensor: torch.Tensor) -> int:
        try:
            return self._roots[_storage_number(tensor)]
        except KeyError:
            raise UntraceableError("a result comes from none of the tensors") from None


def _all_of(tensor: torch.Tensor) -> _Part:
    return _Part(tuple(tensor.shape), (((0,) * tensor.dim(), tensor),))


def _storage_number(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()
