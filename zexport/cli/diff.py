"""``zexport diff``: compare two models or checkpoints."""

from __future__ import annotations

from pathlib import Path

import click

from zexport.cli.options import (
    PATH,
    choice_option,
    html_option,
    jobs_option,
    json_option,
    progress_options,
    storage_option,
)
from zexport.cli.output import print_result, write_html
from zexport.errors import VerificationError


@click.command(short_help="Compare two models, such as an export and its base, tensor by tensor.")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--states",
    is_flag=True,
    help="Compare fp32 master weights and optimizer states of two ZeRO checkpoints, even if both "
    "folders also contain a model.",
)
@click.option("--all", is_flag=True, help="List all tensors, including equal ones.")
@choice_option(
    "--fail-on",
    ["none", "different", "not-cast-equal"],
    "Exit with 7 if anything differs (different), or more than rounding (not-cast-equal).",
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

    A and B are model folders, safetensors files, names in the Hub cache, or two checkpoints
    of any stage and world size. A tensor is equal, equal after rounding to a dtype, changed, of
    another shape, or only in A or B. To compare an export with its checkpoint, use zexport verify
    --against.

    Example: zexport diff model base
    """
    from zexport.cli.progress import progress_printer
    from zexport.diff.folders import diff_models
    from zexport.diff.states import are_checkpoints, diff_states
    from zexport.report.diff import diff_json, print_diff

    compares_states = states or are_checkpoints(a, b)
    with progress_printer(progress, quiet=quiet) as on_progress:
        compare = diff_states if compares_states else diff_models
        report = compare(a, b, jobs=jobs, progress=on_progress)
    if html is not None:
        from zexport.checkpoint.open import open_checkpoint
        from zexport.report.html.diff import diff_page

        write_html(html, diff_page(report, open_checkpoint(a) if compares_states else None))
    print_result(
        lambda: diff_json(report, every=all),
        lambda console: print_diff(console, report, every=all),
        as_json=json,
    )
    passes = {"none": True, "different": report.is_equal, "not-cast-equal": report.is_cast_equal}
    if not passes[fail_on]:
        click.get_current_context().exit(VerificationError.exit_code)
