"""The result of ``zexport diff``, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from math import prod

from msgspec.structs import replace

from zexport.diff.folders import DiffReport, ModuleDiff
from zexport.diff.tensors import Outcome, PairValues, TensorDiff
from zexport.report.text import Console, plural, print_facts, print_line, print_rest, print_table
from zexport.storage.json import JsonObject, form_of

SCHEMA = 3
"""Version of the JSON; increased when a key changes or is removed."""

COLUMNS = ("Result", ">Relative difference", "Type", "Shape", "Details")
_ROWS_SHOWN = 10
_LABELS = {
    Outcome.EQUAL: "equal",
    Outcome.SHAPE: "other shape",
    Outcome.ONLY_IN_A: "only in A",
    Outcome.ONLY_IN_B: "only in B",
}


def diff_json(report: DiffReport, *, every: bool = False) -> JsonObject:
    """Return the report as JSON; equal tensors are listed only if ``every`` is true."""
    listed = (one for one in report.tensors if every or one.outcome is not Outcome.EQUAL)
    return form_of(replace(report, tensors=tuple(listed))) | {"schema": SCHEMA}


def print_diff(console: Console, report: DiffReport, *, every: bool = False) -> None:
    """Print the tensors and modules that differ most, settings, and a summary."""
    print_facts(console, facts(report))
    alike = () if every else (Outcome.EQUAL, Outcome.CAST_EQUAL)
    tensors = [(names(one), *cells(one)) for one in report.tensors if one.outcome not in alike]
    modules = [
        (one.name, f"{one.unequal:,} of {one.tensors:,}", relative(one))
        for one in report.modules
        if one.unequal
    ]
    settings = [(one.about, one.a, one.b) for one in report.settings]
    for columns, rows in (
        (("Tensor", *COLUMNS), tensors),
        (("Module", ">Not equal", ">Relative difference"), modules if len(modules) > 1 else []),
        (("Setting", "A", "B"), settings),
    ):
        shown = rows if every else rows[:_ROWS_SHOWN]
        if shown:
            print_table(console, columns, shown)
            print_rest(console, len(rows) - len(shown), "--all")
    print_line(console)
    print_line(console, f"{summary(report)}.", "bold")


def facts(report: DiffReport) -> tuple[tuple[str, str], ...]:
    """Return what was compared, and the number of tensors by result."""
    counts = Counter(map(label, report.tensors))
    return (
        ("A", str(report.a)),
        ("B", str(report.b)),
        ("Compared", report.compared),
        *(
            (words[0].upper() + words[1:], plural(count, "tensor"))
            for words, count in counts.items()
        ),
    )


def summary(report: DiffReport) -> str:
    """Return the result in one sentence, without a full stop."""
    total, counts = len(report.tensors), report.counts
    if report.is_equal:
        return f"No difference in {plural(total, 'tensor')}"
    if total and counts.only_in_a + counts.only_in_b == total:
        return "No tensor name in common; merge an adapter before comparing it with a model"
    parts = [f"{total - counts.equal - counts.cast_equal:,} of {plural(total, 'tensor')} differ"]
    if counts.cast_equal:
        parts.append(f"{counts.cast_equal:,} equal after rounding")
    if report.settings:
        parts.append(plural(len(report.settings), "different setting"))
    return ", ".join(parts)


def label(tensor: TensorDiff) -> str:
    if tensor.outcome in _LABELS:
        return _LABELS[tensor.outcome]
    if (rounding := tensor.rounding) is not None:
        return f"equal after rounding {rounding.side.upper()} to {rounding.dtype.torch_name}"
    if (values := tensor.values) is not None:
        if values.nan_in_one or values.inf_in_one:
            return "NaN or Inf on one side only"
        if values.a_is_zero is not values.b_is_zero:
            return f"all zero in {'A' if values.a_is_zero else 'B'}"
    return "changed"


def names(tensor: TensorDiff) -> str:
    """Return the name, or both if tied weights have different names."""
    is_same = tensor.b_name in (None, tensor.name)
    return tensor.name if is_same else f"{tensor.name} (B: {tensor.b_name})"


def relative(one: ModuleDiff | PairValues) -> str:
    """Return the relative difference in percent; empty if it is unknown."""
    if one.relative_norm is None:
        return ""
    percent = 100 * one.relative_norm
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def cells(tensor: TensorDiff) -> tuple[str, ...]:
    values, details = tensor.values, []
    if values is not None and values.unequal:
        if values.nan_in_one:
            details.append(f"{values.nan_in_one:,} NaN on one side")
        if values.inf_in_one:
            details.append(f"{values.inf_in_one:,} Inf on one side")
        if values.max_abs and values.worst_at is not None:
            worst_at = ",".join(map(str, values.worst_at))
            details.append(f"maximum {values.max_abs:.3g} at [{worst_at}]")
        details.append(f"{values.unequal:,} of {prod(tensor.shape):,} differ")
    dtypes = (one.value for one in (tensor.a_dtype, tensor.b_dtype) if one is not None)
    shapes = (str([*one]) for one in (tensor.a_shape, tensor.b_shape) if one is not None)
    return (
        label(tensor),
        "" if values is None else relative(values),
        " and ".join(dict.fromkeys(dtypes)),
        " and ".join(dict.fromkeys(shapes)),
        ", ".join(details),
    )
