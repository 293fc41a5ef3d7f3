"""How two models differ, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from zexport.diff.tensor import Outcome, TensorDiff
from zexport.diff.verdict import share, words
from zexport.report.text import Console, print_facts, print_line, print_rest, print_table, wrapped
from zexport.storage.json import JsonObject, form_of

if TYPE_CHECKING:
    from zexport.diff.diff import DiffReport, ModuleDiff
    from zexport.diff.tensor import PairValues

_ROWS_SHOWN = 10
_WIDTH = 80
_MODULES_MIN = 2


def diff_json(report: DiffReport, *, every: bool = False) -> JsonObject:
    """The report as one JSON object; equal tensors are listed only where ``every`` is asked for."""
    listed = (t for t in report.tensors if every or t.outcome is not Outcome.EQUAL)
    return form_of(replace(report, tensors=tuple(listed)))


def print_diff(console: Console, report: DiffReport, *, every: bool = False) -> None:
    """The report for people: what is seen, the worst tensors (or every one), and the answer."""
    sides = (("A", str(report.a)), ("B", str(report.b)), ("Compared", report.compared))
    print_facts(console, sides)
    counted = Counter(map(words, report.tensors))
    rows = [(said, f"{count:,}") for said, count in counted.items()]
    print_table(console, ("What is seen", ">Tensors"), rows)
    listed = [t for t in report.tensors if every or not t.is_alike]
    shown = listed if every else listed[:_ROWS_SHOWN]
    if shown:
        print_line(console)
    for tensor in shown:
        print_line(console, f"  {_name(tensor)}")
        told = ", ".join(_facts(tensor))
        for line in wrapped(told, _WIDTH, " " * 4, " " * 4):
            print_line(console, line)
    print_rest(console, len(listed) - len(shown), "--all")
    _print_modules(console, report, every=every)
    settings = [(one.about, one.a, one.b) for one in report.settings]
    if settings:
        set_otherwise = settings if every else settings[:_ROWS_SHOWN]
        print_table(console, ("Set otherwise", "A", "B"), set_otherwise)
    print_line(console)
    for line in wrapped(f"{report.verdict.sentence}.", _WIDTH):
        print_line(console, line, "bold")


def _print_modules(console: Console, report: DiffReport, *, every: bool) -> None:
    """How far each module moved, where that says more than the tensors do."""
    moved = [one for one in report.modules if one.unequal]
    if len(moved) < _MODULES_MIN or all(one.tensors == 1 for one in moved):
        return
    shown = moved if every else moved[:_ROWS_SHOWN]
    rows = [(one.name, f"{one.unequal:,} of {one.tensors:,}", apart(one)) for one in shown]
    print_table(console, ("Module", ">Differ", ">Apart by"), rows)
    print_rest(console, len(moved) - len(shown), "--all")


def apart(one: ModuleDiff | PairValues) -> str:
    """How far two sides are apart, in parts of their norm."""
    return "" if one.relative_norm is None else share(one.relative_norm)


def _name(tensor: TensorDiff) -> str:
    if tensor.a_name and tensor.b_name and tensor.a_name != tensor.b_name:
        return f"{tensor.a_name} (B: {tensor.b_name})"
    return tensor.name


def _facts(tensor: TensorDiff) -> Iterator[str]:
    """What is seen of a tensor, and the figures."""
    yield words(tensor)
    sides = ((tensor.a_dtype, tensor.a_shape), (tensor.b_dtype, tensor.b_shape))
    told = [f"{d.value} {list(s)}" for d, s in sides if d is not None and s is not None]
    if len(set(told)) > 1 or None in (tensor.a_name, tensor.b_name):
        yield " and ".join(told)
    if tensor.values is not None and tensor.values.unequal:
        if tensor.values.relative_norm:
            yield f"apart by {apart(tensor.values)} of its norm"
        yield from figures(tensor.values)


def figures(values: PairValues) -> Iterator[str]:
    """What is counted and measured of values that differ, beside how far they are apart."""
    gaps = ((values.nan_in_one, "NaN on one side"), (values.inf_in_one, "Inf on one side"))
    yield from (f"{count:,} {said}" for count, said in gaps if count)
    if values.max_abs and values.worst_at is not None:
        yield f"at most {values.max_abs:.3g} at [{','.join(map(str, values.worst_at))}]"
    if values.cosine is not None:
        yield f"cosine {values.cosine:.3g}"
