"""``zexport finish``: publish an output whose parts are all written."""

from __future__ import annotations

from pathlib import Path

import click

from zexport.cli.options import PATH, json_option, progress_option, quiet_option, storage_option
from zexport.cli.run import print_report


@click.command(short_help="Publish an output whose parts are all written.")
@click.argument("out", type=PATH)
@storage_option
@json_option
@progress_option
@quiet_option
def finish(*, out: Path, json: bool, progress: str, quiet: bool) -> None:
    """Publish OUT, all of whose parts are written (`consolidate --part`, `reshard --part`).

    The last part does this itself, unless its process died.

    Example: zexport finish model
    """
    from zexport.cli.progress import progress_printer
    from zexport.export.run import finish_export

    with progress_printer(progress, quiet=quiet) as on_progress:
        done = finish_export(out, progress=on_progress)
    print_report(done, {}, as_json=json, quiet=quiet)
