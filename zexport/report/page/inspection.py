"""What is in a checkpoint, as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zexport.checkpoint.state import StoredTensor, TrainingState
from zexport.export.plan import Origin
from zexport.inspect.inspect import Inspection, Outcome
from zexport.inspect.statistics import TensorStatistics
from zexport.inspect.strips import Fill, Piece, fill_of, strips
from zexport.ranges.dtypes import DType
from zexport.report.inspect import facts, remarks, tag_row
from zexport.report.page.drawing import draw
from zexport.report.page.page import Bar, Column, Mood, Page, Remarks, Row
from zexport.report.page.treemap import Leaf, treemap

_FILLS = tuple(Fill)
_NOT_FINITE = len(_FILLS)
_COLORS = (*(fill.value for fill in _FILLS), "with NaN or Inf")
_MOODS = {
    Outcome.EXPORTABLE: Mood.GOOD,
    Outcome.NEEDS_BASE: Mood.WARNING,
    Outcome.CHOOSE_TAG: Mood.WARNING,
    Outcome.NOT_EXPORTABLE: Mood.BAD,
}
_COLUMNS = (
    Column("Role"),
    Column("Type"),
    Column("Shape", "whole"),
    Column("Elements", "number"),
)
_VALUES = tuple(Column(title, "number") for title in ("Norm", "Min", "Max", "Mean"))
_REMARK = Column("Remark")


def inspection_page(
    inspection: Inspection, statistics: Sequence[TensorStatistics] | None = None
) -> Page:
    """The inspection as a page; with statistics, the values of tensors too."""
    checkpoint = inspection.checkpoint
    measured = {one.name: one for one in statistics or ()}
    colors = [_color(tensor, measured.get(tensor.name)) for tensor in inspection.tensors]
    drawn = None if checkpoint is None else draw(strips(checkpoint), lambda p: _of_piece(p, colors))
    leaves = [
        Leaf(tensor.name, tensor.numel * tensor.dtype.itemsize, color)
        for tensor, color in zip(inspection.tensors, colors, strict=True)
    ]
    values = _VALUES if statistics is not None else ()
    return Page(
        kind="inspect",
        subject=str(inspection.path if checkpoint is None else Origin.of(checkpoint)),
        verdict=inspection.verdict.sentence,
        mood=_MOODS[inspection.verdict.outcome],
        next_step=inspection.verdict.next_step,
        facts=tuple(_facts(inspection)),
        proof=tuple(_proof(checkpoint, is_read=statistics is not None)),
        remarks=tuple(Remarks.all_of(remarks(inspection))),
        colors=_COLORS if checkpoint is not None else (),
        bars=tuple(_bars(inspection)),
        boxes=treemap(leaves, _worst),
        drawn=drawn,
        row_of=(*range(len(inspection.tensors)),),
        columns=(*_COLUMNS, *values, _REMARK),
        rows=tuple(_rows(inspection, colors, None if statistics is None else measured)),
    )


def _facts(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """What the checkpoint is, or which ones there are to choose from."""
    if inspection.checkpoint is not None:
        yield from (one for one in facts(inspection, inspection.checkpoint) if one[1])
        return
    for tag in inspection.tags:
        name, step, nbytes, files, _ = tag_row(tag)
        told = (step and f"step {step}", nbytes, f"{files} rank files")
        yield name, ", ".join(filter(None, told))


def _color(tensor: StoredTensor, values: TensorStatistics | None) -> int:
    if values is not None and (values.nan or values.inf):
        return _NOT_FINITE
    return _FILLS.index(fill_of(tensor))


def _of_piece(piece: Piece, colors: Sequence[int]) -> int:
    numbers = range(piece.first, piece.last + 1) if piece.first >= 0 else ()
    is_broken = any(colors[number] == _NOT_FINITE for number in numbers)
    return _NOT_FINITE if is_broken else _FILLS.index(piece.fill)


def _worst(colors: Sequence[int]) -> int:
    """A module's: what is broken shows; else what most of its tensors are."""
    return _NOT_FINITE if _NOT_FINITE in colors else max(set(colors), key=colors.count)


def _proof(checkpoint: TrainingState | None, *, is_read: bool) -> Iterator[str]:
    """What was read, and what the flat partitions add up to."""
    if checkpoint is None:
        return
    if is_read:
        yield "Every tensor was read, and each record has the CRC-32 that its file states."
    else:
        yield "Metadata alone was read; with --stats the values are read and proved too."
    flats = checkpoint.flats
    if flats:
        numel, padding = sum(f.numel for f in flats), sum(f.padding for f in flats)
        yield (
            f"The flat groups hold {numel:,} elements: {numel - padding:,} of tensors or their "
            f"second copies, and {padding:,} of padding."
        )


def _bars(inspection: Inspection) -> Iterator[Bar]:
    """Sizes before and after."""
    checkpoint = inspection.checkpoint
    if checkpoint is None:
        return
    yield Bar("all rank files", sum(file.nbytes for file in checkpoint.files))
    yield Bar("an export reads", inspection.nbytes_read())
    yield Bar("writes as fp32", inspection.nbytes_written(DType.F32))
    yield Bar("writes as bf16", inspection.nbytes_written(DType.BF16))


def _rows(
    inspection: Inspection,
    colors: Sequence[int],
    measured: Mapping[str, TensorStatistics] | None,
) -> Iterator[Row]:
    checkpoint = inspection.checkpoint
    aliases: dict[str, list[str]] = {}
    for alias, name in checkpoint.aliases.items() if checkpoint is not None else ():
        aliases.setdefault(name, []).append(alias)
    for tensor, color in zip(inspection.tensors, colors, strict=True):
        cells = (
            tensor.role.value,
            tensor.dtype.torch_name,
            str(list(tensor.shape)),
            f"{tensor.numel:,}",
        )
        values = None if measured is None else measured.get(tensor.name)
        told = [f"tied: {name}" for name in aliases.get(tensor.name, ())]
        told += ["not here: files are missing"] if tensor.source is None else []
        told += [] if values is None else _marks(values, tensor.numel)
        numbers = () if measured is None else _numbers(values)
        yield Row(tensor.name, color, (*cells, *numbers, "; ".join(told)))


def _numbers(values: TensorStatistics | None) -> tuple[str, ...]:
    if values is None:
        return ("",) * len(_VALUES)
    told = (values.norm, values.min, values.max, values.mean)
    return tuple("" if one is None else f"{one:.5g}" for one in told)


def _marks(values: TensorStatistics, numel: int) -> list[str]:
    counts = ((values.nan, "NaN"), (values.inf, "Inf"))
    counted = [f"{count:,} {kind}" for count, kind in counts if count]
    return [*counted, "all zero"] if numel and values.min == values.max == 0 else counted
