"""Tensors with Hub names as ranges of in-memory tensors, and the reverse; AutoEP's experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod

from zexport.checkpoint.state import Role, StoredTensor, source_of
from zexport.errors import LayoutError, UnsupportedError
from zexport.export.weights import Tensors, Weights
from zexport.model.config import ConfigFile
from zexport.model.hub_names import (
    Box,
    HubLayout,
    HubTensor,
    ModelNames,
    Shapes,
)
from zexport.model.names_client import Learner
from zexport.options import ExportOptions, NameLayout
from zexport.ranges.dtypes import Shape
from zexport.ranges.source import ByteSource, Mosaic, Tile, Window, row_major

_KEEP_NAMES = "Keep the in-memory names and shapes with --layout memory"


def to_hub(tensors: Tensors, layout: HubLayout, shapes: Shapes) -> dict[str, StoredTensor]:
    """Return the tensors that a layout makes of ``tensors``; others keep their names.

    ``shapes`` are the model's in memory.

    Raises:
        UnsupportedError: a tensor cannot be made.
        LayoutError: the layout is not a partition of the tensors.
    """
    made: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for name, form in layout.tensors.items():
        sources = form.sources
        if sources & tensors.keys():
            used |= sources
            same = form.is_all_of(shapes)
            made[name] = tensors[same] if same else _joined(name, form, tensors, shapes)
    others = {layout.aliases.get(n, n): t for n, t in tensors.items() if n not in used}
    if both := sorted(made.keys() & others.keys()):
        raise UnsupportedError(f"two weights are {both[0]!r} on the Hub", hint=_KEEP_NAMES)
    return made | others


def _joined(name: str, form: HubTensor, tensors: Tensors, shapes: Shapes) -> StoredTensor:
    """Return a tensor made of others; one that is part of one tensor keeps the name of that."""
    sources = sorted(form.sources)
    if missing := [source for source in sources if source not in tensors]:
        raise UnsupportedError(
            f"{name!r} on the Hub joins several weights, and some are not exported",
            found=f"no values for {', '.join(missing)}",
            expected=", ".join(sources),
            hint=f"Pass --base, or omit --exclude-frozen. {_KEEP_NAMES}",
        )
    parts = [tensors[source] for source in sources]
    dtype = parts[0].dtype
    for source, part in zip(sources, parts, strict=True):
        if (part.shape, part.dtype) != (shapes[source], dtype):
            raise UnsupportedError(
                f"{source!r} does not fit into {name!r} on the Hub",
                found=f"{list(part.shape)} {part.dtype.torch_name}",
                expected=f"{list(shapes[source])} {dtype.torch_name}",
                hint=_KEEP_NAMES,
            )
    roles = {part.role for part in parts}
    return StoredTensor(
        name=parts[0].name if len(parts) == 1 else name,
        shape=form.shape,
        dtype=dtype,
        role=roles.pop() if len(roles) == 1 else Role.TRAINABLE,
        source=_source(form, tensors, dtype.itemsize),
        fp32_under=frozenset().union(*(part.fp32_under for part in parts)),
    )


def _source(form: HubTensor, tensors: Tensors, itemsize: int) -> ByteSource:
    tiles = []
    for box in form.boxes:
        if isinstance(box.source, str):
            source = source_of(tensors[box.source])
        else:
            source = _source(box.source, tensors, itemsize)
        start, nbytes = box.offset * itemsize, prod(box.shape) * itemsize
        is_dense = box.shape == form.shape and box.stride == row_major(box.shape)
        if is_dense and start + nbytes <= source.nbytes:
            return Window(source, start, nbytes)
        if nbytes:
            tiles.append(Tile(box.start, box.shape, source, box.offset, box.stride))
    return Mosaic(form.shape, itemsize, tuple(tiles))


def tensor_in_memory(name: str, names: ModelNames, files: Tensors) -> StoredTensor | None:
    """Return an in-memory tensor made of tensors with Hub names.

    ``None`` if some elements are missing, or are ordered differently from a file's axes.
    """
    shape = names.shapes.get(name)
    for layout in names.layouts if shape else ():
        found = [
            (_inverted(box, shape or (), stored), stored.dtype)
            for hub_name, form in layout.tensors.items()
            if name in form.sources
            and (stored := files.get(hub_name)) is not None
            and stored.shape == form.shape
            for box in form.boxes
            if box.source == name or not isinstance(box.source, str)
        ]
        tiles = tuple(tile for tile, _ in found if tile is not None)
        dtypes = {dtype for _, dtype in found}
        if len(tiles) == len(found) and len(dtypes) == 1:
            dtype = dtypes.pop()
            with suppress(LayoutError):  # elements are missing
                source = Mosaic(shape or (), dtype.itemsize, tiles)
                return StoredTensor(name, shape or (), dtype, Role.FROZEN, source)
    return None


def _inverted(box: Box, shape: Shape, stored: StoredTensor) -> Tile | None:
    """Return a box of a file's tensor as a tile of the in-memory tensor of ``shape``."""
    if not isinstance(box.source, str):
        return None
    strides, within = row_major(shape), row_major(stored.shape)
    steps = [dim for dim, size in enumerate(box.shape) if size > 1]
    at = {box.stride[dim]: dim for dim in steps}
    is_distinct = len(at) == len(steps)
    dims = [
        at.pop(stride, None) if size > 1 else None
        for stride, size in zip(strides, shape, strict=True)
    ]
    if at or not is_distinct:
        return None
    start, rest = [], box.offset
    for stride in strides:
        index, rest = divmod(rest, stride)
        start.append(index)
    return Tile(
        start=tuple(start),
        shape=tuple(1 if dim is None else box.shape[dim] for dim in dims),
        source=source_of(stored),
        offset=sum(a * step for a, step in zip(box.start, within, strict=True)),
        stride=tuple(1 if dim is None else within[dim] for dim in dims),
    )


