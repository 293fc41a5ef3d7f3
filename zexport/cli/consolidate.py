"""``zexport consolidate``: a ZeRO checkpoint in, a Hugging Face model folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zexport.cli.making import Making, making_options
from zexport.cli.options import (
    PATH,
    export_options,
    missing_path,
    options_of,
    tag_option,
    verify_option,
)
from zexport.printable import shell_word
from zexport.store.folders import exists


@click.command(short_help="Turn a ZeRO checkpoint into a Hugging Face model folder.")
@click.argument("paths", type=PATH, nargs=-1, metavar="CKPT... OUT")
@click.option("-o", "--output", type=PATH, metavar="OUT", help="OUT, by name.")
@tag_option
@export_options
@verify_option
@click.option("--no-verify", is_flag=True, help="The same as --verify none.")
@making_options("Replace an export or a model at OUT, once the new one is complete.")
def consolidate(
    *, paths: tuple[Path, ...], output: Path | None, verify: str, no_verify: bool, **given: Any
) -> None:
    """Turn the ZeRO checkpoint CKPT into the Hugging Face model folder OUT.

    Give CKPT at any level: a run's folder, checkpoint-N, the folder with `latest`, or global_stepN.
    Give several where nodes kept their own parts. OUT appears complete or not at all.

    Example: zexport consolidate run/checkpoint-100 model --dtype bf16
    """
    ckpts, out = _split(paths, output)
    given["verify"] = "none" if no_verify else verify
    making = Making.taken_from(given)
    making.make(ckpts, out, options_of(**given))


def _split(paths: tuple[Path, ...], output: Path | None) -> tuple[tuple[Path, ...], Path]:
    """The checkpoint's folders, and the one to make: the last, unless an option names it."""
    if not paths or (output is None and len(paths) == 1):
        first = "".join(map(shell_word, paths[:1]))
        raise missing_path(paths, f"zexport consolidate {first} model")
    if output is None:
        return paths[:-1], paths[-1]
    if len(paths) > 1 and not exists(paths[-1]):
        raise click.UsageError(
            f"OUT is given twice, as {str(paths[-1])!r} and with --output as {str(output)!r}."
        )
    return paths, output
