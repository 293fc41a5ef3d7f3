"""What an export would do, what it did, and what a verification found, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from zexport.export.plan import WEIGHTS_ONLY
from zexport.report.text import (
    Console,
    duration,
    near,
    plural,
    print_facts,
    print_findings,
    print_line,
    print_list,
    print_rest,
    print_table,
    print_text,
    size,
)
from zexport.text import some

if TYPE_CHECKING:
    from zexport.export.plan import Form, Origin
    from zexport.export.report import ExportReport, PartReport
    from zexport.export.summary import PlanSummary
    from zexport.export.verify import VerifyReport

_SHARDS_SHOWN = 20
_SPEED_TOLD_NBYTES = 10**8
_PROBLEMS_SHOWN = 20
_NAMES_WIDTH = 66
_NAMES_MAX = 8
_VERIFIED = {
    "readback": "every file was read again and compared",
    "disk": "every file was read again from the disk and compared",
    "none": "the files were not read again",
}


def print_plan(
    console: Console,
    plan: PlanSummary,
    side_nbytes: Mapping[str, int],
    *,
    quiet: bool = False,
    what: str = "",
) -> None:
    """The plan for people; nothing has been written. ``what`` is made is said by ``form`` else."""
    _print_first(console, f"Plan for {near(plan.out_dir)} (nothing is written)", plan, "bold")
    reads = f"{size(plan.nbytes_to_read)} of {plural(len(plan.sources), 'file')}"
    seconds = duration(plan.seconds_at_1_gb_per_s)
    print_facts(
        console,
        (
            (_unit(plan.form), f"{plan.tensors:,}, {what or _form(plan.form)}"),
            ("Base", str(plan.base or "")),
            ("Reads", reads),
            ("Compared", _compared(plan)),
            ("Writes", size(plan.nbytes_to_write + sum(side_nbytes.values()))),
            ("Memory", f"up to {size(plan.memory_nbytes)} ({plural(plan.jobs, 'worker')})"),
            ("Time", f"about {seconds} if the disk does 1 GB/s"),
            ("Replaces", "the folder that is there" if plan.overwrite else ""),
        ),
    )
    rows = _file_rows(plan, side_nbytes)
    print_table(console, ("File", ">Size", f">{_unit(plan.form)}"), rows, "Files")
    print_findings(console, "Findings", plan.findings)
    print_list(console, "Warnings", plan.warnings, "bold yellow")
    print_list(console, "Notes", () if quiet else plan.notes)


def _print_first(
    console: Console, done: str, result: PlanSummary | ExportReport, style: str
) -> None:
    """The first line: what was made of which checkpoint, and whether nothing will load it."""
    only = f": {WEIGHTS_ONLY}" if result.form.weights_only else ""
    told = f"{done} from {_near(result.origin)}{only}"
    print_text(console, told, "bold yellow" if only else style, indent=2)


def _unit(form: Form) -> str:
    """What files hold: whole tensors, or what is cut for ranks."""
    return "Pieces" if form.is_checkpoint else "Tensors"


def _form(form: Form) -> str:
    if form.is_checkpoint:
        return "in files for other ranks"
    whose = {"hub": "the hub", "memory": "the module in memory", "peft": "peft"}
    return f"{' and '.join(form.dtypes)} under names of {whose[form.names]}".lstrip()


def _compared(plan: PlanSummary) -> str:
    """What the dry run itself has read of tensors, and why; empty where that is nothing."""
    if not isinstance(plan.nbytes_compared, int):
        return ""
    return f"read {size(plan.nbytes_compared)} to compare weights that the plan depends on"


def _file_rows(plan: PlanSummary, side_nbytes: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    for file in plan.files[:_SHARDS_SHOWN]:
        yield file.name, size(file.nbytes), f"{file.tensors:,}"
    hidden = plan.files[_SHARDS_SHOWN:]
    if hidden:
        yield f"and {len(hidden):,} more", size(sum(file.nbytes for file in hidden)), ""
    for name in plan.side_files:
        yield name, size(side_nbytes[name]), ""
    yield "zexport_manifest.json", "", ""


def print_export(console: Console, report: ExportReport, *, what: str = "") -> None:
    """The report for people. ``what`` was made is said by its form else."""
    left_out = len(report.left_out)
    done = "Resharded" if report.form.is_checkpoint else "Exported"
    speed = f" ({size(round(report.nbytes_written / max(report.seconds, 1e-9)))}/s)"
    if report.nbytes_written < _SPEED_TOLD_NBYTES:  # then it is mostly of other things than moving
        speed = ""
    _print_first(console, f"{done} to {near(report.out_dir)}", report, "bold green")
    print_facts(
        console,
        (
            (_unit(report.form), f"{report.tensors:,}, {what or _form(report.form)}"),
            ("Base", str(report.base or "")),
            ("Left out", f"{left_out:,}: {some(report.left_out, 8)}" if left_out else ""),
            ("Files", _listed(report.files)),
            ("Resumed", f"{len(report.resumed):,}, compared again" if report.resumed else ""),
            ("Read", size(report.nbytes_read)),
            ("Written", size(report.nbytes_written)),
            ("Time", f"{duration(report.seconds)}{speed}"),
            ("Verified", _VERIFIED[report.verified.value]),
        ),
    )
    print_warnings(console, report)
    print_list(console, "Notes", report.notes)


def _near(origin: Origin) -> Origin:
    """A checkpoint with its folder as it is typed from here."""
    return structs.replace(origin, folder=near(origin.folder))


def _listed(names: Sequence[str]) -> str:
    """How many files there are, and as many of their names as fit on a line."""
    told = [
        f"{len(names):,}: {some(names, count)}"
        for count in range(1, min(len(names), _NAMES_MAX) + 1)
    ]
    return next((one for one in reversed(told) if len(one) <= _NAMES_WIDTH), f"{len(names):,}")


def print_part(console: Console, report: PartReport) -> None:
    """What one of several workers did."""
    out, part = near(report.out_dir), f"part {report.part}/{report.parts}"
    origin, whole = _near(report.origin), f"{part.capitalize()} of {out}"
    if not (report.missing or report.nbytes_written):
        told = f"{out} is complete, and holds {part} as it would be written from {origin}"
        print_text(console, told, "bold green", indent=2)
        print_warnings(console, report)
        return
    print_text(console, f"{whole} is written from {origin}", "bold green", indent=2)
    missing = [f"{number}/{report.parts}" for number in report.missing]
    print_facts(
        console,
        (
            ("Written", size(report.nbytes_written)),
            ("Time", duration(report.seconds)),
            (
                "To come",
                f"{some(missing, 8)}; the last one publishes the folder" if missing else "",
            ),
            ("Published", "" if missing else "the folder is complete"),
        ),
    )
    print_warnings(console, report)


def print_warnings(
    console: Console, report: ExportReport | PartReport, *, alone: bool = False
) -> None:
    """What is to be known before the export is used, which nothing silences."""
    title = "Findings (exported as it is)"
    print_findings(console, title, report.findings, is_first=alone)
    is_first = alone and not report.findings
    print_list(console, "Warnings", report.warnings, "bold yellow", is_first=is_first)


def print_verify(console: Console, report: VerifyReport) -> None:
    """The report for people: one line of verdict, what it comes to, and a line for each problem."""
    found = f"whole ({_looked_at(report)})"
    if not report.ok:
        found = plural(len(report.problems), "problem")
    told = f"{near(report.out_dir)}: {found}{_of(report)}"
    print_text(console, told, "green" if report.ok else "bold red", indent=2)
    if report.conclusion:
        print_text(console, f"{report.conclusion}.", "bold", indent=2)
    if report.ok:
        _print_compared(console, report)
        return
    print_table(
        console,
        ("File", "Tensor", "Problem"),
        ((p.file, p.tensor, p.problem) for p in report.problems[:_PROBLEMS_SHOWN]),
    )
    print_rest(console, len(report.problems) - _PROBLEMS_SHOWN, "--json")
    print_line(console)
    _print_compared(console, report)


def _looked_at(report: VerifyReport) -> str:
    """How much was read and compared."""
    count = plural(report.tensors, "piece" if report.is_checkpoint else "tensor")
    against = " and made again from the checkpoint" if report.against_checkpoint else ""
    return f"{plural(report.files, 'file')}, {count} compared{against}"


def _of(report: VerifyReport) -> str:
    """The checkpoint that it was made from, and the one at hand where that is likely another."""
    origin, other = report.origin, report.compared_with
    if origin is None:
        return ""
    if other is None or other == origin:
        return f", of {_near(origin)}"
    return f"; made from {origin}, compared with {_near(other)}"


def _print_compared(console: Console, report: VerifyReport) -> None:
    """What was held against what, and which files are none of the export's."""
    alone = f"{some(report.by_manifest_alone, 8)}: with the manifest alone"
    looked_at = (("Looked at", "" if report.ok else _looked_at(report)),)
    compared = (
        (("Weights", "with the manifest and the checkpoint"), ("Not weights", alone))
        if report.against_checkpoint
        else (("Compared", "with the manifest alone; --against CKPT makes the weights again"),)
    )
    base = (("Base", str(report.base or "")),)
    print_facts(console, (*looked_at, *compared, *base) if report.files else ())
    print_list(console, "Warnings", report.warnings, "bold yellow")
    print_list(console, "Notes", report.notes)
