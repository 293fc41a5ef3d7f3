"""The page of ``zexport inspect``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from zexport.export.plan import Origin
from zexport.inspect.statistics import TensorStatistics
from zexport.inspect.strips import Fill, Piece, fill_of, strips
from zexport.inspect.summary import Inspection, Outcome
from zexport.ranges.dtypes import DType
from zexport.report.html.page import Page, Row, draw_strips, treemap
from zexport.report.inspect import facts, remarks, tag_row

_FILLS = tuple(Fill)
_NOT_FINITE = len(_FILLS)
_MOODS = {
    Outcome.EXPORTABLE: "good",
    Outcome.NEEDS_BASE: "warning",
    Outcome.CHOOSE_TAG: "warning",
    Outcome.NOT_EXPORTABLE: "bad",
}
_COLUMNS = ("Role", "Type", "=Shape", ">Elements")
_VALUE_COLUMNS = (">Norm", ">Min", ">Max", ">Mean")


def inspection_page(
    inspection: Inspection, statistics: Sequence[TensorStatistics] | None = None
) -> Page:
    """Return the page of a checkpoint; with statistics, it shows values too."""
    checkpoint = inspection.checkpoint
    rows = tuple(_rows(inspection, statistics))

    def color_of_piece(piece: Piece, found: Sequence[int]) -> int:
        return _NOT_FINITE if _NOT_FINITE in found else _FILLS.index(piece.fill)

    def color_of_module(found: Sequence[int]) -> int:
        return _NOT_FINITE if _NOT_FINITE in found else max(set(found), key=found.count)

    page = Page(
        kind="inspect",
        subject=str(inspection.path if checkpoint is None else Origin.of(checkpoint)),
        verdict=inspection.verdict.sentence,
        mood=_MOODS[inspection.verdict.outcome],
        next_step=inspection.verdict.next_step,
        facts=tuple(_tags(inspection)),
        columns=(*_COLUMNS, *(_VALUE_COLUMNS if statistics is not None else ()), "Remark"),
        rows=rows,
    )
    if checkpoint is None:
        return page
    return replace(
        page,
        facts=tuple(one for one in facts(inspection, checkpoint) if one[1]),
        sentences=(
            "Only metadata was read; --stats also reads and checks the values."
            if statistics is None
            else "All tensors were read, and the CRC-32 of each record matches.",
        ),
        remarks=tuple(remarks(inspection)),
        colors=(*(fill.value for fill in _FILLS), "with NaN or Inf"),
        bars=(
            ("all rank files", sum(file.nbytes for file in checkpoint.files)),
            ("read by an export", inspection.nbytes_read()),
            ("fp32 export", inspection.nbytes_written(DType.F32)),
            ("bf16 export", inspection.nbytes_written(DType.BF16)),
        ),
        boxes=treemap(rows, color_of_module),
        strips=draw_strips(strips(checkpoint), [row.color for row in rows], color_of_piece),
        row_of=tuple(range(len(rows))),
    )


def _tags(inspection: Inspection) -> Iterator[tuple[str, str]]:
    for tag in inspection.tags:
        name, step, nbytes, files, _ = tag_row(tag)
        values = (step and f"step {step}", nbytes, f"{files} rank files")
        yield name, ", ".join(filter(None, values))


def _rows(inspection: Inspection, statistics: Sequence[TensorStatistics] | None) -> Iterator[Row]:
    checkpoint = inspection.checkpoint
    measured = {one.name: one for one in statistics or ()}
    aliases: dict[str, list[str]] = {}
    for alias, name in checkpoint.aliases.items() if checkpoint is not None else ():
        aliases.setdefault(name, []).append(alias)
    for tensor in inspection.tensors:
        color, values = _FILLS.index(fill_of(tensor)), measured.get(tensor.name)
        cells = [
            tensor.role.value,
            tensor.dtype.torch_name,
            str(list(tensor.shape)),
            f"{tensor.numel:,}",
        ]
        remark = [f"tied: {name}" for name in aliases.get(tensor.name, ())]
        if tensor.source is None:
            remark.append("rank files are missing")
        if values is not None:
            color = _NOT_FINITE if values.nan or values.inf else color
            numbers = (values.norm, values.min, values.max, values.mean)
            cells += ["" if one is None else f"{one:.5g}" for one in numbers]
            counts = ((values.nan, "NaN"), (values.inf, "Inf"))
            remark += [f"{count:,} {kind}" for count, kind in counts if count]
            if tensor.numel and values.min == values.max == 0:
                remark.append("all zero")
        elif statistics is not None:
            cells += [""] * len(_VALUE_COLUMNS)
        nbytes = tensor.numel * tensor.dtype.itemsize
        yield Row(tensor.name, color, (*cells, "; ".join(remark)), nbytes)
