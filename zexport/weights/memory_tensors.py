"""A model's tensors in memory as ranges of those in its files: the hub's layout, read backwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zexport.checkpoint.contents import Role, StoredTensor
from zexport.errors import LayoutError
from zexport.model.fit import ModelNames
from zexport.model.hub_layout import Box, HubLayout
from zexport.ranges.dtypes import Shape
from zexport.ranges.mosaic import Mosaic, Tile, row_major


def tensor_in_memory(
    name: str, names: ModelNames, files: Mapping[str, StoredTensor]
) -> StoredTensor | None:
    """A tensor as it is in memory, made of those of the model's files; ``None`` where it cannot be.

    That is so where a file's tensor has elements of it in another order than along its dimensions,
    and where not all of it is in the files.

    Args:
        name: its name in memory.
        names: the model.
        files: tensors of a model folder, by name.
    """
    shape = names.shapes.get(name)
    made = (_from_layout(name, shape, layout, files) for layout in names.layouts if shape)
    return next((tensor for tensor in made if tensor is not None), None)


def _from_layout(
    name: str, shape: Shape | None, layout: HubLayout, files: Mapping[str, StoredTensor]
) -> StoredTensor | None:
    if shape is None:
        return None
    tiles: list[Tile] = []
    dtypes = set()
    for tile, stored in _tiles(name, shape, layout, files):
        if tile is None:
            return None
        tiles.append(tile)
        dtypes.add(stored.dtype)
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    try:
        source = Mosaic(shape, dtype.itemsize, tuple(tiles))
    except LayoutError:  # parts of it are not there
        return None
    return StoredTensor(name, shape, dtype, Role.FROZEN, source)


def _tiles(
    name: str, shape: Shape, layout: HubLayout, files: Mapping[str, StoredTensor]
) -> Iterator[tuple[Tile | None, StoredTensor]]:
    """Where each piece of it lies in the files; ``None`` for one that no tile describes."""
    for hub_name, form in layout.tensors.items():
        stored = files.get(hub_name)
        if stored is None or stored.shape != form.shape or name not in form.sources:
            continue
        for box in form.boxes:
            if box.source == name or not isinstance(box.source, str):
                yield _inverted(box, shape, stored), stored


def _inverted(box: Box, shape: Shape, stored: StoredTensor) -> Tile | None:
    """A box of a file's tensor as a tile of the tensor in memory that it was cut from."""
    if not isinstance(box.source, str) or stored.source is None:
        return None
    strides, within = row_major(shape), row_major(stored.shape)
    steps = [d for d, size in enumerate(box.shape) if size > 1]
    at = {box.stride[d]: d for d in steps}
    dims = [
        at.pop(stride, None) if size > 1 else None
        for stride, size in zip(strides, shape, strict=True)
    ]
    if at or len({box.stride[d] for d in steps}) != len(steps):
        return None
    start, rest = [], box.offset
    for stride in strides:
        index, rest = divmod(rest, stride)
        start.append(index)
    return Tile(
        start=tuple(start),
        shape=tuple(1 if d is None else box.shape[d] for d in dims),
        source=stored.source,
        offset=sum(a * s for a, s in zip(box.start, within, strict=True)),
        stride=tuple(1 if d is None else within[d] for d in dims),
    )
