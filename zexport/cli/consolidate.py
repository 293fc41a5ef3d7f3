"""``zexport consolidate``: a ZeRO checkpoint in, a Hugging Face model folder out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from zexport.cli.making import Making, making_options, output_option, split
from zexport.cli.options import (
    PATH,
    export_options,
    options_of,
    tag_option,
    verify_option,
)
from zexport.errors import UsageError
from zexport.options import ExportDType, dtype_name
from zexport.storage.files import exists
from zexport.storage.location import local_path
from zexport.text import shell_word


@click.command(short_help="Turn a ZeRO checkpoint into a Hugging Face model folder.")
@click.argument("paths", type=PATH, nargs=-1, metavar="CKPT... OUT")
@output_option
@tag_option
@export_options
@verify_option
@click.option("--no-verify", is_flag=True, help="The same as --verify none.")
@click.option(
    "--push-to-hub",
    metavar="ORG/NAME",
    help="Then upload OUT to this repository of the Hugging Face hub, which is made, and private, "
    "if there is none.",
)
@making_options("Replace an export or a model at OUT, once the new one is complete.")
@click.option("--as-seen", default="", hidden=True)  # by a watch: the mark of what it has seen
def consolidate(
    *,
    paths: tuple[Path, ...],
    output: Path | None,
    verify: str,
    no_verify: bool,
    push_to_hub: str | None,
    as_seen: str,
    **given: Any,
) -> None:
    """Turn the ZeRO checkpoint CKPT into the Hugging Face model folder OUT.

    Give CKPT at any level: a run's folder, checkpoint-N, the folder with `latest`, or global_stepN.
    Give several where nodes kept their own parts. OUT appears complete or not at all.

    Example: zexport consolidate run/checkpoint-100 model --dtype bf16
    """
    first = shell_word(paths[0]) if paths else "run/checkpoint-100"
    example = f"zexport consolidate {first} model"
    _check_no_dtype(paths)
    ckpts, out = split(paths, output, example)
    given["verify"] = "none" if no_verify else verify
    making = Making.taken_from(given)
    options = options_of(**given)
    then = None
    if push_to_hub is not None:
        then = _uploading(push_to_hub, out, making, overwrite=options.overwrite)
    making.make(ckpts, out, options, then, _confirming(ckpts, as_seen, making))


def _check_no_dtype(paths: tuple[Path, ...]) -> None:
    """Raise if the last argument is a dtype that follows a new folder to make."""
    dtypes = {dtype.value for dtype in ExportDType}
    match paths:
        case (_, *_, out, last) if dtype_name(str(last)) in dtypes and not exists(out):
            raise UsageError(
                f"{str(last)!r} is a dtype, not a folder",
                hint=f"Pass it as --dtype {dtype_name(str(last))}",
            )


def _uploading(
    repository: str, out: Path, making: Making, *, overwrite: bool
) -> Callable[[], None]:
    """What uploads the folder once it is made, where that is possible."""
    from zexport.storage.hub import check_repository, push

    folder = local_path(out)
    if making.part is not None:
        raise UsageError(
            "--push-to-hub uploads a whole folder, and --part writes a share of it",
            hint=f"When it is there: hf upload --private {repository} {shell_word(folder)}",
        )
    check_repository(repository, overwrite=overwrite)

    def upload() -> None:
        address = push(folder, repository, overwrite=overwrite, quiet=making.quiet)
        if not making.quiet:
            click.echo(f"Uploaded to {address}", err=True)

    return upload


def _confirming(ckpts: tuple[Path, ...], mark: str, making: Making) -> Callable[[], None]:
    """What sees that the checkpoint is as a watch has seen it, where one asks for that."""
    if not mark:
        return lambda: None
    from zexport.monitor.sightings import check_as_seen

    return partial(check_as_seen, ckpts[0], mark, follow=making.follow_symlinks)
