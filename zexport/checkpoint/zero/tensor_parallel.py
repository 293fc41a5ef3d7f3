"""Tensor parallelism: join the slices of all tensor ranks, and split again.

``universal_checkpoint_info`` records how: AutoTP writes boxes (``affine_map``) and lists of name
patterns, Megatron-DeepSpeed only lists. Source: DeepSpeed 0.19.8, ``module_inject/layers.py``
(``collect_autotp_universal_checkpoint_info``), ``checkpoint/ds_to_universal.py``
(``merge_tp_slices``), ``checkpoint/affine.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.boxes import Bound, Piece, chained, cut_boxes, join_boxes
from zexport.checkpoint.state import Cell, Copy, Parameter, Role, joined
from zexport.checkpoint.zero.records import ModelStates
from zexport.errors import DamagedCheckpointError, LayoutError, UnsupportedError
from zexport.formats.pickle_view import PickleView
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import Shape
from zexport.ranges.source import row_major

_INFO = "universal_checkpoint_info"
_MAPS = "affine_map"
REFUSED = "autotp_unsupported_parameter_patterns"
_WHOLE, _AVERAGED = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
FUSED, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
ROWS = "parameter_with_row_parallelism_patterns"  # split along dimension 1, all others along 0
VOCABULARY = "vocabulary_parameter_patterns"
_LENGTH_MAX, _NBYTES = 1024, 256 << 10
_NAME = re.compile(r"\^?((?:\\[\W_]|[^.*+?{}\[\]()|^$\\])*+)\$")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ALIKE = re.compile(r"(?:\\[\W_d]|\[(?!:)|\((?!\?[^:])|[^\\{}\[(])*+")


_Match = Callable[[bytes], object]
_WIDTHS_SINCE = 0.4
_PARTS_MAX = 1024


class Patterns(Struct, frozen=True):
    path: Path
    names: Mapping[str, PickleView]
    wild: Sequence[tuple[_Match, PickleView]]

    @classmethod
    def read(cls, items: Iterable[tuple[str, PickleView]], path: Path) -> Patterns:
        """Compile patterns; ``path`` is the file that contains them."""
        names: dict[str, PickleView] = {}
        wild: list[tuple[_Match, PickleView]] = []
        for text, value in dict(items).items():
            if (name := _NAME.fullmatch(text)) is not None:
                names[_ESCAPE.sub(r"\1", name[1])] = value
            else:
                wild.append((_compile(text, path), value))
        return cls(path, names, wild)

    def get(self, name: str) -> PickleView | None:
        encoded = name.encode(errors="surrogatepass")
        found = [value for match, value in self.wild if match(encoded) is not None]
        found += [self.names[name]] if name in self.names else []
        if len(found) > 1:
            raise DamagedCheckpointError(
                f"{len(found)} patterns describe how {name!r} is split",
                path=self.path,
                hint="Copy this file again",
            )
        return found[0] if found else None


def _compile(pattern: str, path: Path) -> _Match:
    import re2  # noqa: PLC0415 - most checkpoints have no pattern that needs it

    options = re2.Options()
    options.max_mem, options.never_capture, options.log_errors = _NBYTES, True, False
    with suppress(re2.error):
        if len(pattern) <= _LENGTH_MAX and _ALIKE.fullmatch(pattern):
            encoded = pattern.encode(errors="surrogatepass")
            match: _Match = re2.compile(encoded, options).match
            return match
    raise UnsupportedError(
        "unsupported name pattern",
        path=path,
        found=repr(pattern[:80]),
        expected=r"names with \d+, [0-9], .* and (a|b)",
    )


Box = tuple[int, Shape, Shape, Shape]
"""A part of the whole on a rank: rank, first index in the whole and in the slice, size."""


class TensorRanks(Struct, frozen=True):
    """Tensor ranks of one pipeline stage.

    ``shards`` has the shapes of every tensor's slices by rank, ``tables`` the record's patterns.
    """

    record: PickleView
    shards: Mapping[str, Sequence[Shape]]
    tables: Mapping[str, Patterns]

    def recorded(self, table: str, name: str) -> PickleView | None:
        return self.tables[table].get(name)

    def join(self, parts: Sequence[Parameter]) -> tuple[Parameter, list[Copy]]:
        """Return the tensor whose slices the ranks have, and boxes that several ranks have.

        Slices without elements have any role: no optimizer has them.
        """
        name = parts[0].name
        role, *others = {one.role for one in parts if prod(one.shape)} or {parts[0].role}
        if others:
            raise LayoutError(f"tensor ranks have different roles of {name!r}", len(others), 1)
        shape, boxes = self._replicated(name) if role is Role.BUFFER else self._find(name)
        return join_boxes(name, shape, role, [Piece(parts[rank], *box) for rank, *box in boxes])

    def split(self, whole: Parameter, rank: int) -> Parameter:
        """Return one rank's slice: the inverse of ``join``. Vocabulary padding becomes zeros."""
        name, (shape, boxes) = whole.name, self._find(whole.name)
        if whole.shape != shape:
            if whole.shape != (kept := self._without_padding(name, shape)):
                raise LayoutError(f"{name!r} has another shape than its record", whole.shape, kept)
            missing = prod(shape) - prod(whole.shape)
            stored = {}
            for slot, dtype in whole.slots.items():
                source = chained([whole.source(slot), Zeros(missing * dtype.itemsize)])
                stored[slot] = Bound(dtype, source)
            whole = Parameter(name, shape, whole.role, stored)
        own = [Piece(whole, *box) for owner, *box in boxes if owner == rank]
        return cut_boxes(whole, self.shards[name][rank], own)

    def trim(self, whole: Parameter) -> Parameter:
        """Return a joined tensor without padding rows of the vocabulary."""
        shape = self._without_padding(whole.name, whole.shape)
        zero = (0,) * len(shape)
        return cut_boxes(whole, shape, [Piece(whole, zero, zero, shape)])

    def _without_padding(self, name: str, shape: Shape) -> Shape:
        size = self.record.get("original_vocab_size").number_or(None) or 0
        is_padded = self.recorded(VOCABULARY, name) and shape and 0 < size < shape[0]
        return (size, *shape[1:]) if is_padded else shape

    def _find(self, name: str) -> tuple[Shape, list[Box]]:
        """Return the whole shape of a tensor, and the boxes of its slices."""
        if (reason := self.recorded(REFUSED, name)) is not None:
            raise self._unsupported(name, reason.text_or(None) or "DeepSpeed gives no reason")
        if (entry := self.recorded(_MAPS, name)) is not None:
            return self._by_map(name, entry)
        # Averaged tensors are equal on all ranks or cannot be joined exactly: they are compared.
        if self.recorded(_WHOLE, name) or self.recorded(_AVERAGED, name):
            return self._replicated(name)
        shards, fused = self.shards[name], self.recorded(FUSED, name)
        dim = 1 if self.recorded(ROWS, name) else 0
        if self.recorded(HALVES, name):
            dim = 0
        elif fused is not None:
            dim = fused.need("partition_dim").number()
        elif dim == 0 and len(shards[0]) == 1 and not self._follows_a_weight(name):
            raise self._unsupported(name, "no record says whether ranks have it whole or split")
        rests = {(len(shard), _resized(shard, dim, 0)) for shard in shards}
        if not 0 <= dim < len(shards[0]) or len(rests) > 1:
            expected = f"equal except for dimension {dim}"
            raise LayoutError(
                f"tensor ranks have slices of {name!r} with other shapes", shards, expected
            )
        own, zero, boxes = [shard[dim] for shard in shards], (0,) * len(shards[0]), list[Box]()
        widths = self._part_widths(name, dim, own)
        sums = [sum(of_rank) for of_rank in zip(*widths, strict=False)]
        if sums != own or any(len(row) != len(own) or min(row) < 0 for row in widths):
            raise LayoutError(f"widths of fused parts of {name!r} do not fit", sums, own)
        shape, begin, origins = _resized(shards[0], dim, sum(own)), 0, [0] * len(own)
        for rank, width in chain.from_iterable(map(enumerate, widths)):
            start, origin = _resized(zero, dim, begin), _resized(zero, dim, origins[rank])
            boxes.append((rank, start, origin, _resized(shape, dim, width)))
            begin += width
            origins[rank] += width
        return shape, boxes

    def _replicated(self, name: str) -> tuple[Shape, list[Box]]:
        shape, *others = self.shards[name]
        if any(other != shape for other in others):
            raise self._unsupported(name, "ranks have different shapes of it instead of replicas")
        zero = (0,) * len(shape)
        return shape, [(rank, zero, zero, shape) for rank in range(1 + len(others))]

    def _follows_a_weight(self, name: str) -> bool:
        """Whether a 1-D tensor in no list is the bias of a weight that is split the same way.

        Early records do not list norms, which all ranks have whole.
        """
        weight = f"{name.rpartition('.')[0]}.weight"
        if any(len(shard) < 2 for shard in self.shards.get(weight, ((),))):
            return False
        return self._find(weight)[0][0] == sum(shard[0] for shard in self.shards[name])

    def _by_map(self, name: str, entry: PickleView) -> tuple[Shape, list[Box]]:
        whole, ranks = entry.need("logical_shape").shape(), entry.need("ranks")
        shards, boxes = self.shards[name], list[Box]()
        for rank, shard in enumerate(shards):
            own = ranks.get(rank)
            for piece in own.need("pieces").items():
                box = _box(rank, piece, whole, shard)
                if box is None or piece.get("scale").value not in (None, 1):
                    raise self._unsupported(name, "a piece of it is scaled, or no box")
                boxes.append(box)
            if own.need("shard_shape").shape() != shard:
                own.fail(f"does not describe the slice of shape {list(shard)}")
        return whole, boxes

    def _part_widths(self, name: str, dim: int, own: list[int]) -> list[list[int]]:
        """Return the width of every part on every rank; ``own`` has the widths of the slices.

        Older records have the widths of whole parts, or the number of equal ones.
        """
        fused, parts, count = self.recorded(FUSED, name), list[int](), 2
        if not self.recorded(HALVES, name):
            if fused is None:
                return [own]
            if (recorded := self.recorded(_WIDTHS, name)) is not None:
                return [[width.number() for width in row.items()] for row in recorded.items()]
            version = self.record.get("universal_checkpoint_version").value
            if isinstance(version, int | float) and version >= _WIDTHS_SINCE:
                raise self._unsupported(name, "the widths of its fused parts are not recorded")
            sizes = fused.need("shape").items()
            size = sizes[dim] if dim < len(sizes) else fused.fail(f"has no dimension {dim}")
            if isinstance(size.value, list | tuple):
                parts, count = [one.number() for one in size.items()], 0
            else:
                count = size.number()
        if 0 < count <= _PARTS_MAX:
            parts = [sum(own) // count] * count
        if sum(parts) != sum(own) or any(part % len(own) for part in parts):
            raise self._unsupported(name, "its fused parts are not divisible by the tensor ranks")
        return [[part // len(own)] * len(own) for part in parts]

    def _unsupported(self, name: str, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"tensor-parallel {name!r} cannot be joined exactly: {reason}",
            path=self.record.path,
            hint="Gather the weights from the running engine, or save without tensor parallelism",
        )


def tensor_ranks(
    models: Sequence[ModelStates], shards: Mapping[str, Sequence[Shape]]
) -> TensorRanks:
    """Parse the records of all tensor ranks; later ranks may have none."""
    record, *others = (model.root.get(_INFO) for model in models)
    if not record.value:
        raise UnsupportedError(
            f"the tensor-parallel split is not recorded (no {_INFO})",
            path=record.path,
            hint="Resume with DeepSpeed 0.19 or later, save again, and export that checkpoint",
        )
    for other in others:
        if other.value and other.plain_values() != record.plain_values():
            other.fail(f"differs from {record.path.name}", "another tensor-parallel split")
    maps = record.get(_MAPS)
    if maps.value is not None and maps.get("version").value != 1:
        raise UnsupportedError("unknown version of affine_map", path=record.path)
    items = {
        _MAPS: () if maps.value is None else maps.get("params").entries(),
        REFUSED: record.get(REFUSED).entries(),
        _WIDTHS: record.get(_WIDTHS).entries(),
        FUSED: [
            (pattern.text(), entry)
            for entry in record.get(FUSED).items()
            for pattern in entry.need("patterns").items()
        ],
    }
    for key in (_WHOLE, _AVERAGED, HALVES, ROWS, VOCABULARY):
        items[key] = ((item.text(), item) for item in record.get(key).items())
    tables = {key: Patterns.read(own, record.path) for key, own in items.items()}
    return TensorRanks(record, shards, tables)


def join_tensor_ranks(models: Sequence[ModelStates], cells: Sequence[Cell]) -> Cell:
    """Return the cell of all tensor ranks of one stage."""
    merged = joined(cells)  # rank 0 records shared_params, later ranks show shared storages
    first, *others = (cell.parameters.keys() - merged.aliases.keys() for cell in cells)
    if apart := sorted(name for names in others for name in first ^ names):
        raise LayoutError("tensor ranks have different tensors", apart[0], "the same names")
    by_name = {
        name: [cell.parameters[name] for cell in cells]
        for name in cells[0].parameters
        if name in first
    }
    shards = {name: [one.shape for one in parts] for name, parts in by_name.items()}
    ranks = tensor_ranks(models, shards)
    found = {name: ranks.join(parts) for name, parts in by_name.items()}
    return replace(
        merged,
        parameters={name: one for name, (one, _) in found.items()},
        copies=(*(copy for _, copies in found.values() for copy in copies), *merged.copies),
    )


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _box(rank: int, piece: PickleView, whole: Shape, shard: Shape) -> Box | None:
    """Return a piece of an affine map as a box of the whole and of a slice; ``None`` if it is none.

    Pieces have offset and strides in elements. One without elements (a rank has some if there are
    fewer heads than ranks) begins at 0: its recorded offset need not be in the tensor.
    """
    shape, starts = piece.need("shape").shape(), list[Shape]()
    for key, tensor in (("source", whole), ("dest", shard)):
        view = piece.need(key).items()
        if len(view) != 2:
            piece.fail("is not an offset and strides")
        offset, strides, dense = view[0].number(), view[1].shape(), row_major(tensor)
        if not len(shape) == len(tensor) == len(strides):
            return None
        start = [offset // (step or 1) % (n or 1) for step, n in zip(dense, tensor, strict=True)]
        if not prod(shape):
            start = [0] * len(shape)
        elif offset != sum(i * step for i, step in zip(start, dense, strict=True)) or any(
            i + n > size or (n > 1 and stride != step)
            for i, n, size, stride, step in zip(start, shape, tensor, strides, dense, strict=True)
        ):
            return None
        starts.append(tuple(start))
    return rank, starts[0], starts[1], shape
