"""How two models, or the trainings in two checkpoints, differ, as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from zexport.checkpoint.state import TrainingState
from zexport.diff.diff import DiffReport
from zexport.diff.tensor import Outcome, TensorDiff
from zexport.diff.verdict import Cause, words
from zexport.inspect.strips import Piece, strips
from zexport.report.diff import apart, figures
from zexport.report.page.drawing import Drawn, draw
from zexport.report.page.page import Column, Mood, Page, Remarks, Row
from zexport.report.page.treemap import Leaf, treemap
from zexport.report.text import size

_STEPS = (1e-3, 1e-2, 1e-1)
_EQUAL, _ROUNDED, _NEAREST = 0, 1, 2
_ODD = _NEAREST + len(_STEPS) + 1
_ALONE, _UNCOMPARED = _ODD + 1, _ODD + 2
_COLORS = (
    "equal",
    "equal but for rounding",
    "changed by up to 0.1 %",
    "by up to 1 %",
    "by up to 10 %",
    "by more",
    "NaN, Inf, all zero or another shape",
    "on one side alone",
    "not compared",
)
_COLUMNS = (
    Column("What is seen"),
    Column("Apart by", "number"),
    Column("Type"),
    Column("Shape", "whole"),
    Column("More"),
)


def diff_page(report: DiffReport, a: TrainingState | None = None) -> Page:
    """The report as a page; the partitions of A, if it is a checkpoint, are coloured by it."""
    colors = [_color(tensor) for tensor in report.tensors]
    leaves = [
        Leaf(tensor.name, _nbytes(tensor), color)
        for tensor, color in zip(report.tensors, colors, strict=True)
        if " (" not in tensor.name  # the weights; an optimizer's states would count them thrice
    ]
    drawn, row_of = (None, ()) if a is None else _drawn(a, report.tensors, colors)
    settings = tuple(f"{one.about}: {one.a} in A, {one.b} in B" for one in report.settings)
    counted = Counter(map(words, report.tensors))
    return Page(
        kind="diff",
        subject=f"{report.a} and {report.b}",
        verdict=report.verdict.sentence,
        mood=Mood.GOOD if report.verdict.cause in (Cause.NONE, Cause.ROUNDING) else Mood.PLAIN,
        next_step="",
        facts=(
            ("A", str(report.a)),
            ("B", str(report.b)),
            ("Compared", report.compared),
            *((said, f"{count:,}") for said, count in counted.items()),
        ),
        proof=(f"{size(report.nbytes_read)} of both were read.",),
        remarks=tuple(Remarks.all_of([("Set otherwise", settings, "warning")])),
        colors=_COLORS,
        bars=(),
        boxes=treemap(leaves, max),
        drawn=drawn,
        row_of=row_of,
        columns=_COLUMNS,
        rows=tuple(_rows(report.tensors, colors)),
    )


def _color(tensor: TensorDiff) -> int:
    if tensor.is_alike:
        return _EQUAL if tensor.outcome is Outcome.EQUAL else _ROUNDED
    if tensor.values is None:
        return _ALONE
    is_odd = tensor.outcome is Outcome.SHAPE or tensor.is_finite_on_one_side or tensor.zero_side
    if is_odd or tensor.values.relative_norm is None:
        return _ODD
    return _NEAREST + sum(tensor.values.relative_norm > step for step in _STEPS)


def _nbytes(tensor: TensorDiff) -> int:
    dtype = tensor.a_dtype or tensor.b_dtype
    return 0 if dtype is None else prod(tensor.shape) * dtype.itemsize


def _drawn(
    checkpoint: TrainingState, tensors: Sequence[TensorDiff], colors: Sequence[int]
) -> tuple[Drawn, tuple[int, ...]]:
    """The strips of A, and the row of each of its tensors, -1 where it was not compared."""
    rows: Mapping[str, int] = {
        tensor.a_name: row for row, tensor in enumerate(tensors) if tensor.a_name is not None
    }
    row_of = tuple(rows.get(tensor.name, -1) for tensor in checkpoint.tensors)

    def color_of(piece: Piece) -> int:
        numbers = range(piece.first, piece.last + 1) if piece.first >= 0 else ()
        known = [colors[row_of[number]] for number in numbers if row_of[number] >= 0]
        return max(known, default=_UNCOMPARED)

    return draw(strips(checkpoint), color_of), row_of


def _rows(tensors: Sequence[TensorDiff], colors: Sequence[int]) -> Iterator[Row]:
    for tensor, color in zip(tensors, colors, strict=True):
        dtypes = dict.fromkeys(d.value for d in (tensor.a_dtype, tensor.b_dtype) if d is not None)
        cells = (
            words(tensor),
            "" if tensor.values is None else apart(tensor.values),
            " and ".join(dtypes),
            str(list(tensor.shape)),
            ", ".join(figures(tensor.values) if tensor.values and tensor.values.unequal else ()),
        )
        yield Row(tensor.name, color, cells)
