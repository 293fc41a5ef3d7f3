"""``zexport reshard``: rewrite a ZeRO checkpoint for another world size or stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zexport.cli.options import (
    PATH,
    allow_option,
    check_option,
    choice_option,
    jobs_option,
    memory_option,
    tag_option,
    verify_option,
)
from zexport.cli.run import RunOptions, output_option, run, run_options, split_paths
from zexport.options import ReshardOptions, ResumeFormat


@click.command(short_help="Rewrite a ZeRO checkpoint for another world size or stage.")
@click.argument("paths", type=PATH, nargs=-1, metavar="CKPT... OUT")
@output_option
@tag_option
@click.option(
    "-n",
    "--world-size",
    type=click.IntRange(1),
    metavar="N",
    help="New data-parallel world size. Required for rank files.",
)
@click.option(
    "--stage",
    type=click.IntRange(1, 3),
    metavar="1..3",
    help="New ZeRO stage.  [default: that of the checkpoint]",
)
@click.option(
    "--ds-config",
    type=PATH,
    metavar="FILE",
    help="DeepSpeed config of the new run; auto in it takes the checkpoint's value.  [default: "
    "that of the checkpoint]",
)
@choice_option(
    "--format",
    ResumeFormat.NATIVE,
    "Write rank files for N ranks (native), or a universal checkpoint for any world size, "
    "from which DeepSpeed loads no frozen weights and no buffers.",
)
@click.option(
    "--for-deepspeed",
    metavar="VERSION",
    help="DeepSpeed version that will load the universal checkpoint, at least 0.14.5.  [default: "
    "0.19.3 or later]",
)
@click.option(
    "--drop-client-state",
    is_flag=True,
    help="Omit client state that cannot be written safely.",
)
@jobs_option
@memory_option
@verify_option
@check_option
@allow_option
@run_options("Replace an older result at OUT once the new one is complete.")
def reshard(
    *, paths: tuple[Path, ...], output: Path | None, world_size: int | None, **values: Any
) -> None:
    """Rewrite the ZeRO checkpoint CKPT as OUT, from which N ranks resume training.

    OUT has weights, optimizer state, LR scheduler and client state. DeepSpeed's load_checkpoint,
    Trainer, Accelerate and Lightning load it as usual. It appears complete or not at all.

    Example: zexport reshard run/checkpoint-100 on-3 -n 3
    """
    ckpts, out = split_paths(paths, output)
    if world_size is None and values["format"] is ResumeFormat.NATIVE:
        context = click.get_current_context()
        hint = "'-n' / '--world-size'"
        raise click.MissingParameter(ctx=context, param_hint=hint, param_type="option")
    how = RunOptions.pop(values)
    memory = values.pop("max_memory")
    options = ReshardOptions(world_size=world_size, max_memory_nbytes=memory, **values)
    run(ckpts, out, options, how)
