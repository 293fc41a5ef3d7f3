"""How a checkpoint says its tensors are split over tensor ranks (``universal_checkpoint_info``).

Source: DeepSpeed 0.19.8, ``module_inject/layers.py`` (``collect_autotp_universal_checkpoint_info``)
for the record, ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``) for what it means and which
part of it goes before which. Megatron-DeepSpeed writes the older lists alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from msgspec import Struct

from zexport.checkpoint.layouts.boxes import (
    Joined,
    Piece,
    box_start,
    concatenated,
    interleaved,
    placed,
    replicated,
)
from zexport.checkpoint.layouts.patterns import PatternTable
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError, LayoutError, UnsupportedError
from zexport.ranges.dtypes import Shape

MAX_PIECES = 1024
"""Pieces of one tensor; a fused layout of 64 ranks has a few hundred."""

_SHOWN = 4
_INFO = "universal_checkpoint_info"
AFFINE_VERSION = 1
"""Of the form in which affine maps are written."""

_SUB_PARAMS_WITH_WIDTHS = 0.4


class Splits(Struct, frozen=True):
    """What the record says of tensors, by pattern.

    ``refused`` are those that DeepSpeed itself cannot put together; ``halves`` and ``sub_params``
    are fused parts, of which ``widths`` has the width on every rank; ``rows`` are split along
    dimension 1; the last rows of ``vocabulary`` may be padding.
    """

    record: Value
    maps: PatternTable[Value]
    refused: PatternTable[Value]
    whole: PatternTable[bool]
    halves: PatternTable[bool]
    sub_params: PatternTable[Value]
    widths: PatternTable[Value]
    rows: PatternTable[bool]
    vocabulary: PatternTable[bool]

    def join(self, name: str, shards: Mapping[str, Sequence[Shape]]) -> Joined:
        """How the shards of ``name`` become one tensor; ``shards`` has every rank's, by name."""
        own = shards[name]
        if (reason := self.refused.get(name)) is not None:
            raise self._unsupported(name, reason.text_or_none() or "DeepSpeed gives no reason")
        if (entry := self.maps.get(name)) is not None:
            return self._by_map(name, entry, own)
        if self.whole.get(name):
            return replicated(own)
        if self.halves.get(name):
            return interleaved(own, 0, self._equal_parts(name, own, 0, 2))
        if (entry := self.sub_params.get(name)) is not None:
            dim = entry.need("partition_dim").number()
            return interleaved(own, dim, self._widths(name, entry, own, dim))
        if self.rows.get(name):
            return concatenated(own, 1)
        if len(own[0]) == 1 and not self._follows_a_weight(name, shards):
            raise self._unsupported(name, "nothing says whether the ranks share or split it")
        return concatenated(own, 0)

    def note(self, name: str, shape: Shape) -> str | None:
        """What the user should know of a joined tensor: rows beyond the vocabulary are kept."""
        kept = self.without_padding(name, shape)
        if kept == shape:
            return None
        return (
            f"{name!r} has {shape[0]} rows, of which the last {shape[0] - kept[0]} are padding of "
            "the vocabulary"
        )

    def without_padding(self, name: str, shape: Shape) -> Shape:
        """The shape of a joined tensor without rows beyond the vocabulary."""
        size = self.record.get("original_vocab_size").number_or_none()
        if size is None or not shape or not 0 < size < shape[0] or not self.vocabulary.get(name):
            return shape
        return (size, *shape[1:])

    def _follows_a_weight(self, name: str, shards: Mapping[str, Sequence[Shape]]) -> bool:
        """Whether a 1-D tensor is the bias of a weight whose rows are split the same way.

        A 1-D tensor in no list is split by DeepSpeed's rule. Early records left out what AutoTP
        does not touch, such as norms, which the rule would make as many times too long as there
        are ranks.
        """
        weight = f"{name.rpartition('.')[0]}.weight"
        if any(len(shard) < 2 for shard in shards.get(weight, ((),))):  # noqa: PLR2004 - a matrix
            return False
        return self.join(weight, shards).shape[0] == sum(shard[0] for shard in shards[name])

    def _by_map(self, name: str, entry: Value, shards: Sequence[Shape]) -> Joined:
        """The pieces that ``affine_map`` names, each a box of the whole and of the shard."""
        whole = entry.need("logical_shape").shape()
        ranks = entry.need("ranks").by_number()
        pieces: list[Piece] = []
        if set(ranks) != set(range(len(shards))):
            raise LayoutError(
                f"the pieces of {name!r} are not those of these tensor ranks",
                f"{len(ranks)} ranks",
                f"ranks 0 to {len(shards) - 1}",
            )
        for rank, shard in enumerate(shards):
            value = ranks[rank]
            if value.need("shard_shape").shape() != shard:
                raise LayoutError(
                    f"rank {rank}'s shard of {name!r} is not as it is described",
                    shard,
                    value.need("shard_shape").shape(),
                )
            pieces += (
                self._piece(name, rank, piece, whole, shard)
                for piece in value.need("pieces").items()[: MAX_PIECES + 1]
            )
            if len(pieces) > MAX_PIECES:
                raise self._unsupported(name, f"it is cut into more than {MAX_PIECES} pieces")
        return placed(whole, shards, pieces)

    def check_by_lists(self, name: str, mapped: Joined, shards: Sequence[Shape]) -> None:
        """Refuse a map that disagrees with the lists beside it, which older versions read.

        These know tensors that every rank has whole, the widths of fused parts and, of all else,
        one block a rank in the order of ranks. A map of several blocks goes beyond them.
        """
        if self.maps.get(name) is None:
            return
        blocks = Counter(one.rank for one in mapped.pieces if prod(one.shape))
        entry, widths = self.sub_params.get(name), self.widths.get(name)
        if self.whole.get(name):
            listed = replicated(shards)
        elif entry is not None and widths is not None:
            dim = entry.need("partition_dim").number()
            listed = interleaved(shards, dim, self._widths(name, entry, shards, dim))
        elif mapped.copies or max(blocks.values(), default=0) > 1:
            return
        else:
            listed = concatenated(shards, 1 if self.rows.get(name) else 0)
        if (listed.shape, _boxes(listed)) != (mapped.shape, _boxes(mapped)):
            raise DamagedCheckpointError(
                f"says in two ways how {name!r} is split over the tensor ranks: in its affine map "
                "and in its lists",
                path=self.record.path,
                found=_shown(mapped),
                expected=_shown(listed),
                hint="Copy the file again from where it was written",
            )

    def _piece(self, name: str, rank: int, piece: Value, whole: Shape, shard: Shape) -> Piece:
        if piece.has("scale") and piece.get("scale").value != 1:
            raise self._unsupported(name, "the ranks hold it multiplied by a factor")
        found = box_of(rank, piece, whole, shard)
        if found is None:
            raise self._unsupported(name, "a piece of it is no box of whole rows and columns")
        return found

    def _widths(
        self, name: str, entry: Value, shards: Sequence[Shape], dim: int
    ) -> Sequence[Sequence[int]]:
        """Every fused part's width on each rank: recorded, or equal parts in older records."""
        recorded = self.widths.get(name)
        if recorded is not None:
            return [[width.number() for width in row.items()] for row in recorded.items()]
        if self.version >= _SUB_PARAMS_WITH_WIDTHS:
            raise self._unsupported(name, "the widths of its fused parts are not recorded")
        sizes = entry.need("shape").items()
        if not 0 <= dim < len(sizes):
            raise LayoutError(
                f"{name!r} is split along a dimension it does not have",
                dim,
                f"{len(sizes)} of them",
            )
        if not isinstance(sizes[dim].value, list | tuple):
            return self._equal_parts(name, shards, dim, sizes[dim].number())
        parts = [size.number() for size in sizes[dim].items()]
        if any(part % len(shards) for part in parts):
            raise self._unsupported(name, "its fused parts do not divide by the tensor ranks")
        return [[part // len(shards)] * len(shards) for part in parts]

    def _equal_parts(
        self, name: str, shards: Sequence[Shape], dim: int, count: int
    ) -> Sequence[Sequence[int]]:
        """``count`` parts of one size, each shared equally by the ranks."""
        widths = {shard[dim] if dim < len(shard) else 0 for shard in shards}
        width = next(iter(widths))
        if len(widths) > 1 or not 0 < count <= MAX_PIECES or width % count:
            raise self._unsupported(name, f"its shards do not consist of {count} equal parts")
        return [[width // count] * len(shards)] * count

    @property
    def version(self) -> float:
        """The record's own version; 0 where it has none."""
        value = self.record.get("universal_checkpoint_version").value
        return float(value) if isinstance(value, int | float) else 0.0

    def _unsupported(self, name: str, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"does not allow the tensor-parallel {name!r} to be put together exactly: {reason}",
            path=self.record.path,
            hint="Gather the weights from the running engine instead, or save without tensor "
            "parallelism",
        )


def join_alike(
    records: Sequence[Splits], name: str, shards: Mapping[str, Sequence[Shape]]
) -> Joined:
    """How the shards of ``name`` become one tensor, by the record of every tensor rank.

    The record is the same on all of them: AutoTP has every rank mark the layout of the whole layer
    (``module_inject/layers.py``), and Megatron-DeepSpeed's lists are constants. What it means for
    a tensor is compared, and not its text, so that nothing else in it can differ to harm.
    """
    first = records[0]
    joined = first.join(name, shards)
    for other in records[1:]:
        if (found := other.join(name, shards)) != joined:
            raise DamagedCheckpointError(
                f"says otherwise than {first.record.path.name} how {name!r} is split over the "
                "tensor ranks",
                path=other.record.path,
                found=_shown(found),
                expected=_shown(joined),
                hint="Copy the model files of all tensor ranks of one save again",
            )
    first.check_by_lists(name, joined, shards[name])
    return joined


def _boxes(joined: Joined) -> set[Piece]:
    return {piece for piece in joined.pieces if prod(piece.shape)}


def _shown(joined: Joined) -> str:
    boxes = [f"rank {piece.rank} from {list(piece.start)}" for piece in joined.pieces[:_SHOWN]]
    more = ", ..." if len(joined.pieces) > _SHOWN else ""
    return f"a tensor of {list(joined.shape)}, {', '.join(boxes)}{more}"


def read_all_splits(models: Sequence[ModelStates]) -> tuple[Splits, ...]:
    """The records of all tensor ranks of a stage: the lowest's, and those that others have."""
    others = (model for model in models[1:] if not _is_without(model.tensor_splits))
    return (read_splits(models[0]), *map(read_splits, others))


def _is_without(record: Value) -> bool:
    return record.is_none or record.is_empty or not record.mapping()


def read_splits(model: ModelStates) -> Splits:
    """The record of how tensors are split, out of a rank's model states."""
    record = model.tensor_splits
    if _is_without(record):
        raise UnsupportedError(
            f"is tensor-parallel and does not record how its tensors are split (no {_INFO})",
            path=model.file.path,
            hint="Resume it with DeepSpeed 0.19 or later, save once more, and export that",
        )
    maps = record.get("affine_map")
    version = maps.get("version").number_or_none() if not maps.is_none else AFFINE_VERSION
    if version != AFFINE_VERSION:
        raise UnsupportedError(
            "describes its tensors in a version of affine_map that is not known",
            path=record.path,
            found=version,
            expected=AFFINE_VERSION,
            hint="Look for a newer zexport",
        )
    entries = () if maps.is_none else maps.get("params").entries()
    return Splits(
        record=record,
        maps=PatternTable.read(entries, record.path),
        refused=_table(record, record.get("autotp_unsupported_parameter_patterns")),
        # Averaged tensors are the same on every rank or cannot be had exactly: ranks are compared.
        whole=_flags(record, "tp_replicated_parameter_patterns", "parameter_to_average_patterns"),
        halves=_flags(record, "parameter_with_2_sub_params_cat_dim_0"),
        sub_params=PatternTable.read(_sub_params(record), record.path),
        widths=_table(record, record.get("sub_param_shard_widths")),
        rows=_flags(record, "parameter_with_row_parallelism_patterns"),
        vocabulary=_flags(record, "vocabulary_parameter_patterns"),
    )


def _table(record: Value, entries: Value) -> PatternTable[Value]:
    return PatternTable.read(entries.entries(), record.path)


def _flags(record: Value, *keys: str) -> PatternTable[bool]:
    texts = {item.text() for key in keys for item in record.get(key).items()}
    return PatternTable.read(((text, True) for text in sorted(texts)), record.path)


def _sub_params(record: Value) -> Iterable[tuple[str, Value]]:
    for entry in record.get("parameter_with_sub_params").items():
        for pattern in entry.need("patterns").items():
            yield pattern.text(), entry


def box_of(rank: int, piece: Value, whole: Shape, shard: Shape) -> Piece | None:
    """A piece of an affine map as a box of the whole and of a rank's shard; ``None`` if none."""
    box = piece.need("shape").shape()
    start, origin = (
        box_start(box, tensor, *_view(piece.need(key)))
        for key, tensor in (("source", whole), ("dest", shard))
    )
    return None if start is None or origin is None else Piece(rank, start, origin, box)


def _view(value: Value) -> tuple[int, Shape]:
    """Offset and strides, both in elements."""
    items = value.items()
    if len(items) != 2:  # noqa: PLR2004 - a pair
        value.fail("is not an offset and strides")
    return items[0].number(), items[1].shape()
