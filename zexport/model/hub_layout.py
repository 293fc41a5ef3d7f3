"""How each tensor of a model's files is made of the model's tensors in memory.

The JSON is from ``zexport.model.conversion``, or a checkpoint's sidecar: its numbers are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Struct, field

from zexport.ranges.dtypes import Shape
from zexport.ranges.source import row_major
from zexport.storage.json import Natural


class Box(Struct, frozen=True):
    """A box of a hub tensor, of ``shape`` at ``start``, and the elements that fill it.

    ``source`` is the name of a tensor in memory, or a tensor that is itself made of boxes;
    ``offset`` and ``stride`` count its elements.
    """

    source: str | HubTensor
    offset: int
    stride: Shape
    start: Shape
    shape: Shape


class HubTensor(Struct, frozen=True):
    """A tensor of the model's files: its shape, and boxes that cover it."""

    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def sources(self) -> frozenset[str]:
        """Names in memory of all that it is made of."""
        sources = [box.source for box in self.boxes]
        names = ({one} if isinstance(one, str) else one.sources for one in sources)
        return frozenset[str]().union(*names)

    def is_all_of(self, shapes: Mapping[str, Shape]) -> str | None:
        """Return the name in memory of the tensor that this is unchanged, or ``None``."""
        box = self.boxes[0] if len(self.boxes) == 1 else None
        if box is None or not isinstance(box.source, str) or shapes.get(box.source) != self.shape:
            return None
        is_dense = (box.offset, box.stride) == (0, row_major(self.shape))
        return box.source if is_dense and box.shape == self.shape else None


def whole(name: str, shape: Shape) -> HubTensor:
    """Return the hub tensor that equals a tensor in memory."""
    shape, stride, start = _dense(shape)
    return HubTensor(shape, (Box(name, 0, stride, start, shape),))


@lru_cache(1 << 10)
def _dense(shape: Shape) -> tuple[Shape, Shape, Shape]:
    """Return shape, stride and start of a dense tensor; 100,000 tensors share the tuples."""
    return shape, row_major(shape), (0,) * len(shape)


class HubLayout(Struct, frozen=True):
    """One way to save a model: hub name to tensor.

    ``aliases`` maps a tied name in memory to its name in a file that holds it too.
    """

    label: str
    tensors: Mapping[str, HubTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Hub name to shape."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


_Numbers = Annotated[tuple[Natural, ...], msgspec.Meta(max_length=64)]
_Entry: TypeAlias = Natural | tuple[_Numbers, ...]
"""The number of a source, or a shape and boxes; see ``Trace.entry_of``."""

_BOXES_MAX, _DEPTH_MAX = 1 << 14, 16
"""Parts that each use the previous part twice would unfold to more than any memory."""


class _Known(Struct, frozen=True):
    """A tensor that entries refer to by number, and how many boxes it unfolds to, how deep."""

    source: str | HubTensor
    tensor: HubTensor
    boxes: int = 1
    depth: int = 0


class StoredLayout(Struct, frozen=True):
    """A layout as ``zexport.model.conversion`` writes it."""

    label: str
    sources: tuple[str, ...]
    parts: tuple[_Entry, ...]
    tensors: Mapping[str, _Entry]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def unfolded(self, shapes: Mapping[str, Shape]) -> HubLayout:
        """Return the layout of a model whose tensors in memory have these shapes.

        Raises:
            LookupError, ValueError: an entry contradicts the shapes or the entries before it.
        """
        known = [_Known(name, whole(name, shapes[name])) for name in self.sources]
        for part in self.parts:
            known.append(_unfold(part, known))
        tensors = {name: _unfold(one, known).tensor for name, one in self.tensors.items()}
        return HubLayout(self.label, tensors, self.aliases)


def _unfold(entry: _Entry, known: list[_Known]) -> _Known:
    if isinstance(entry, int):
        return known[entry]
    shape, *stored = entry
    shape, dense, zeros = _dense(shape)
    dims, boxes, count, depth = len(shape), [], 0, 0
    for numbers in stored:
        of, offset, place = known[numbers[0]], numbers[1], numbers[2:]
        if place and len(place) != 3 * dims:
            raise LookupError(numbers)
        stride, start, size = place[:dims], place[dims : 2 * dims], place[2 * dims :]
        boxes.append(Box(of.source, offset, stride or dense, start or zeros, size or shape))
        count, depth = count + of.boxes, max(depth, of.depth + 1)
    if count > _BOXES_MAX or depth > _DEPTH_MAX:
        raise LookupError(count, depth)
    tensor = HubTensor(shape, tuple(boxes))
    return _Known(tensor, tensor, count, depth)
