"""A plan as text and as JSON: what an export would read, write and need."""

from __future__ import annotations

from dataclasses import asdict
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
from zexport.store.json import JsonObject

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zexport.plan.plan import ExportPlan, FilePlan

_SCHEMA = 1
_ESTIMATE_BYTES_PER_SECOND = 1_000_000_000
_SHARDS_SHOWN = 20


def plan_json(plan: ExportPlan) -> JsonObject:
    """The plan as one JSON object; bytes and seconds are whole-job figures.

    Keys: ``schema``, ``out_dir``, ``files`` (``name``, ``nbytes``, ``tensors``), ``side_files``,
    ``sources`` (``path``, ``nbytes``), ``tensors``, ``nbytes_to_read``, ``nbytes_compared`` (where
    planning itself had to read tensors), ``nbytes_to_write``,
    ``memory_nbytes``, ``seconds_at_1_gb_per_s``, ``jobs``, ``overwrite``, ``findings``,
    ``warnings``, and those of the plan's provenance: ``checkpoint``, ``options``, ``loadable``,
    ``tied``, ``from_base``, ``accounting``, ``heads``, ``mended``.
    """
    from zexport.plan.memory import memory_nbytes  # noqa: PLC0415 - other reports do without

    return {
        "schema": _SCHEMA,
        "out_dir": str(plan.out_dir),
        "files": [
            {"name": shard.filename, "nbytes": shard.nbytes, "tensors": len(shard.tensors)}
            for shard in plan.shards
        ],
        "side_files": [file.filename for file in plan.side_files],
        "sources": [
            {"path": str(file.path), "nbytes": file.version.nbytes} for file in plan.sources
        ],
        "tensors": sum(len(shard.tensors) for shard in plan.shards),
        "nbytes_to_read": _nbytes_to_read(plan),
        "nbytes_to_write": _nbytes_to_write(plan),
        **({"nbytes_compared": plan.nbytes_compared} if plan.nbytes_compared else {}),
        "memory_nbytes": memory_nbytes(plan),
        "seconds_at_1_gb_per_s": _seconds(plan),
        "jobs": plan.jobs,
        "overwrite": plan.overwrite,
        "findings": [asdict(finding) for finding in plan.findings],
        "warnings": list(plan.warnings),
        **plan.provenance,
    }


def print_plan(console: Console, plan: ExportPlan) -> None:
    """The plan for people; nothing has been written."""
    from zexport.plan.memory import memory_nbytes  # noqa: PLC0415 - other reports do without

    tensors = sum(len(shard.tensors) for shard in plan.shards)
    print_line(console, f"Plan for {plan.out_dir} (nothing is written)", "bold")
    print_facts(
        console,
        (
            ("Tensors", f"{tensors:,}"),
            ("Reads", f"{size(_nbytes_to_read(plan))} of {plural(len(plan.sources), 'file')}"),
            ("Compared", _compared(plan)),
            ("Writes", size(_nbytes_to_write(plan))),
            ("Memory", f"up to {size(memory_nbytes(plan))} ({plural(plan.jobs, 'worker')})"),
            ("Time", f"about {duration(_seconds(plan))} if the disk does 1 GB/s"),
            ("Replaces", "the folder that is there" if plan.overwrite else ""),
        ),
    )
    print_table(console, ("File", ">Size", ">Tensors"), _file_rows(plan), "Files")
    print_list(console, "Findings", finding_lines(plan.findings), "bold yellow")
    print_list(console, "Warnings", plan.warnings, "bold yellow")


def _compared(plan: ExportPlan) -> str:
    """What this dry run itself has read of tensors, and why; empty where that is nothing."""
    if not plan.nbytes_compared:
        return ""
    return f"read {size(plan.nbytes_compared)} to compare weights that the plan depends on"


def _file_rows(plan: ExportPlan) -> Iterable[tuple[str, str, str]]:
    for shard in plan.shards[:_SHARDS_SHOWN]:
        yield _row(shard)
    hidden = plan.shards[_SHARDS_SHOWN:]
    if hidden:
        yield f"and {len(hidden):,} more", size(sum(shard.nbytes for shard in hidden)), ""
    for file in plan.side_files:
        nbytes = len(file.content or b"") if file.origin is None else file.origin.stat().st_size
        yield file.filename, size(nbytes), ""
    yield "zexport_manifest.json", "", ""


def _row(shard: FilePlan) -> tuple[str, str, str]:
    return shard.filename, size(shard.nbytes), f"{len(shard.tensors):,}"


def _nbytes_to_read(plan: ExportPlan) -> int:
    return sum(tensor.source.nbytes for shard in plan.shards for tensor in shard.tensors)


def _nbytes_to_write(plan: ExportPlan) -> int:
    return sum(shard.nbytes for shard in plan.shards)


def _seconds(plan: ExportPlan) -> float:
    """Reading and writing one after the other; the real job overlaps them."""
    return (_nbytes_to_read(plan) + _nbytes_to_write(plan)) / _ESTIMATE_BYTES_PER_SECOND
