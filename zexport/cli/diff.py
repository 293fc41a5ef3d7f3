"""``zexport diff``: how two models or checkpoints differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zexport.cli.options import (
    PATH,
    html_option,
    jobs_option,
    json_option,
    progress_options,
    storage_option,
)
from zexport.cli.streams import put_out
from zexport.errors import VerificationError

if TYPE_CHECKING:
    from zexport.diff.diff import DiffReport


@click.command(short_help="Compare two models, such as an export and its base, tensor by tensor.")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--states",
    is_flag=True,
    help="Of two ZeRO checkpoints, compare masters and optimizer states also where a model lies "
    "beside them.",
)
@click.option("--all", is_flag=True, help="List every tensor, equal ones too.")
@click.option(
    "--fail-on",
    type=click.Choice(["none", "different", "not-cast-equal"], case_sensitive=False),
    default="none",
    show_default=True,
    help="End with exit code 7, not 0, if anything differs, or anything but rounding.",
)
@html_option
@jobs_option
@storage_option
@json_option
@progress_options
def diff(
    *,
    a: Path,
    b: Path,
    states: bool,
    all: bool,  # noqa: A002 - Click names it after the option
    fail_on: str,
    html: Path | None,
    jobs: int,
    json: bool,
    progress: str,
    quiet: bool,
) -> None:
    """Compare the weights of A and B.

    A and B are model folders, safetensors files, names in the hub's cache, or two ZeRO checkpoints
    of any stage and number of ranks. A tensor is equal, equal after rounding to a dtype, changed,
    of another shape, or only in A or B. To compare an export with its checkpoint, use zexport
    verify --against.

    Example: zexport diff model base
    """
    from zexport.cli.progress import progress_printer
    from zexport.diff.diff import diff_models
    from zexport.diff.states import are_checkpoints, diff_states
    from zexport.report.diff import diff_json, print_diff

    are_trainings = states or are_checkpoints(a, b)
    with progress_printer(progress, quiet=quiet) as on_progress:
        compare = diff_states if are_trainings else diff_models
        report = compare(a, b, jobs=jobs, progress=on_progress)
    if html is not None:
        _write_page(html, report, a if are_trainings else None)
    put_out(
        lambda: diff_json(report, every=all),
        lambda console: print_diff(console, report, every=all),
        as_json=json,
    )
    if _fails(report, fail_on):
        click.get_current_context().exit(VerificationError.exit_code)


def _write_page(html: Path, report: DiffReport, a: Path | None) -> None:
    from zexport.checkpoint.open import open_checkpoint
    from zexport.report.page.difference import diff_page
    from zexport.report.page.page import write_page

    write_page(html, diff_page(report, None if a is None else open_checkpoint(a)))


def _fails(report: DiffReport, fail_on: str) -> bool:
    from zexport.diff.verdict import Cause

    accepted = {"different": (Cause.NONE,), "not-cast-equal": (Cause.NONE, Cause.ROUNDING)}
    return fail_on != "none" and report.verdict.cause not in accepted[fail_on]
