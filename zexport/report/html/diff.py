"""The page of ``zexport diff``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from msgspec.structs import replace

from zexport.checkpoint.state import TrainingState
from zexport.diff.folders import DiffReport
from zexport.diff.tensors import Outcome, TensorDiff
from zexport.inspect.strips import Piece, strips
from zexport.report.diff import COLUMNS, cells, facts, summary
from zexport.report.html.page import Page, Row, draw_strips, treemap
from zexport.report.text import size

_LIMITS = (1e-3, 1e-2, 1e-1)
_EQUAL, _ROUNDED, _CHANGED, _SPECIAL, _ONE_SIDE, _NOT_COMPARED = 0, 1, 2, 6, 7, 8
_COLORS = (
    "equal",
    "equal after rounding",
    "changed by up to 0.1 %",
    "up to 1 %",
    "up to 10 %",
    "more",
    "NaN, Inf, all zero or other shape",
    "on one side only",
    "not compared",
)


def diff_page(report: DiffReport, a: TrainingState | None = None) -> Page:
    """Return the page of a comparison; of a checkpoint A, it shows the rank files."""
    tensors = report.tensors
    rows = tuple(Row(one.name, _color(one), cells(one), _drawn_nbytes(one)) for one in tensors)
    settings = tuple(f"{one.about}: {one.a} in A, {one.b} in B" for one in report.settings)
    page = Page(
        kind="diff",
        subject=f"{report.a} and {report.b}",
        verdict=summary(report),
        mood="good" if report.is_cast_equal else "plain",
        facts=facts(report),
        sentences=(f"{size(report.nbytes_read)} read.",),
        remarks=(("Settings that differ", settings, "warning"),),
        colors=_COLORS,
        boxes=treemap(rows, max),
        columns=COLUMNS,
        rows=rows,
    )
    if a is None:
        return page
    numbers = {one.a_name: number for number, one in enumerate(tensors)}
    row_of = tuple(numbers.get(one.name, -1) for one in a.tensors)

    def color_of(_: Piece, colors: Sequence[int]) -> int:
        return max((one for one in colors if one != _NOT_COMPARED), default=_NOT_COMPARED)

    colors = [_NOT_COMPARED if row < 0 else rows[row].color for row in row_of]
    return replace(page, strips=draw_strips(strips(a), colors, color_of), row_of=row_of)


def _drawn_nbytes(tensor: TensorDiff) -> int:
    dtype, is_state = tensor.a_dtype or tensor.b_dtype, " (" in tensor.name
    return 0 if dtype is None or is_state else prod(tensor.shape) * dtype.itemsize


def _color(tensor: TensorDiff) -> int:
    values = tensor.values
    if tensor.outcome in (Outcome.EQUAL, Outcome.CAST_EQUAL):
        return _EQUAL if tensor.outcome is Outcome.EQUAL else _ROUNDED
    if values is None:
        return _ONE_SIDE
    is_special = values.nan_in_one or values.inf_in_one or values.a_is_zero is not values.b_is_zero
    if tensor.outcome is Outcome.SHAPE or is_special or values.relative_norm is None:
        return _SPECIAL
    return _CHANGED + sum(values.relative_norm > limit for limit in _LIMITS)
