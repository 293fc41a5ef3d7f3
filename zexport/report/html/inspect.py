"""The page of ``zexport inspect``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from zexport.checkpoint.state import TrainingState
from zexport.export.plan import Origin
from zexport.inspect.statistics import TensorStatistics
from zexport.inspect.strips import Fill, Piece, fill_of, strips
from zexport.inspect.summary import Inspection, Outcome
from zexport.ranges.dtypes import DType
from zexport.report.html.page import Column, Leaf, Page, Remarks, Row, draw_strips, treemap
from zexport.report.inspect import facts, remarks, tag_row

_FILLS = tuple(Fill)
_NOT_FINITE = len(_FILLS)
_MOODS = {
    Outcome.EXPORTABLE: "good",
    Outcome.NEEDS_BASE: "warning",
    Outcome.CHOOSE_TAG: "warning",
    Outcome.NOT_EXPORTABLE: "bad",
}
_COLUMNS = (
    Column("Role"),
    Column("Type"),
    Column("Shape", "whole"),
    Column("Elements", "number"),
)
_VALUE_COLUMNS = tuple(Column(title, "number") for title in ("Norm", "Min", "Max", "Mean"))


def inspection_page(
    inspection: Inspection, statistics: Sequence[TensorStatistics] | None = None
) -> Page:
    """Return the page of a checkpoint; with statistics, it shows values too."""
    checkpoint, tensors = inspection.checkpoint, inspection.tensors
    measured = {one.name: one for one in statistics or ()}
    colors = [
        _NOT_FINITE
        if (found := measured.get(one.name)) and (found.nan or found.inf)
        else _FILLS.index(fill_of(one))
        for one in tensors
    ]

    def color_of_piece(piece: Piece) -> int:
        numbers = range(piece.first, piece.last + 1) if piece.first >= 0 else ()
        is_finite = all(colors[number] != _NOT_FINITE for number in numbers)
        return _FILLS.index(piece.fill) if is_finite else _NOT_FINITE

    def color_of_module(found: Sequence[int]) -> int:
        return _NOT_FINITE if _NOT_FINITE in found else max(set(found), key=found.count)

    page = Page(
        kind="inspect",
        subject=str(inspection.path if checkpoint is None else Origin.of(checkpoint)),
        verdict=inspection.verdict.sentence,
        mood=_MOODS[inspection.verdict.outcome],
        next_step=inspection.verdict.next_step,
        facts=tuple(_tags(inspection)),
        columns=(*_COLUMNS, *(_VALUE_COLUMNS if statistics is not None else ()), Column("Remark")),
        rows=tuple(_rows(inspection, colors, None if statistics is None else measured)),
    )
    if checkpoint is None:
        return page
    leaves = (
        Leaf(one.name, one.numel * one.dtype.itemsize, color)
        for one, color in zip(tensors, colors, strict=True)
    )
    return replace(
        page,
        facts=tuple(one for one in facts(inspection, checkpoint) if one[1]),
        sentences=tuple(_sentences(checkpoint, has_values=statistics is not None)),
        remarks=tuple(
            Remarks(title, tuple(items), mood) for title, items, mood in remarks(inspection)
        ),
        colors=(*(fill.value for fill in _FILLS), "with NaN or Inf"),
        bars=(
            ("all rank files", sum(file.nbytes for file in checkpoint.files)),
            ("read by an export", inspection.nbytes_read()),
            ("fp32 export", inspection.nbytes_written(DType.F32)),
            ("bf16 export", inspection.nbytes_written(DType.BF16)),
        ),
        boxes=treemap([*leaves], color_of_module),
        strips=draw_strips(strips(checkpoint), color_of_piece),
        row_of=tuple(range(len(tensors))),
    )


def _tags(inspection: Inspection) -> Iterator[tuple[str, str]]:
    for tag in inspection.tags:
        name, step, nbytes, files, _ = tag_row(tag)
        values = (step and f"step {step}", nbytes, f"{files} rank files")
        yield name, ", ".join(filter(None, values))


def _sentences(checkpoint: TrainingState, *, has_values: bool) -> Iterator[str]:
    if has_values:
        yield "All tensors were read, and the CRC-32 of each record matches."
    else:
        yield "Only metadata was read; --stats also reads and checks the values."
    if flats := checkpoint.flats:
        numel, padding = sum(f.numel for f in flats), sum(f.padding for f in flats)
        yield f"Flat groups: {numel:,} elements, of which {padding:,} are padding."


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
        cells = [
            tensor.role.value,
            tensor.dtype.torch_name,
            str(list(tensor.shape)),
            f"{tensor.numel:,}",
        ]
        remark = [f"tied: {name}" for name in aliases.get(tensor.name, ())]
        if tensor.source is None:
            remark.append("rank files are missing")
        if measured is not None and (values := measured.get(tensor.name)) is not None:
            numbers = (values.norm, values.min, values.max, values.mean)
            cells += ["" if one is None else f"{one:.5g}" for one in numbers]
            counts = ((values.nan, "NaN"), (values.inf, "Inf"))
            remark += [f"{count:,} {kind}" for count, kind in counts if count]
            if tensor.numel and values.min == values.max == 0:
                remark.append("all zero")
        elif measured is not None:
            cells += [""] * len(_VALUE_COLUMNS)
        yield Row(tensor.name, color, (*cells, "; ".join(remark)))
