"""``zexport finish``: publish what several parts have written."""

from __future__ import annotations

from pathlib import Path

import click

from zexport.cli.making import quiet_option, tell
from zexport.cli.options import PATH, json_option, progress_option, storage_option


@click.command(short_help="Publish what several parts have written.")
@click.argument("out", type=PATH)
@storage_option
@json_option
@progress_option
@quiet_option
def finish(*, out: Path, json: bool, progress: str, quiet: bool) -> None:
    """Complete OUT, all of whose parts are written (`consolidate --part`, `reshard --part`).

    Whoever writes the last part does this. It is needed where that process died before it was done.

    Example: zexport finish model
    """
    from zexport.api.export import finish_export
    from zexport.cli.progress import progress_printer

    with progress_printer(progress, quiet=quiet) as on_progress:
        done = finish_export(out, progress=on_progress)
    tell(done, {}, as_json=json, quiet=quiet)
