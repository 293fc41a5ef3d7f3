"""How two models differ, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from zexport.compare.verdict import Outcome, TensorDiff
from zexport.report.text import Console, print_facts, print_line, print_table
from zexport.store.json import JsonObject, values_of

if TYPE_CHECKING:
    from zexport.compare.diff import DiffReport
    from zexport.compare.values import PairSums, Rounding

_SCHEMA = 1
_ROWS_SHOWN = 40
_WORDS = {
    Outcome.EQUAL: "equal",
    Outcome.CAST_EQUAL: "equal but for rounding",
    Outcome.DIFFERENT: "other values",
    Outcome.SHAPE: "other shape",
    Outcome.ONLY_IN_A: "only in A",
    Outcome.ONLY_IN_B: "only in B",
}


def diff_json(report: DiffReport, *, every: bool = False) -> JsonObject:
    """The report as one JSON object; equal tensors are listed only where ``every`` is asked for."""
    return {
        "schema": _SCHEMA,
        "a": str(report.a),
        "b": str(report.b),
        "verdict": values_of(report.verdict),
        "counts": {outcome.value: report.count(outcome) for outcome in Outcome},
        "nbytes_read": report.nbytes_read,
        "tensors": [
            _tensor_json(tensor)
            for tensor in report.tensors
            if every or tensor.outcome is not Outcome.EQUAL
        ],
    }


def print_diff(console: Console, report: DiffReport, *, every: bool = False) -> None:
    """The report for people: the counts, the worst tensors (or every one), and the answer."""
    print_facts(console, (("A", str(report.a)), ("B", str(report.b))))
    counted = ((outcome, report.count(outcome)) for outcome in Outcome)
    print_table(
        console,
        ("Tensors", ">Number"),
        [(_WORDS[outcome], f"{count:,}") for outcome, count in counted if count],
    )
    listed = [t for t in report.tensors if every or t.outcome is not Outcome.EQUAL]
    shown = listed if every else listed[:_ROWS_SHOWN]
    if shown:
        print_table(
            console,
            ("Tensor", "A", "B", "", ">max |A-B|", ">mean", ">relative", ">cosine"),
            map(_row, shown),
        )
    if len(shown) < len(listed):
        print_line(console, f"  and {len(listed) - len(shown):,} more; --all lists all of them")
    print_line(console)
    print_line(console, f"{report.verdict.sentence}.", "bold")


def _row(tensor: TensorDiff) -> tuple[str, ...]:
    name = tensor.name
    if tensor.a_name and tensor.b_name and tensor.a_name != tensor.b_name:
        name = f"{tensor.a_name} (B: {tensor.b_name})"
    a, b = _side(tensor, "a"), _side(tensor, "b")
    words = _WORDS[tensor.outcome]
    if tensor.rounding is not None:
        words = _rounded(tensor.rounding)
    sums = tensor.sums
    if sums is None:
        return name, a, b, words, "", "", "", ""
    figures = (sums.largest, sums.abs_mean, sums.relative_norm, sums.cosine)
    words = ", ".join((words, *_gaps(sums)))
    numbers = ("-" if value is None else f"{value:.3g}" for value in figures)
    return name, a, b, words, *numbers


def _side(tensor: TensorDiff, side: str) -> str:
    is_a = side == "a"
    dtype = tensor.a_dtype if is_a else tensor.b_dtype
    shape = tensor.a_shape if is_a else tensor.b_shape
    return "-" if dtype is None or shape is None else f"{dtype.value} {list(shape)}"


def _rounded(rounding: Rounding) -> str:
    other = "B" if rounding.side.value == "a" else "A"
    return f"{other} is {rounding.side.value.upper()} in {rounding.dtype.torch_name}"


def _gaps(sums: PairSums) -> Iterator[str]:
    parts = (
        (sums.nan_in_one, "NaN on one side"),
        (sums.inf_in_one, "Inf on one side"),
    )
    return (f"{count:,} {words}" for count, words in parts if count)


def _tensor_json(tensor: TensorDiff) -> JsonObject:
    sums = tensor.sums
    told = values_of(replace(tensor, sums=None))
    del told["sums"]  # told as what follows from them
    return told | {"values": None if sums is None else _values_json(sums, tensor.worst_at)}


def _values_json(sums: PairSums, worst_at: tuple[int, ...] | None) -> JsonObject:
    return {
        "unequal": sums.unequal,
        "max_abs": sums.largest,
        "mean_abs": sums.abs_mean,
        "relative_norm": sums.relative_norm,
        "cosine": sums.cosine,
        "worst_at": None if worst_at is None else list(worst_at),
        "a_nan": sums.a_nan,
        "b_nan": sums.b_nan,
        "nan_in_one": sums.nan_in_one,
        "inf_in_one": sums.inf_in_one,
    }