def with_hub_experts(
    stored: Weights, config: ConfigFile | None, learner: Learner, options: ExportOptions
) -> Weights:
    """Return AutoEP's layers as the Hugging Face model has them, if that gives its names.

    Source: DeepSpeed 0.19, ``moe/ep_repack.py`` and ``module_inject/auto_ep_layer.py``: ``w1`` and
    ``w3`` are the halves of ``gate_up_proj``, ``w2`` is ``down_proj``, ``router`` was ``gate``.
    """
    tensors = stored.tensors
    layers = [
        name.removesuffix(".experts.w1")
        for name, gate in tensors.items()
        if name.endswith(".experts.w1")
        and name.removesuffix("w1") + "w2" in tensors
        and (up := tensors.get(name.removesuffix("w1") + "w3")) is not None
        and (gate.shape, gate.dtype) == (up.shape, up.dtype)
        and len(gate.shape) == 3  # expert, output, input
    ]
    if options.layout is NameLayout.MEMORY or not layers:
        return stored
    fused = _with_fused_experts(stored, layers)
    names = learner.names(config, fused.known_shapes)
    if not isinstance(names, ModelNames):
        return stored
    fused = _with_original_names(fused, layers, names.shapes)
    is_known = fused.renamed(options.renames).shapes.keys() <= names.shapes.keys()
    return fused if is_known else stored


def _with_fused_experts(stored: Weights, layers: Sequence[str]) -> Weights:
    tensors = dict(stored.tensors)
    new: dict[str, str] = {}
    for layer in layers:
        w1, w2, w3 = (f"{layer}.experts.{weight}" for weight in ("w1", "w2", "w3"))
        new |= {w1: f"{layer}.experts.gate_up_proj", w2: f"{layer}.experts.down_proj"}
        gate, up = tensors[w1], tensors.pop(w3)
        experts, rows, columns = gate.shape
        shape, strides = (experts, 2 * rows, columns), row_major(gate.shape)
        tiles = (
            Tile((0, 0, 0), gate.shape, source_of(gate), 0, strides),
            Tile((0, rows, 0), gate.shape, source_of(up), 0, strides),
        )
        mosaic = Mosaic(shape, gate.dtype.itemsize, tiles)
        tensors[w1] = StoredTensor(new[w1], shape, gate.dtype, gate.role, mosaic)
        router = f"{layer}.router."
        for name in (one for one in tensors if one.startswith(router)):
            new[name] = f"{layer}.gate." + name.removeprefix(router).removeprefix("gate.")
    aliases = {alias: name for alias, name in stored.aliases.items() if name not in new}
    return Weights(tensors, aliases, stored.left_out).named(lambda name: new.get(name, name))


def _with_original_names(stored: Weights, layers: Iterable[str], original: Shapes) -> Weights:
    """Return the weights with the names that AutoEP changed next to the experts changed back.

    AutoEP sets other children of a layer under its own names (``shared_experts`` for
    ``shared_expert``). An unknown weight gets the name of the only missing one with its shape and
    the same name below the child.
    """
    new: dict[str, str] = {}
    for layer in layers:
        free: dict[tuple[str, Shape], list[str]] = {}
        for name, shape in original.items():
            if name.startswith(f"{layer}.") and name not in stored.tensors:
                free.setdefault((_below_child(layer, name), shape), []).append(name)
        for name, tensor in stored.tensors.items():
            if name.startswith(f"{layer}.") and name not in original:
                alike = free.get((_below_child(layer, name), tensor.shape), [])
                if len(alike) == 1:
                    new[name] = alike.pop()
    return stored.named(lambda name: new.get(name, name))


def _below_child(layer: str, name: str) -> str:
    inner = name.removeprefix(f"{layer}.")
    return inner.partition(".")[2] or inner
