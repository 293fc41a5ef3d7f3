"""``zexport consolidate``: a ZeRO checkpoint in, a Hugging Face model folder out."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zexport.cli.export_options import export_options, options_of
from zexport.cli.options import (
    PATH,
    json_option,
    links_option,
    missing_path,
    progress_options,
    storage_option,
    tag_option,
    verify_option,
)
from zexport.cli.part import part_option
from zexport.cli.streams import put_out
from zexport.printable import shell_word
from zexport.store.address import Address
from zexport.store.folders import exists

if TYPE_CHECKING:
    from zexport.plan.plan import ExportPlan
    from zexport.run.execute import ExportReport
    from zexport.run.parts import PartReport
    from zexport.run.shares import Share


@click.command(short_help="Turn a ZeRO checkpoint into a Hugging Face model folder.")
@click.argument("paths", type=PATH, nargs=-1, metavar="CKPT... OUT")
@click.option("-o", "--output", type=PATH, metavar="OUT", help="OUT, by name.")
@tag_option
@export_options
@verify_option
@click.option("--no-verify", is_flag=True, help="The same as --verify none.")
@links_option
@storage_option
@part_option
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace an export or a model at OUT, once the new one is complete.",
)
@json_option
@progress_options
def consolidate(
    *,
    paths: tuple[Path, ...],
    output: Path | None,
    tag: str | None,
    follow_symlinks: bool,
    verify: str,
    no_verify: bool,
    part: Share | None,
    dry_run: bool,
    json: bool,
    progress: str,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Turn the ZeRO checkpoint CKPT into the Hugging Face model folder OUT.

    Give CKPT at any level: a run's folder, checkpoint-N, the folder with `latest`, or global_stepN.
    Give several where nodes kept their own parts. OUT appears complete or not at all.

    Example: zexport consolidate run/checkpoint-100 model --dtype bf16
    """
    from zexport.api.export import plan_export, run_export
    from zexport.api.parts import Request, run_part
    from zexport.checkpoint.opening import open_checkpoint
    from zexport.cli.progress import progress_printer
    from zexport.run.execute import VerifyMode

    ckpts, out = _split(paths, output)
    mode = VerifyMode("none" if no_verify else verify)
    options = options_of(**chosen)
    if chosen["overwrite"] and isinstance(out, Address) and not (dry_run or quiet):
        told = f"What {out} holds is removed before the new model is written: this is not undone."
        click.echo(told, err=True)
    began = time.monotonic()
    with progress_printer(progress, quiet=quiet) as on_progress:
        # What the files say is let go once it is planned: of 100,000 tensors it takes 80 MB.
        plan = plan_export(
            open_checkpoint(ckpts, tag=tag, follow_symlinks=follow_symlinks), out, options
        )
        done: ExportReport | PartReport | None = None
        if part is not None and not dry_run:
            request = Request.of(ckpts, options, tag, follow=follow_symlinks)
            done = run_part(plan, part, request, verify=mode, progress=on_progress)
        elif not dry_run:
            done = run_export(plan, verify=mode, progress=on_progress)
    if done is None:
        _show(plan, as_json=json, quiet=quiet)
    else:
        _tell(replace(done, seconds=time.monotonic() - began), plan, as_json=json, quiet=quiet)


def _split(paths: tuple[Path, ...], output: Path | None) -> tuple[tuple[Path, ...], Path]:
    """The checkpoint's folders, and the one to make: the last, unless an option names it."""
    if not paths or (output is None and len(paths) == 1):
        first = "".join(map(shell_word, paths[:1]))
        raise missing_path(paths, f"zexport consolidate {first} model")
    if output is None:
        return paths[:-1], paths[-1]
    if len(paths) > 1 and not exists(paths[-1]):
        raise click.UsageError(
            f"OUT is given twice, as {str(paths[-1])!r} and with --output as {str(output)!r}."
        )
    return paths, output


def _show(plan: ExportPlan, *, as_json: bool, quiet: bool) -> None:
    from zexport.plan.summary import side_nbytes, summarize
    from zexport.report.export import print_plan
    from zexport.store.json import form_of

    summary = summarize(plan)
    put_out(
        lambda: form_of(summary, plan.provenance),
        lambda console: print_plan(console, summary, side_nbytes(plan), quiet=quiet),
        as_json=as_json,
    )


def _tell(done: ExportReport | PartReport, plan: ExportPlan, *, as_json: bool, quiet: bool) -> None:
    from zexport.report.export import print_export, print_part, print_warnings
    from zexport.report.text import PlainConsole
    from zexport.run.parts import PartReport
    from zexport.store.json import form_of

    if quiet and not as_json:
        print_warnings(PlainConsole(sys.stderr), done)
    elif isinstance(done, PartReport):
        put_out(done.to_json, lambda console: print_part(console, done), as_json=as_json)
    else:
        put_out(
            lambda: form_of(done, plan.provenance),
            lambda console: print_export(console, done),
            as_json=as_json,
        )
