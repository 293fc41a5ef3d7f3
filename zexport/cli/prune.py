"""``zexport prune``: the optimizer's part of a checkpoint removed, once its export is proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zexport.cli.environment import typed_alone
from zexport.cli.options import (
    PATH,
    check_option,
    given_options,
    json_option,
    progress_options,
    tag_option,
)
from zexport.cli.streams import put_out
from zexport.errors import UsageError
from zexport.text import shell_word


@click.command(short_help="Remove the optimizer states of a checkpoint whose export is proved.")
@click.argument("ckpts", metavar="CKPT...", type=PATH, nargs=-1, required=True)
@click.option("--export", type=PATH, metavar="OUT", help="The export of it.  [required]")
@click.option(
    "--even-newest",
    is_flag=True,
    callback=typed_alone,
    help="Prune CKPT even if a training would resume from it.",
)
@click.option("--dry-run", is_flag=True, help="Prove OUT, say how much it is, and do nothing.")
@tag_option
@given_options
@check_option
@json_option
@progress_options
def prune(
    *,
    ckpts: tuple[Path, ...],
    export: Path | None,
    json: bool,
    progress: str,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Remove from the checkpoint CKPT what only a resume needs: about two thirds of it.

    The fp32 weights stay, and export as before. OUT is held against CKPT byte by byte first. The
    folder is called pruned-checkpoint-N then. A checkpoint that a training would resume from is
    refused: what `latest` names, the newest of its model, the best. Several CKPT are one checkpoint
    of which nodes kept their own parts.

    Example: zexport prune run/checkpoint-100 --export models/checkpoint-100
    """
    from zexport.cli.progress import progress_printer
    from zexport.monitor.prune import prune as beside
    from zexport.report.monitor import print_prune

    if export is None:
        *first, last = map(shell_word, ckpts)
        meant = " ".join((*first, "--export", last) if first else (last, "--export", "OUT"))
        raise UsageError("--export is missing", hint=f"Name the export: zexport prune {meant}")
    with progress_printer(progress, quiet=quiet) as on_progress:
        done = beside(ckpts, export, progress=on_progress, **chosen)
    if json or not quiet:
        put_out(done.to_json, lambda console: print_prune(console, done), as_json=json)
