"""``zexport inspect``: what is in a checkpoint, is it whole, and what would an export give?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
from zexport.cli.streams import put_out
from zexport.errors import AmbiguousTagError, ZexportError

if TYPE_CHECKING:
    from zexport.inspect.inspect import Inspection
    from zexport.inspect.statistics import TensorStatistics


@click.command(short_help="Show what is in a checkpoint and whether it can be exported.")
@click.argument("ckpts", type=PATH, nargs=-1, required=True, metavar="CKPT...")
@tag_option
@click.option("--tensors", is_flag=True, help="A line for each tensor.")
@click.option("--files", is_flag=True, help="A line for each rank file.")
@click.option(
    "--stats", is_flag=True, help="Read the data too: norm, min, max, mean, NaN and Inf of tensors."
)
@click.option(
    "--fail",
    is_flag=True,
    help="End with the code that consolidate would end with, as far as metadata tells; with "
    "--stats as values tell, too.",
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
    """Show what is in the ZeRO checkpoint CKPT, whether it is whole, and what an export would give.

    Give CKPT at any level: a run's folder, checkpoint-N, the folder with `latest`, or global_stepN.
    Only metadata is read, unless --stats is given. The last lines say whether it can be exported.
    The exit code is 0 in either case; with --fail it is the one that zexport consolidate would end
    with, as far as what was read can tell.

    Example: zexport inspect run/checkpoint-100 --tensors
    """
    from zexport.inspect.inspect import inspect_checkpoint
    from zexport.report.inspect import print_inspection
    from zexport.report.inspect_json import inspection_json

    found = inspect_checkpoint(ckpts, tag=tag, follow_symlinks=follow_symlinks)
    if found.checkpoint is None:
        found = found.asked_with(
            _words({"--tensors": tensors, "--files": files, "--stats": stats}, html)
        )
    statistics = None
    if stats and found.checkpoint is not None:
        from zexport.cli.progress import progress_printer
        from zexport.inspect.statistics import measure

        with progress_printer(progress, quiet=quiet) as on_progress:
            measured = measure(found.checkpoint, progress=on_progress)
        found, statistics = found.with_problems(measured.problems), measured.tensors
    if html is not None:
        _write_page(html, found, statistics)
    put_out(
        lambda: inspection_json(found, tensors=tensors, statistics=statistics),
        lambda console: print_inspection(
            console, found, tensors, files=files, statistics=statistics
        ),
        as_json=json,
    )
    if fail and (code := _exit_code(found)):
        click.get_current_context().exit(code)


def _write_page(
    html: Path, found: Inspection, statistics: Sequence[TensorStatistics] | None
) -> None:
    from zexport.report.page.inspection import inspection_page
    from zexport.report.page.page import write_page

    write_page(html, inspection_page(found, statistics))


def _words(asked: Mapping[str, bool], html: Path | None) -> list[str]:
    """The options that were given, as they are typed."""
    words = [option for option, is_asked in asked.items() if is_asked]
    return words if html is None else [*words, "--html", str(html)]


def _exit_code(found: Inspection) -> int:
    """What an export that is asked for with nothing but the checkpoint would end with."""
    from zexport.api.export import plan_export
    from zexport.report.text import PlainConsole, print_list

    if found.checkpoint is None:
        return AmbiguousTagError.exit_code
    try:
        plan = plan_export(found.checkpoint, "model")
    except ZexportError as error:
        click.echo("Error: " + "\n".join(error.lines()), err=True)
        return error.exit_code
    told = {*found.checkpoint.newer, *found.checkpoint.warnings}
    warnings = [one for one in plan.warnings if one not in told]
    print_list(PlainConsole(sys.stderr), "Warnings of an export", warnings, is_first=True)
    return max((problem.exit_code for problem in found.problems), default=0)
