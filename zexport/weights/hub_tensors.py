"""A model's tensors as its files have them, made of ranges of those in memory, and the reverse."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod

from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import DamagedCheckpointError, LayoutError, UnsupportedError
from zexport.model.fit import ModelNames
from zexport.model.hub_layout import Box, HubLayout, HubTensor
from zexport.ranges.dtypes import Shape
from zexport.ranges.extents import ByteSource, Window
from zexport.ranges.mosaic import Mosaic, Tile, row_major

_KEEP_NAMES = "Export with --layout memory, which keeps the checkpoint's names and shapes"


def lay_out(
    tensors: Mapping[str, StoredTensor], layout: HubLayout, shapes: Mapping[str, Shape]
) -> dict[str, StoredTensor]:
    """The tensors of the model's files that ``tensors`` make up; others keep their names."""
    made: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for name, form in layout.tensors.items():
        sources = form.sources
        if not sources & tensors.keys():
            continue
        _check_parts(name, sources, tensors)
        used |= sources
        same = form.is_all_of(shapes)
        if same is not None:
            made[name] = tensors[same]
        else:
            made[name] = _make(name, form, {one: tensors[one] for one in sorted(sources)}, shapes)
    others = {layout.aliases.get(n, n): t for n, t in tensors.items() if n not in used}
    if clash := sorted(made.keys() & others.keys()):
        raise UnsupportedError(
            f"two tensors would be written as {clash[0]!r}",
            expected="one",
            hint=f"Rename one with --rename. {_KEEP_NAMES}",
        )
    return made | others


def _check_parts(name: str, sources: Collection[str], tensors: Mapping[str, StoredTensor]) -> None:
    missing = sorted(source for source in sources if source not in tensors)
    if missing:
        raise UnsupportedError(
            f"the model's files hold {name!r}, which is made of several weights, not all of which "
            "are exported",
            found=f"no values for {', '.join(missing)}",
            expected=", ".join(sorted(sources)),
            hint=f"Give what is missing with --base, or do without --exclude-frozen. {_KEEP_NAMES}",
        )


def _make(
    name: str,
    form: HubTensor,
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, Shape],
) -> StoredTensor:
    """A tensor of these ones; its name is that in the checkpoint where it is of one."""
    for part, tensor in tensors.items():
        if tensor.shape != shapes.get(part):
            raise UnsupportedError(
                f"{part!r} does not have the shape that the model's files are made from",
                found=list(tensor.shape),
                expected=list(shapes.get(part, ())),
                hint=f"Mend config.json. {_KEEP_NAMES}",
            )
    parts = [*tensors.values()]
    if len({part.dtype for part in parts}) > 1:
        raise UnsupportedError(
            f"the model's files hold {name!r} as one, but its parts are stored in several types",
            found=", ".join(f"{part.name}: {part.dtype.torch_name}" for part in parts),
            expected="one type",
            hint=_KEEP_NAMES,
        )
    roles = {part.role for part in parts}
    source: ByteSource | None = None
    if all(part.source is not None for part in parts):
        source = _source(form, tensors, parts[0].dtype.itemsize)
    return StoredTensor(
        name=parts[0].name if len(parts) == 1 else name,
        shape=form.shape,
        dtype=parts[0].dtype,
        role=roles.pop() if len(roles) == 1 else Role.TRAINABLE,
        source=source,
        fp32_under=frozenset().union(*(part.fp32_under for part in parts)),
    )


def _source(form: HubTensor, tensors: Mapping[str, StoredTensor], itemsize: int) -> ByteSource:
    try:
        return _laid_together(form, tensors, itemsize)
    except LayoutError as error:
        raise DamagedCheckpointError(
            error.problem,
            found=error.found,
            expected=error.expected,
            hint="Remove zexport_source.json, and the names are asked of transformers",
        ) from error


def _laid_together(
    form: HubTensor, tensors: Mapping[str, StoredTensor], itemsize: int
) -> ByteSource:
    sources: list[ByteSource] = []
    for box in form.boxes:
        if isinstance(box.source, str):
            stored = tensors[box.source].source
            if stored is None:
                raise AssertionError(f"{box.source} has no bytes")
            sources.append(stored)
        else:
            sources.append(_laid_together(box.source, tensors, itemsize))
    only = form.boxes[0] if len(form.boxes) == 1 else None
    if only is not None and only.shape == form.shape and _is_dense(only.shape, only.stride):
        start, nbytes = only.offset * itemsize, prod(form.shape) * itemsize
        if start + nbytes <= sources[0].nbytes:
            return Window(sources[0], start, nbytes)
    tiles = [
        Tile(box.start, box.shape, source, box.offset, box.stride)
        for box, source in zip(form.boxes, sources, strict=True)
        if prod(box.shape)
    ]
    return Mosaic(form.shape, itemsize, tuple(tiles))


def _is_dense(shape: Shape, stride: Shape) -> bool:
    steps = zip(shape, stride, row_major(shape), strict=True)
    return all(size == 1 or step == dense for size, step, dense in steps)


def tensor_in_memory(
    name: str, names: ModelNames, files: Mapping[str, StoredTensor]
) -> StoredTensor | None:
    """A tensor as it is in memory, made of those of the model's files; ``None`` where it cannot be.

    That is so where a file's tensor has elements of it in another order than along its dimensions,
    and where not all of it is in the files.
    """
    shape = names.shapes.get(name)
    if not shape:
        return None
    for layout in names.layouts:
        found = [*_tiles(name, shape, layout, files)]
        tiles = tuple(tile for tile, _ in found if tile is not None)
        dtypes = {stored.dtype for _, stored in found}
        if len(tiles) < len(found) or len(dtypes) != 1:
            continue
        (dtype,) = dtypes
        try:
            source = Mosaic(shape, dtype.itemsize, tiles)
        except LayoutError:  # parts of it are not there
            continue
        return StoredTensor(name, shape, dtype, Role.FROZEN, source)
    return None


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
