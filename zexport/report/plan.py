"""A plan in words: what an export would read, write and need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from zexport.report.findings import finding_lines
from zexport.report.text import (
    Console,
    duration,
    plural,
    print_facts,
    print_line,
    print_list,
    print_table,
    size,
)

if TYPE_CHECKING:
    from zexport.plan.summary import PlanSummary

_SHARDS_SHOWN = 20


def print_plan(console: Console, plan: PlanSummary, side_nbytes: Mapping[str, int]) -> None:
    """The plan for people; nothing has been written."""
    print_line(console, f"Plan for {plan.out_dir} (nothing is written)", "bold")
    reads = f"{size(plan.nbytes_to_read)} of {plural(len(plan.sources), 'file')}"
    seconds = duration(plan.seconds_at_1_gb_per_s)
    print_facts(
        console,
        (
            ("Tensors", f"{plan.tensors:,}"),
            ("Reads", reads),
            ("Compared", _compared(plan)),
            ("Writes", size(plan.nbytes_to_write)),
            ("Memory", f"up to {size(plan.memory_nbytes)} ({plural(plan.jobs, 'worker')})"),
            ("Time", f"about {seconds} if the disk does 1 GB/s"),
            ("Replaces", "the folder that is there" if plan.overwrite else ""),
        ),
    )
    rows = _file_rows(plan, side_nbytes)
    print_table(console, ("File", ">Size", ">Tensors"), rows, "Files")
    print_list(console, "Findings", finding_lines(plan.findings), "bold yellow")
    print_list(console, "Warnings", plan.warnings, "bold yellow")


def _compared(plan: PlanSummary) -> str:
    """What the dry run itself has read of tensors, and why; empty where that is nothing."""
    if not isinstance(plan.nbytes_compared, int):
        return ""
    return f"read {size(plan.nbytes_compared)} to compare weights that the plan depends on"


def _file_rows(plan: PlanSummary, side_nbytes: Mapping[str, int]) -> Iterable[tuple[str, str, str]]:
    for file in plan.files[:_SHARDS_SHOWN]:
        yield file.name, size(file.nbytes), f"{file.tensors:,}"
    hidden = plan.files[_SHARDS_SHOWN:]
    if hidden:
        yield f"and {len(hidden):,} more", size(sum(file.nbytes for file in hidden)), ""
    for name in plan.side_files:
        yield name, size(side_nbytes[name]), ""
    yield "zexport_manifest.json", "", ""
