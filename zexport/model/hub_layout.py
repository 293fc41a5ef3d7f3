"""How the tensors of a model's files are made of those it has in memory.

Read from JSON that ``zexport.model.conversion`` made, in a process of its own or when the model was
trained; a sidecar may come with a checkpoint, so nothing in it is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Struct, field

from zexport.ranges.dtypes import Shape
from zexport.ranges.mosaic import row_major
from zexport.store.json import Natural


class Box(Struct, frozen=True):
    """A box of a hub tensor, of ``shape`` at ``start``, and where its elements lie.

    ``source`` is the name of a tensor in memory, or one that is itself laid together; ``offset``
    and ``stride`` count its elements.
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
        found: set[str] = set()
        for box in self.boxes:
            found |= {box.source} if isinstance(box.source, str) else box.source.sources
        return frozenset(found)

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


class HubLayout(Struct, frozen=True):
    """One way in which a model is saved: how each tensor is made, by its name in files.

    ``aliases`` lead from a tied name in memory to the name it has in a file that has it too.
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


_BOXES_MAX, _DEPTH_MAX = 1 << 14, 16
"""What a part may be made of: transformers' own models have a box each, in parts of sources."""


class _Known(Struct, frozen=True):
    """A tensor that entries may refer to, and how many boxes it unfolds to, in how many layers."""

    tensor: HubTensor
    boxes: int = 1
    depth: int = 0

    def checked(self) -> _Known:
        """Itself; parts that are named twice by each next one would be more than any memory."""
        if self.boxes > _BOXES_MAX or self.depth > _DEPTH_MAX:
            raise _malformed(f"{self.boxes} boxes, {self.depth} deep")
        return self


class StoredLayout(Struct, frozen=True):
    """A layout as ``zexport.model.conversion`` writes it; see ``zexport.model.trace``."""

    label: str
    sources: tuple[str, ...]
    parts: tuple[_Entry, ...]
    tensors: Mapping[str, _Entry]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def unfolded(self, shapes: Mapping[str, Shape]) -> HubLayout:
        """The layout of a model whose tensors in memory have these shapes.

        Entries refer to sources by number, and then to parts; strides that many share are stored
        once.
        """
        if not all(name in shapes for name in self.sources):
            raise _malformed("a source that the model does not have")
        known = [_Known(whole(name, shapes[name])) for name in self.sources]
        shared: dict[Shape, Shape] = {}

        def numbered(number: int) -> _Known:
            if number >= len(known):
                raise _malformed(number)
            return known[number]

        def box_of(box: _StoredBox, all_of_it: Shape) -> Box:
            source = numbered(box.source).tensor
            shape = all_of_it if box.shape is None else box.shape
            start = (0,) * len(all_of_it) if box.start is None else box.start
            stride = row_major(shape) if box.stride is None else box.stride
            if {len(start), len(shape), len(stride)} != {len(all_of_it)}:
                raise _malformed(box)
            place = (shared.setdefault(one, one) for one in (stride, start, shape))
            is_in_memory = box.source < len(self.sources)
            return Box(self.sources[box.source] if is_in_memory else source, box.offset, *place)

        def tensor(entry: _Entry) -> _Known:
            if isinstance(entry, int):
                return numbered(entry)
            if not entry:
                raise _malformed(entry)
            numbers = msgspec.convert(entry[0], _Numbers)
            shape = shared.setdefault(numbers, numbers)
            boxes = msgspec.convert(entry[1:], tuple[_StoredBox, ...])
            made_of = [numbered(box.source) for box in boxes]
            return _Known(
                HubTensor(shape, tuple(box_of(box, shape) for box in boxes)),
                sum(one.boxes for one in made_of),
                1 + max((one.depth for one in made_of), default=0),
            ).checked()

        for part in self.parts:
            known.append(tensor(part))  # noqa: PERF401 - the next ones may refer to it
        tensors = {name: tensor(entry).tensor for name, entry in self.tensors.items()}
        return HubLayout(self.label, tensors, self.aliases)


def _malformed(found: object) -> ValueError:
    return ValueError(f"not a description of a model's files: {str(found)[:80]}")
