"""``zexport inspect``: what is in a checkpoint, and can it be exported?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zexport.cli.options import (
    PATH,
    html_option,
    json_option,
    links_option,
    progress_options,
    storage_option,
    tag_option,
)
from zexport.cli.output import print_result, write_html
from zexport.errors import AmbiguousTagError, ZexportError

if TYPE_CHECKING:
    from zexport.inspect.summary import Inspection


@click.command(short_help="Show what is in a checkpoint and whether it can be exported.")
@click.argument("ckpts", type=PATH, nargs=-1, required=True, metavar="CKPT...")
@tag_option
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--files", is_flag=True, help="List every rank file.")
@click.option(
    "--stats",
    is_flag=True,
    help="Read the weights: norm, min, max, mean, NaN and Inf counts of each tensor.",
)
@click.option(
    "--fail",
    is_flag=True,
    help="Exit with the code that consolidate would, judged by metadata, and with --stats also by "
    "values.",
)
@html_option
@links_option
@storage_option
@json_option
@progress_options
def inspect(
    *,
    ckpts: tuple[Path, ...],
    tag: str | None,
    tensors: bool,
    files: bool,
    stats: bool,
    fail: bool,
    html: Path | None,
    follow_symlinks: bool,
    json: bool,
    progress: str,
    quiet: bool,
) -> None:
    """Show what is in the checkpoint CKPT, and whether it can be exported.

    CKPT is any level: a run's folder, checkpoint-N, the folder with `latest`, or global_stepN.
    Only metadata is read, unless --stats is given. The exit code is 0 even if it cannot be
    exported, unless --fail is given.

    Example: zexport inspect run/checkpoint-100 --tensors
    """
    from zexport.inspect.summary import inspect_checkpoint
    from zexport.report.inspect import print_inspection
    from zexport.report.json import inspection_json

    found = inspect_checkpoint(ckpts, tag=tag, follow_symlinks=follow_symlinks)
    statistics = None
    if stats and found.checkpoint is not None:
        from zexport.cli.progress import progress_printer
        from zexport.inspect.statistics import measure

        with progress_printer(progress, quiet=quiet) as on_progress:
            measured = measure(found.checkpoint, progress=on_progress)
        found, statistics = found.with_values(measured.problems), measured.tensors
    if html is not None:
        from zexport.report.html.inspect import inspection_page

        write_html(html, inspection_page(found, statistics))
    print_result(
        lambda: inspection_json(found, tensors=tensors, statistics=statistics),
        lambda console: print_inspection(
            console, found, tensors, files=files, statistics=statistics
        ),
        as_json=json,
    )
    if fail and (code := _exit_code(found)):
        click.get_current_context().exit(code)


def _exit_code(found: Inspection) -> int:
    """Return the exit code of an export with default options; print its error."""
    from zexport.api.export import plan_export

    if found.checkpoint is None:
        return AmbiguousTagError.exit_code
    try:
        plan_export(found.checkpoint, "model")
    except ZexportError as error:
        click.echo("Error: " + "\n".join(error.lines()), err=True)
        return error.exit_code
    return max((problem.exit_code for problem in found.problems), default=0)
