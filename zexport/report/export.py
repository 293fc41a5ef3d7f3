"""What an export did and what a verification found, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zexport.printable import some
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
    from zexport.run.execute import ExportReport
    from zexport.run.verify import Problem, VerifyReport

_PROBLEMS_SHOWN = 20
_VERIFIED = {
    "readback": "every file was read again and compared",
    "disk": "every file was read again from the disk and compared",
    "none": "the files were not read again",
}


def print_export(console: Console, report: ExportReport) -> None:
    """The report for people."""
    speed = report.nbytes_written / max(report.seconds, 1e-9)
    print_line(console, f"Exported to {report.out_dir}", "bold green")
    print_facts(
        console,
        (
            ("Tensors", f"{report.tensors:,}"),
            ("Files", f"{len(report.files):,}: {some(report.files, 4)}"),
            ("Resumed", f"{len(report.resumed):,}, compared again" if report.resumed else ""),
            ("Read", size(report.nbytes_read)),
            ("Written", f"{size(report.nbytes_written)}"),
            ("Time", f"{duration(report.seconds)} ({size(round(speed))}/s)"),
            ("Verified", _VERIFIED[report.verified.value]),
        ),
    )
    print_list(
        console,
        "Findings (exported as it is)",
        finding_lines(report.findings),
        "bold yellow",
    )
    print_list(console, "Warnings", report.warnings, "bold yellow")


def print_verify(console: Console, report: VerifyReport) -> None:
    """The report for people: one line of verdict, and a line for each problem."""
    looked_at = f"{plural(report.files, 'file')}, {plural(report.tensors, 'tensor')}"
    against = " and made again from the checkpoint" if report.against_checkpoint else ""
    if report.ok:
        print_line(console, f"{report.out_dir}: whole ({looked_at} compared{against})", "green")
        return
    count = plural(len(report.problems), "problem")
    print_line(console, f"{report.out_dir}: {count} ({looked_at} compared{against})", "bold red")
    print_table(
        console,
        ("File", "Tensor", "Problem"),
        (_problem_row(problem) for problem in report.problems[:_PROBLEMS_SHOWN]),
    )
    if len(report.problems) > _PROBLEMS_SHOWN:
        more = len(report.problems) - _PROBLEMS_SHOWN
        print_line(console, f"  and {more:,} more; --json lists all of them")


def _problem_row(problem: Problem) -> tuple[str, str, str]:
    return problem.file, problem.tensor, problem.problem
