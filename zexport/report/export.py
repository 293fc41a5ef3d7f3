"""Plans, exports, parts and verifications as text."""

from __future__ import annotations

from collections.abc import Sequence
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
    from zexport.export.plan import Form, Origin, PlanSummary, SideFile
    from zexport.export.report import ExportReport, PartReport
    from zexport.export.verify import VerifyReport

_SHARDS_SHOWN = 20
_SPEED_NBYTES_MIN = 10**8
"""A smaller export spends its time elsewhere than on reading and writing."""
_VERIFIED = {
    "readback": "every file was reread and compared",
    "disk": "every file was reread from disk and compared",
    "none": "files were not reread",
}
_NAMES = {"hub": "Hub", "memory": "in-memory", "peft": "PEFT"}


def print_plan(
    console: Console,
    plan: PlanSummary,
    sides: Sequence[SideFile],
    *,
    quiet: bool = False,
    target: str = "",
) -> None:
    """Print a plan; ``target`` describes the ranks of a resharded checkpoint."""
    _print_title(console, f"Plan for {near(plan.out_dir)} (nothing is written)", plan, "bold")
    unit = _unit(plan.form)
    compared = plan.nbytes_compared
    print_facts(
        console,
        (
            (unit, f"{plan.tensors:,}, {target or _form(plan.form)}"),
            ("Base model", str(plan.base or "")),
            ("Reads", f"{size(plan.nbytes_to_read)} of {plural(len(plan.sources), 'file')}"),
            ("Compared", f"{size(compared)} read to compare weights" if compared else ""),
            ("Writes", size(plan.nbytes_to_write + sum(one.nbytes for one in sides))),
            ("Memory", f"up to {size(plan.memory_nbytes)} ({plural(plan.jobs, 'worker')})"),
            ("Time", f"about {duration(plan.seconds_at_1_gb_per_s)} at 1 GB/s"),
            ("Replaces", "the existing folder" if plan.overwrite else ""),
        ),
    )
    rows = [(f.name, size(f.nbytes), f"{f.tensors:,}") for f in plan.files[:_SHARDS_SHOWN]]
    rows += [(one.filename, size(one.nbytes), "") for one in sides]
    rows.append(("zexport_manifest.json", "", ""))
    print_table(console, ("File", ">Size", f">{unit}"), rows, "Files")
    print_rest(console, len(plan.files) - _SHARDS_SHOWN, "--json", "more shards")
    print_findings(console, "Findings", plan.findings)
    print_list(console, "Warnings", plan.warnings, "bold yellow")
    print_list(console, "Notes", () if quiet else plan.notes)


def print_export(console: Console, report: ExportReport, *, target: str = "") -> None:
    """Print the report of an export or resharding; ``target`` as for ``print_plan``."""
    done = "Resharded" if report.form.is_checkpoint else "Exported"
    speed, left_out = "", ""
    if report.nbytes_written >= _SPEED_NBYTES_MIN:
        speed = f" ({size(round(report.nbytes_written / max(report.seconds, 1e-9)))}/s)"
    if report.left_out:
        left_out = f"{len(report.left_out):,}: {some(report.left_out, 8)}"
    _print_title(console, f"{done} to {near(report.out_dir)}", report, "bold green")
    print_facts(
        console,
        (
            (_unit(report.form), f"{report.tensors:,}, {target or _form(report.form)}"),
            ("Base model", str(report.base or "")),
            ("Left out", left_out),
            ("Files", f"{len(report.files):,}: {some(report.files, 3)}"),
            ("Resumed", f"{len(report.resumed):,} files" if report.resumed else ""),
            ("Read", size(report.nbytes_read)),
            ("Written", size(report.nbytes_written)),
            ("Time", f"{duration(report.seconds)}{speed}"),
            ("Verified", _VERIFIED[report.verified.value]),
        ),
    )
    print_warnings(console, report)
    print_list(console, "Notes", report.notes)


def print_part(console: Console, report: PartReport) -> None:
    out, part = near(report.out_dir), f"part {report.part}/{report.parts}"
    origin = _near(report.origin)
    is_written = report.missing or report.nbytes_written
    title = f"{out} is complete; its {part} is the one of {origin}"
    if is_written:
        title = f"{part.capitalize()} of {out} written from {origin}"
    print_text(console, title, "bold green", indent=2)
    if is_written:
        missing = [f"{number}/{report.parts}" for number in report.missing]
        state = f"missing {some(missing, 8)}; the last part publishes the folder"
        print_facts(
            console,
            (
                ("Written", size(report.nbytes_written)),
                ("Time", duration(report.seconds)),
                ("Folder", state if missing else "complete and published"),
            ),
        )
    print_warnings(console, report)


def print_warnings(console: Console, report: ExportReport | PartReport) -> None:
    """Print findings and warnings, also with ``--quiet``."""
    print_findings(console, "Findings (exported as they are)", report.findings)
    print_list(console, "Warnings", report.warnings, "bold yellow")


def print_verify(console: Console, report: VerifyReport) -> None:
    count = plural(report.tensors, "piece" if report.is_checkpoint else "tensor")
    compared = f"{plural(report.files, 'file')}, {count} compared"
    if report.against_checkpoint:
        compared += " and recomputed from the checkpoint"
    found = f"intact ({compared})" if report.ok else plural(len(report.problems), "problem")
    if report.origin is not None:
        found += f", exported from {_near(report.origin)}"
    if report.compared_with not in (None, report.origin):
        found += f", compared with {_near(report.compared_with)}"
    title = f"{near(report.out_dir)}: {found}"
    print_text(console, title, "green" if report.ok else "bold red", indent=2)
    if report.conclusion:
        print_text(console, f"{report.conclusion}.", "bold", indent=2)
    if not report.ok:
        shown = report.problems[:20]
        rows = [(one.file, one.tensor, one.problem) for one in shown]
        print_table(console, ("File", "Tensor", "Problem"), rows)
        print_rest(console, len(report.problems) - len(shown), "--json")
        print_line(console)
    if report.files:
        if report.against_checkpoint:
            only = f"{some(report.by_manifest_alone, 8)}: with the manifest only"
            how = [("Weights", "with manifest and checkpoint"), ("Other files", only)]
        else:
            how = [("Compared", "with the manifest; --against CKPT also recomputes all weights")]
        read = ("Read", "" if report.ok else compared)
        print_facts(console, (read, *how, ("Base model", str(report.base or ""))))
    print_list(console, "Warnings", report.warnings, "bold yellow")
    print_list(console, "Notes", report.notes)


def _print_title(
    console: Console, done: str, result: PlanSummary | ExportReport, style: str
) -> None:
    only = f": {WEIGHTS_ONLY}" if result.form.weights_only else ""
    text = f"{done} from {_near(result.origin)}{only}"
    print_text(console, text, "bold yellow" if only else style, indent=2)


def _near(origin: Origin) -> Origin:
    return structs.replace(origin, folder=near(origin.folder))


def _unit(form: Form) -> str:
    """Return what the files contain: tensors, or pieces of them for each rank."""
    return "Pieces" if form.is_checkpoint else "Tensors"


def _form(form: Form) -> str:
    if form.is_checkpoint:
        return "in files of other ranks"
    return f"{' and '.join(form.dtypes)} with {_NAMES[form.names]} names".lstrip()
