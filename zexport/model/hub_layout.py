"""How the tensors of a model's files are made of those it has in memory.

Read from JSON that ``zexport.model.conversion`` made, in a process of its own or when the model was
trained; a sidecar may come with a checkpoint, so nothing in it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec

from zexport.ranges.dtypes import Shape
from zexport.ranges.mosaic import row_major
from zexport.store.json import Natural


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a hub tensor, and where its elements lie.

    Attributes:
        source: name of a tensor in memory, or a tensor that is itself laid together.
        offset: element of the source that is the box's first.
        stride: elements of the source between neighbours, for each dimension.
        start: the box's first index in the hub tensor.
        shape: its size in each dimension.
    """

    source: str | HubTensor
    offset: int
    stride: Shape
    start: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor of the model's files: its shape, and boxes that cover it."""

    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def sources(self) -> frozenset[str]:
        """Names in memory of all that it is made of."""
        return frozenset(_sources(self))

    def is_all_of(self, shapes: Mapping[str, Shape]) -> str | None:
        """The name in memory of the one tensor that it is, unchanged, if it is one."""
        if len(self.boxes) != 1:
            return None
        box = self.boxes[0]
        if not isinstance(box.source, str) or shapes.get(box.source) != self.shape:
            return None
        is_dense = (box.offset, box.stride) == (0, row_major(self.shape))
        return box.source if is_dense and box.shape == self.shape else None


def whole(name: str, shape: Shape) -> HubTensor:
    """The hub tensor that is a tensor in memory as it is."""
    return HubTensor(shape, (Box(name, 0, row_major(shape), (0,) * len(shape), shape),))


@dataclass(frozen=True, slots=True)
class HubLayout:
    """One way in which a model is saved.

    Attributes:
        label: what sets it apart from the first, in words; empty for the first.
        tensors: hub name to how it is made.
        aliases: tied name in memory to the name it has in a file where it is written too.
    """

    label: str
    tensors: Mapping[str, HubTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Hub name to shape."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


_Numbers = Annotated[tuple[Natural, ...], msgspec.Meta(max_length=16)]
_Entry: TypeAlias = Natural | tuple[object, ...]
"""A tensor: the number of the source that it is, or its shape and then its boxes."""


class _StoredBox(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A box as a list, whose end is left out where it is as it most often is."""

    source: Natural
    offset: Natural = 0
    stride: _Numbers | None = None
    start: _Numbers | None = None
    shape: _Numbers | None = None


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """A layout as ``zexport.model.conversion`` writes it; see ``zexport.model.trace``."""

    label: str
    sources: tuple[str, ...]
    parts: tuple[_Entry, ...]
    tensors: Mapping[str, _Entry]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def unfolded(self, shapes: Mapping[str, Shape]) -> HubLayout:
        """The layout of a model whose tensors in memory have these shapes."""
        sources = _Sources(self.sources, shapes)
        for part in self.parts:
            sources.add(sources.tensor(part))
        tensors = {name: sources.tensor(entry) for name, entry in self.tensors.items()}
        return HubLayout(self.label, tensors, self.aliases)


class _Sources:
    """What entries refer to by number; shapes and strides that many share are stored once."""

    def __init__(self, names: Sequence[str], shapes: Mapping[str, Shape]) -> None:
        if not all(name in shapes for name in names):
            raise _malformed("a source that the model does not have")
        self._names = names
        self._tensors = [whole(name, shapes[name]) for name in names]
        self._shared: dict[Shape, Shape] = {}

    def add(self, part: HubTensor) -> None:
        """Give the next number to a tensor that later ones may be made of."""
        self._tensors.append(part)

    def tensor(self, entry: _Entry) -> HubTensor:
        """The tensor that an entry stands for."""
        if isinstance(entry, int):
            return self._numbered(entry)
        if not entry:
            raise _malformed(entry)
        shape = self._shared_one(msgspec.convert(entry[0], _Numbers))
        boxes = msgspec.convert(entry[1:], tuple[_StoredBox, ...])
        return HubTensor(shape, tuple(self._box(box, shape) for box in boxes))

    def _box(self, box: _StoredBox, whole_shape: Shape) -> Box:
        is_in_memory = box.source < len(self._names)
        source = self._names[box.source] if is_in_memory else self._numbered(box.source)
        shape = whole_shape if box.shape is None else box.shape
        start = (0,) * len(whole_shape) if box.start is None else box.start
        stride = row_major(shape) if box.stride is None else box.stride
        if {len(start), len(shape), len(stride)} != {len(whole_shape)}:
            raise _malformed(box)
        return Box(source, box.offset, *map(self._shared_one, (stride, start, shape)))

    def _numbered(self, number: int) -> HubTensor:
        if number >= len(self._tensors):
            raise _malformed(number)
        return self._tensors[number]

    def _shared_one(self, numbers: Shape) -> Shape:
        return self._shared.setdefault(numbers, numbers)


def _malformed(found: object) -> ValueError:
    return ValueError(f"not a description of a model's files: {str(found)[:80]}")


def _sources(tensor: HubTensor) -> Iterator[str]:
    for box in tensor.boxes:
        if isinstance(box.source, str):
            yield box.source
        else:
            yield from _sources(box.source)
