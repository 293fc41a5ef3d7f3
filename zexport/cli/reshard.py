"""``zexport reshard``: a ZeRO checkpoint in, the same training for another number of ranks out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zexport.cli.making import Making, making_options, output_option, split
from zexport.cli.options import (
    PATH,
    ByteSize,
    allow_option,
    check_option,
    jobs_option,
    tag_option,
    verify_option,
)
from zexport.options import ReshardOptions, ResumeFormat
from zexport.text import shell_word


@click.command(short_help="Turn a ZeRO checkpoint into one for another number of ranks or stage.")
@click.argument("paths", type=PATH, nargs=-1, metavar="CKPT... OUT")
@output_option
@tag_option
@click.option(
    "-n",
    "--world-size",
    type=click.IntRange(1),
    metavar="N",
    help="How many data-parallel ranks are to go on; needed for rank files.",
)
@click.option(
    "--stage",
    type=click.IntRange(1, 3),
    metavar="1..3",
    help="Their ZeRO stage.  [default: the checkpoint's]",
)
@click.option(
    "--ds-config",
    type=PATH,
    metavar="FILE",
    help="Their DeepSpeed configuration; auto in it is the checkpoint's value.  [default: the one "
    "in the checkpoint]",
)
@click.option(
    "--format",
    type=click.Choice([one.value for one in ResumeFormat], case_sensitive=False),
    default=ResumeFormat.NATIVE.value,
    show_default=True,
    help="Rank files for N ranks, which plain load_checkpoint takes, or one universal checkpoint "
    "for any number of ranks, of which DeepSpeed loads no frozen weights and no buffers.",
)
@click.option(
    "--for-deepspeed",
    metavar="VERSION",
    help="The DeepSpeed that is to load the universal checkpoint, 0.14.5 or newer.  "
    "[default: 0.19.3 and newer]",
)
@click.option(
    "--drop-client-state",
    is_flag=True,
    help="Leave out what your script saved that cannot be written safely.",
)
@jobs_option
@click.option("--max-memory", type=ByteSize(), help="Refuse what needs more memory.")
@verify_option
@check_option
@allow_option
@making_options("Replace an older result at OUT, once the new one is complete.")
def reshard(
    *, paths: tuple[Path, ...], output: Path | None, world_size: int | None, **given: Any
) -> None:
    """Turn the ZeRO checkpoint CKPT into OUT, from which the same training goes on with N ranks.

    Weights, optimizer states, schedule and the client's own state come along. OUT is loaded as any
    checkpoint is: by DeepSpeed's load_checkpoint, Trainer, Accelerate or Lightning. It appears
    complete or not at all.

    Example: zexport reshard run/checkpoint-100 on-3 -n 3
    """
    is_bare = world_size is None and given["format"] == ResumeFormat.NATIVE.value
    ckpts, out = _checked(paths, output, is_bare=is_bare)
    making = Making.taken_from(given)
    memory = given.pop("max_memory")
    options = ReshardOptions(world_size=world_size, max_memory_nbytes=memory, **given)
    making.make(ckpts, out, options)


def _checked(
    paths: tuple[Path, ...], output: Path | None, *, is_bare: bool
) -> tuple[tuple[Path, ...], Path]:
    """CKPT and OUT; without OUT, or bare of a number of ranks, a refusal with an example."""
    given = (*paths, output) if output is not None else paths
    source, out = (*map(shell_word, given), "on-3")[:2] if given else ("run/checkpoint-100", "on-3")
    example = f"zexport reshard {source} {out} -n 3"
    ckpts, folder = split(paths, output, example)
    if is_bare:
        told = f"Say how many ranks are to go on, as in: {example}"
        raise click.MissingParameter(told, param_hint="'-n'", param_type="option")
    return ckpts, folder
