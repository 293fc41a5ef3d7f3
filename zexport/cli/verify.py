"""``zexport verify``: is an export what its manifest, and its checkpoint, say it is?"""

from __future__ import annotations

from pathlib import Path

import click

from zexport.cli.options import (
    PATH,
    Named,
    given_options,
    json_option,
    links_option,
    progress_options,
    storage_option,
)
from zexport.cli.streams import put_out
from zexport.errors import UsageError, VerificationError
from zexport.options import CheckMode
from zexport.text import shell_word


@click.command(short_help="Check an export against its manifest and its checkpoint.")
@click.argument("outs", type=PATH, metavar="OUT", nargs=-1, required=True)
@click.option(
    "--against",
    type=PATH,
    multiple=True,
    metavar="CKPT",
    help="Make every tensor again from this checkpoint, and compare; repeatable, where nodes kept "
    "their own parts.",
)
@given_options
@click.option(
    "--check",
    type=Named(CheckMode),
    default=CheckMode.SAMPLED.value,
    show_default=True,
    help="With --against: how much of the fp32 weights is compared with the checkpoint's 16-bit "
    "copy.",
)
@links_option
@storage_option
@json_option
@progress_options
def verify(
    *,
    outs: tuple[Path, ...],
    against: tuple[Path, ...],
    base: Path | None,
    adapter_config: Path | None,
    check: CheckMode,
    follow_symlinks: bool,
    json: bool,
    progress: str,
    quiet: bool,
) -> None:
    """Read the folder OUT again and compare every byte with its manifest.

    Example: zexport verify model --against run/checkpoint-100
    """
    from zexport.api.verify import verify_export
    from zexport.cli.progress import progress_printer
    from zexport.report.export import print_verify

    out, *more = outs
    if more:
        meant = " ".join((shell_word(out), "--against", *map(shell_word, more)))
        raise UsageError(
            "one folder is verified at a time",
            hint=f"To hold it against its checkpoint: zexport verify {meant}",
        )
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
    put_out(found.to_json, lambda console: print_verify(console, found), as_json=json)
    if not found.ok:
        click.get_current_context().exit(VerificationError.exit_code)
