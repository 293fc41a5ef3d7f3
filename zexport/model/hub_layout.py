"""How the tensors of a model's files are made of those it has in memory.

Read from JSON that ``zexport.conversion`` made, in a process of its own or when the model was
trained; a sidecar may come with a checkpoint, so nothing in it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zexport.ranges.dtypes import Shape
from zexport.ranges.mosaic import row_major
from zexport.store.json import Json

_DIMENSIONS_MAX = 16


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


def read_hub_layout(content: Mapping[str, Json], shapes: Mapping[str, Shape]) -> HubLayout:
    """The layout that ``zexport.model.conversion`` wrote.

    Args:
        content: an element of its ``layouts``.
        shapes: name in memory to shape.

    Raises:
        ValueError: it is not of that form.
    """
    sources, parts = content.get("sources"), content.get("parts")
    tensors, aliases = content.get("tensors"), content.get("aliases", {})
    if not (
        isinstance(sources, list)
        and isinstance(parts, list)
        and isinstance(tensors, dict)
        and isinstance(aliases, dict)
    ):
        raise _malformed(content)
    reader = _Reader([str(name) for name in sources], shapes)
    for part in parts:
        reader.add_part(part)
    return HubLayout(
        label=str(content.get("label")),
        tensors={name: reader.tensor(entry) for name, entry in tensors.items()},
        aliases={alias: str(name) for alias, name in aliases.items()},
    )


class _Reader:
    """Turns entries into tensors; shapes and strides that many share are stored once."""

    def __init__(self, names: Sequence[str], shapes: Mapping[str, Shape]) -> None:
        if not all(name in shapes for name in names):
            raise _malformed("a source that the model does not have")
        self._sources: list[str | HubTensor] = list(names)
        self._shapes = [shapes[name] for name in names]
        self._shared: dict[Shape, Shape] = {}

    def add_part(self, entry: Json) -> None:
        """A tensor that later ones may be made of."""
        tensor = self.tensor(entry)
        self._sources.append(tensor)
        self._shapes.append(tensor.shape)

    def tensor(self, entry: Json) -> HubTensor:
        """The tensor that an entry stands for."""
        if type(entry) is int:
            number = self._number(entry)
            source, shape = self._sources[number], self._shapes[number]
            return whole(source, shape) if isinstance(source, str) else source
        if not isinstance(entry, list) or not entry:
            raise _malformed(entry)
        shape = self._integers(entry[0])
        return HubTensor(shape, tuple(self._box(box, shape) for box in entry[1:]))

    def _box(self, box: Json, whole_shape: Shape) -> Box:
        if not isinstance(box, list) or not 1 <= len(box) <= len(Box.__slots__):
            raise _malformed(box)
        source = self._sources[self._number(box[0])]
        offset = box[1] if len(box) > 1 else 0
        start, shape = self._shared_one((0,) * len(whole_shape)), whole_shape
        if len(box) > 3:  # noqa: PLR2004 - start and shape come together, after the stride
            start, shape = self._integers(box[3]), self._integers(box[-1])
        stride = self._integers(box[2]) if len(box) > 2 else row_major(shape)  # noqa: PLR2004
        ranks = {len(whole_shape), len(start), len(shape), len(stride)}
        if type(offset) is not int or offset < 0 or len(ranks) != 1:
            raise _malformed(box)
        return Box(source, offset, self._shared_one(stride), start, shape)

    def _number(self, value: Json) -> int:
        if type(value) is not int or not 0 <= value < len(self._sources):
            raise _malformed(value)
        return value

    def _integers(self, value: Json) -> Shape:
        if not isinstance(value, list) or len(value) > _DIMENSIONS_MAX:
            raise _malformed(value)
        numbers = [number for number in value if type(number) is int and number >= 0]
        if len(numbers) != len(value):
            raise _malformed(value)
        return self._shared_one(tuple(numbers))

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
