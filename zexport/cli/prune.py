"""``zexport prune``: remove the optimizer states of an exported checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zexport.cli.options import (
    PATH,
    check_option,
    given_options,
    json_option,
    progress_options,
    tag_option,
)
from zexport.cli.output import print_result


@click.command(short_help="Remove the optimizer states of an exported checkpoint.")
@click.argument("ckpts", metavar="CKPT...", type=PATH, nargs=-1, required=True)
@click.option("--export", type=PATH, metavar="OUT", required=True, help="Export of the checkpoint.")
@click.option(
    "--even-newest",
    is_flag=True,
    allow_from_autoenv=False,
    help="Prune CKPT even if training would resume from it.",
)
@click.option("--dry-run", is_flag=True, help="Compare OUT, print what would be freed, and exit.")
@tag_option
@given_options
@check_option
@json_option
@progress_options
def prune(
    *,
    ckpts: tuple[Path, ...],
    export: Path,
    json: bool,
    progress: str,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Remove the optimizer states (about two thirds) of the checkpoint CKPT.

    Every tensor of OUT is compared with CKPT first. The fp32 master weights stay, and the folder,
    then pruned-checkpoint-N, exports as before. Refuses a checkpoint that training would resume
    from: the newest of its model, the best, or the one that `latest` names. Pass several CKPT if
    each node has a part.

    Example: zexport prune run/checkpoint-100 --export models/checkpoint-100
    """
    from zexport.cli.progress import progress_printer
    from zexport.monitor import prune as monitor
    from zexport.report.monitor import print_prune

    with progress_printer(progress, quiet=quiet) as on_progress:
        done = monitor.prune(ckpts, export, progress=on_progress, **chosen)
    if json or not quiet:
        print_result(done.to_json, lambda console: print_prune(console, done), as_json=json)
