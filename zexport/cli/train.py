"""``zexport train``: the options of a short sharded training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from zexport.cli.environment import tell_of_options_set
from zexport.cli.options import GivenPath, together

_FOLDER = GivenPath(exists=True, file_okay=False, path_type=Path, resolve_path=True)
_FILE = GivenPath(exists=True, dir_okay=False, path_type=Path, resolve_path=True)
_OUT = GivenPath(file_okay=False, path_type=Path, resolve_path=True)
_POSITIVE = click.IntRange(min=1)
_COUNT = click.IntRange(min=0)

_train_options = together(
    click.option("--model", type=_FOLDER, help="Model folder to start from (default: built in)."),
    click.option("--tokenizer", type=_FOLDER, help="Tokenizer folder (default: that of --model)."),
    click.option("--data", type=_FILE, help="Text to learn (default: a short text, built in)."),
    click.option(
        "--vocab-size",
        type=click.IntRange(min=260),
        metavar="N",
        default=384,
        help="Tokens of the built-in tokenizer.",
    ),
    click.option(
        "--hidden-size",
        type=click.IntRange(min=8),
        metavar="N",
        default=64,
        help="Hidden size of the built-in model.",
    ),
    click.option(
        "--layers",
        type=_POSITIVE,
        metavar="N",
        default=2,
        help="Layers of the built-in model.",
    ),
    click.option("--world-size", type=_POSITIVE, metavar="N", default=2, help="Number of ranks."),
    click.option(
        "--stage", type=click.IntRange(0, 3), metavar="0..3", default=3, help="ZeRO stage."
    ),
    click.option(
        "--dtype",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        default="bf16",
        help="Element type that the module trains in.",
    ),
    click.option("--steps", type=_POSITIVE, metavar="N", default=20, help="Step to train up to."),
    click.option(
        "--lr",
        type=click.FloatRange(min=0, min_open=True),
        metavar="X",
        default=3e-3,
        help="Learning rate, after four steps.",
    ),
    click.option(
        "--batch-size",
        type=_POSITIVE,
        metavar="N",
        default=4,
        help="Sequences a rank takes in a step.",
    ),
    click.option(
        "--seq-len",
        type=click.IntRange(min=2),
        metavar="N",
        default=64,
        help="Tokens in a sequence.",
    ),
    click.option(
        "--seed",
        type=_COUNT,
        metavar="N",
        default=0,
        help="Seed of the weights and of the order of the data.",
    ),
    click.option("--lora", is_flag=True, help="Train a LoRA adapter, the model frozen."),
    click.option(
        "--freeze",
        multiple=True,
        metavar="REGEX",
        help="Freeze the parameters whose name matches (repeatable).",
    ),
    click.option(
        "--ds-config",
        type=_FILE,
        help="DeepSpeed configuration; what it says comes before zexport's own.",
    ),
    click.option(
        "--timeout",
        type=_POSITIVE,
        metavar="N",
        default=600,
        help="Seconds a rank may be waited for.",
    ),
    click.option(
        "--save",
        type=click.Choice(["partitioned", "gathered", "both"]),
        default="partitioned",
        help="Every rank's part (to resume), the whole 16-bit model from rank 0, or both.",
    ),
    click.option(
        "--save-every",
        type=_COUNT,
        metavar="N",
        default=0,
        help="Save every N steps (0: at the end only).",
    ),
    click.option(
        "--keep",
        type=_COUNT,
        metavar="N",
        default=0,
        help="Keep the newest N checkpoints (0: all).",
    ),
    click.option("--resume", is_flag=True, help="Continue from the folder's latest checkpoint."),
)


@click.command(
    short_help="Make a small checkpoint by a short training run.",
    context_settings={"show_default": True},
)
@click.argument("out", type=_OUT)
@_train_options
@click.option("--json", is_flag=True, help="Print one JSON object.")
@click.option("--local_rank", hidden=True, expose_value=False)  # the deepspeed launcher appends it
@click.pass_context
def train(context: click.Context, /, ds_config: Path | None, *, json: bool, **values: Any) -> None:
    """Make a checkpoint in OUT by a short sharded training run with DeepSpeed.

    Started by itself it launches --world-size ranks; under torchrun or the deepspeed launcher it is
    one of theirs. Uses the GPUs where there is one for every rank, and the CPU otherwise.

    Example: zexport train run --world-size 2 --stage 3 --steps 60
    """
    from zexport.train.launch import train as run_training
    from zexport.train.options import TrainOptions, read_ds_config, resumed, without_effect

    overrides = read_ds_config(ds_config) if ds_config else {}
    options = TrainOptions(ds_config=overrides, **values)
    default = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    explicit = {name for name in values if context.get_parameter_source(name) not in default}
    explicit |= {"ds_config"} if ds_config else set()
    if options.resume:
        options = resumed(options, explicit)
    tell_of_options_set()
    for told in without_effect(options, explicit):
        click.echo(f"Warning: {told}.", err=True)
    summary = run_training(options, explicit, progress=lambda line: click.echo(line, err=True))
    if summary is not None:
        click.echo(summary.to_json() if json else summary.to_text())
