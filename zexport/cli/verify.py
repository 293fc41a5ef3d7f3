"""``zexport verify``: compare an export with its manifest and its checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from zexport.cli.options import (
    PATH,
    check_option,
    given_options,
    json_option,
    links_option,
    progress_options,
    storage_option,
)
from zexport.cli.output import print_result
from zexport.errors import VerificationError
from zexport.options import CheckMode


@click.command(short_help="Compare an export with its manifest and its checkpoint.")
@click.argument("out", type=PATH)
@click.option(
    "--against",
    type=PATH,
    multiple=True,
    metavar="CKPT",
    help="Recompute every tensor from this checkpoint and compare. Repeatable, if each node kept "
    "its own rank files.",
)
@given_options
@check_option
@links_option
@storage_option
@json_option
@progress_options
def verify(
    *,
    out: Path,
    against: tuple[Path, ...],
    base: Path | None,
    adapter_config: Path | None,
    check: CheckMode,
    follow_symlinks: bool,
    json: bool,
    progress: str,
    quiet: bool,
) -> None:
    """Compare the files of OUT with its manifest; files added since are ignored.

    Example: zexport verify model --against run/checkpoint-100
    """
    from zexport.api.verify import verify_export
    from zexport.cli.progress import progress_printer
    from zexport.report.export import print_verify

    with progress_printer(progress, quiet=quiet) as on_progress:
        found = verify_export(
            out,
            against=against or None,
            base=base,
            adapter_config=adapter_config,
            check=check,
            follow_symlinks=follow_symlinks,
            progress=on_progress,
        )
    print_result(found.to_json, lambda console: print_verify(console, found), as_json=json)
    if not found.ok:
        click.get_current_context().exit(VerificationError.exit_code)
