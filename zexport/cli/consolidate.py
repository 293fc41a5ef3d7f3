"""``zexport consolidate``: export a checkpoint as a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from zexport.cli.options import PATH, export_options, options_of, tag_option, verify_option
from zexport.cli.run import RunOptions, output_option, run, run_options, split_paths
from zexport.errors import UsageError
from zexport.storage.location import local_path
from zexport.text import shell_word


@click.command(short_help="Export a checkpoint as a Hugging Face model folder.")
@click.argument("paths", type=PATH, nargs=-1, metavar="CKPT... OUT")
@output_option
@tag_option
@export_options
@verify_option
@click.option("--no-verify", is_flag=True, help="Same as --verify none.")
@click.option(
    "--push-to-hub",
    metavar="ORG/NAME",
    help="Then upload OUT to this Hub repository, created as private if missing.",
)
@run_options("Replace an export or model folder at OUT once the new one is complete.")
@click.option("--as-seen", default="", hidden=True)  # set by watch: the checkpoint that it chose
def consolidate(
    *,
    paths: tuple[Path, ...],
    output: Path | None,
    verify: str,
    no_verify: bool,
    push_to_hub: str | None,
    as_seen: str,
    **values: Any,
) -> None:
    """Export the checkpoint CKPT as the Hugging Face model folder OUT.

    CKPT is any level: a run's folder, checkpoint-N, the folder with `latest`, or global_stepN. Pass
    several if each node kept its own rank files. OUT appears complete or not at all.

    Example: zexport consolidate run/checkpoint-100 model --dtype bf16
    """
    ckpts, out = split_paths(paths, output)
    values["verify"] = "none" if no_verify else verify
    how = RunOptions.pop(values)
    options = options_of(**values)
    then = confirm = None
    if push_to_hub is not None:
        then = _upload(push_to_hub, out, how, overwrite=options.overwrite)
    if as_seen:
        from zexport.monitor.snapshot import check_as_seen

        confirm = partial(check_as_seen, ckpts[0], as_seen, follow=how.follow_symlinks)
    run(ckpts, out, options, how, then=then, confirm=confirm)


def _upload(repository: str, out: Path, how: RunOptions, *, overwrite: bool) -> Callable[[], None]:
    """Return a function that uploads the finished folder; raise early if it would fail."""
    from zexport.storage.hub import check_repository, push

    folder = local_path(out)
    if how.part is not None:
        raise UsageError(
            "--push-to-hub needs the whole folder, but --part writes one part",
            hint=f"Upload it once complete: hf upload --private {repository} {shell_word(folder)}",
        )
    check_repository(repository, overwrite=overwrite)

    def upload() -> None:
        address = push(folder, repository, overwrite=overwrite, quiet=how.quiet)
        if not how.quiet:
            click.echo(f"Uploaded to {address}", err=True)

    return upload
