"""Plan or run an export or resharding, and print the result."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct
from msgspec.structs import replace

from zexport.cli.options import (
    PATH,
    F,
    json_option,
    links_option,
    progress_option,
    quiet_option,
    storage_option,
    together,
)
from zexport.cli.output import print_result
from zexport.cli.parts import part_option, ray_option
from zexport.errors import UsageError
from zexport.options import ExportOptions, ReshardOptions, Share
from zexport.storage.files import is_local

if TYPE_CHECKING:
    from zexport.export.plan import ExportPlan
    from zexport.export.report import ExportReport, PartReport
    from zexport.report.text import Console
    from zexport.storage.json import Json

_M_MMAP_THRESHOLD, _LARGE_NBYTES = -3, 2 << 20

output_option = click.option(
    "-o", "--output", type=PATH, metavar="OUT", help="Output folder, instead of the last argument."
)


def run_options(overwrite: str) -> Callable[[F], F]:
    """Return the options of commands that write a folder; ``overwrite`` is that option's help."""
    return together(
        links_option,
        storage_option,
        part_option,
        ray_option,
        click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
        click.option("--overwrite", is_flag=True, help=overwrite),
        json_option,
        progress_option,
        quiet_option,
    )


class RunOptions(Struct, frozen=True):
    """Options that say how to run, not what to write."""

    tag: str | None
    follow_symlinks: bool
    verify: str
    part: Share | None
    ray: str | None
    dry_run: bool
    json: bool
    progress: str
    quiet: bool

    @classmethod
    def pop(cls, values: dict[str, Any]) -> RunOptions:
        """Return these options, and remove them from all values."""
        return cls(**{name: values.pop(name) for name in cls.__struct_fields__})


def run(
    ckpts: tuple[Path, ...],
    out: Path,
    options: ExportOptions | ReshardOptions,
    how: RunOptions,
    *,
    then: Callable[[], None] | None = None,
    confirm: Callable[[], object] | None = None,
) -> None:
    """Plan an export or resharding; print the plan, or run it and print the report.

    ``confirm`` is called before the folder is published, ``then`` after it.
    """
    from zexport.api.export import export_by_ray, plan_folder, shared_job
    from zexport.checkpoint.open import open_checkpoint
    from zexport.cli.progress import progress_printer
    from zexport.export.report import ExportReport, VerifyMode
    from zexport.export.run import export_part, run_export

    _free_memory_early()
    if options.overwrite and not (how.quiet or how.dry_run or is_local(out)):
        click.echo(f"Deleting {out} before writing; this cannot be undone.", err=True)
    start = time.monotonic()
    where: dict[str, Any] = {"tag": how.tag, "follow_symlinks": how.follow_symlinks}
    with progress_printer(how.progress, quiet=how.quiet) as on_progress:
        what: dict[str, Any] = {"verify": VerifyMode(how.verify), "progress": on_progress}
        done: ExportReport | PartReport
        if how.ray is not None and not how.dry_run:
            if how.part is not None:
                raise UsageError("--ray writes all parts, --part only one", hint="Leave one out")
            plan, done = export_by_ray(how.ray, ckpts, out, options, **what, **where)
        elif how.part is not None and not how.dry_run:
            job = shared_job(ckpts, out, options, parts=how.part.count, **what, **where)
            plan, done = job.plan, export_part(job, how.part)
        else:
            # The plan replaces the opened checkpoint: 80 MB of 100,000 tensors.
            opened = [open_checkpoint(ckpts, **where)]
            plan = plan_folder(opened.pop(), out, options)
            if how.dry_run:
                _print_plan(plan, how)
                return
            done = run_export(plan, confirm=confirm, **what)
    if then is not None:
        then()
    done = replace(done, seconds=time.monotonic() - start)
    provenance = plan.provenance if isinstance(done, ExportReport) else {}
    print_report(done, provenance, as_json=how.json, quiet=how.quiet, target=_target(plan))


def print_report(
    done: ExportReport | PartReport,
    provenance: Mapping[str, Json],
    *,
    as_json: bool,
    quiet: bool,
    target: str = "",
) -> None:
    """Print a report: as JSON with its ``provenance``, as text, or only its warnings."""
    from zexport.export.report import ExportReport
    from zexport.report.export import print_export, print_part, print_warnings
    from zexport.report.text import Console
    from zexport.storage.json import form_of

    if quiet and not as_json:
        print_warnings(Console(sys.stderr), done)
        return

    def print_text(console: Console) -> None:
        if isinstance(done, ExportReport):
            print_export(console, done, target=target)
        else:
            print_part(console, done)

    print_result(lambda: form_of(done, provenance), print_text, as_json=as_json)


def split_paths(paths: tuple[Path, ...], output: Path | None) -> tuple[tuple[Path, ...], Path]:
    """Return the checkpoint's folders, and OUT: ``output``, or the last argument."""
    if not paths or (output is None and len(paths) == 1):
        hint = "'OUT'" if paths else "'CKPT'"
        context = click.get_current_context()
        raise click.MissingParameter(ctx=context, param_hint=hint, param_type="argument")
    if output is None:
        return paths[:-1], paths[-1]
    return paths, output


def _print_plan(plan: ExportPlan, how: RunOptions) -> None:
    from zexport.export.plan import summarize
    from zexport.report.export import print_plan
    from zexport.storage.json import form_of

    summary, sides = summarize(plan), plan.side_files
    print_result(
        lambda: form_of(summary, plan.provenance),
        lambda console: print_plan(console, summary, sides, quiet=how.quiet, target=_target(plan)),
        as_json=how.json,
    )


def _target(plan: ExportPlan) -> str:
    """Return the ranks that a resharded checkpoint is for; empty for an export."""
    if not plan.form.is_checkpoint:
        return ""
    from zexport.resharding.plan import recorded_settings

    return str(recorded_settings(plan.provenance))


def _free_memory_early() -> None:
    """Have glibc return large blocks to the system when they are freed.

    Otherwise it keeps 70 of 300 MB with 100,000 tensors. Source: glibc 2.36, ``malloc/malloc.c``
    (``mallopt``).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_NBYTES)
