"""``zexport train``: make a checkpoint by a short training run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zexport.cli.options import GivenPath, choice_option, number_option, quiet_option, together
from zexport.options import dtype_name
from zexport.text import shell_word

if TYPE_CHECKING:
    from zexport.train.options import TrainSummary

_FOLDER = GivenPath(exists=True, file_okay=False, path_type=Path, resolve_path=True)
_FILE = GivenPath(exists=True, dir_okay=False, path_type=Path, resolve_path=True)
_OUT = GivenPath(file_okay=False, path_type=Path, resolve_path=True)


class _DType(click.Choice[str]):
    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        """Return zexport's name for a dtype that has torch's or another case."""
        return dtype_name(super().normalize_choice(choice, ctx))


_train_options = together(
    click.option("--model", type=_FOLDER, help="Model folder to start from (default: built in)."),
    click.option("--tokenizer", type=_FOLDER, help="Tokenizer folder (default: that of --model)."),
    click.option("--data", type=_FILE, help="Text to learn (default: a short text, built in)."),
    number_option("--vocab-size", 384, "Tokens of the built-in tokenizer.", least=260),
    number_option("--hidden-size", 64, "Hidden size of the built-in model.", least=8),
    number_option("--layers", 2, "Layers of the built-in model."),
    number_option("--world-size", 2, "Number of ranks."),
    click.option(
        "--stage", type=click.IntRange(0, 3), metavar="0..3", default=3, help="ZeRO stage."
    ),
    click.option(
        "--dtype",
        type=_DType(["fp32", "bf16", "fp16"]),
        default="bf16",
        help="Dtype of the module weights.",
    ),
    number_option("--steps", 20, "Step to train up to."),
    click.option(
        "--lr",
        type=click.FloatRange(min=0, min_open=True),
        metavar="X",
        default=3e-3,
        help="Learning rate after four warm-up steps.",
    ),
    number_option("--batch-size", 4, "Sequences per rank and step."),
    number_option("--seq-len", 64, "Tokens per sequence.", least=2),
    number_option("--seed", 0, "Seed of weights and data order.", least=0),
    click.option("--lora", is_flag=True, help="Train a LoRA adapter on the frozen model."),
    click.option(
        "--freeze",
        multiple=True,
        metavar="REGEX",
        help="Freeze parameters whose name matches. Repeatable.",
    ),
    click.option(
        "--ds-config",
        type=_FILE,
        help="DeepSpeed config, merged over zexport's own.",
    ),
    number_option("--timeout", 600, "Seconds to wait for a rank."),
    choice_option(
        "--save",
        ["partitioned", "gathered", "both"],
        "Rank files (to resume), gathered 16-bit weights, or both.",
    ),
    number_option("--save-every", 0, "Save every N steps (0: only at the end).", least=0),
    number_option("--keep", 0, "Keep the newest N checkpoints (0: all).", least=0),
    click.option("--resume", is_flag=True, help="Continue from the folder's latest checkpoint."),
)


@click.command(
    short_help="Make a small checkpoint by a short training run.",
    context_settings={"show_default": True},
)
@click.argument("out", type=_OUT)
@_train_options
@click.option("--json", is_flag=True, help="Print one JSON object.")
@quiet_option
@click.option("--local_rank", hidden=True, expose_value=False)  # the deepspeed launcher appends it
@click.pass_context
def train(
    context: click.Context, /, ds_config: Path | None, *, json: bool, quiet: bool, **values: Any
) -> None:
    """Make a checkpoint in OUT by a short sharded training run with DeepSpeed.

    Starts --world-size ranks, or is one rank under torchrun or the deepspeed launcher. Uses GPUs if
    every rank has one, else the CPU.

    Example: zexport train run --world-size 2 --stage 3 --steps 60
    """
    from zexport.train.launch import train as run_training
    from zexport.train.options import TrainOptions, read_ds_config, resume_options

    overrides = read_ds_config(ds_config) if ds_config else {}
    options = TrainOptions(ds_config=overrides, **values)
    default = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    explicit = {name for name in values if context.get_parameter_source(name) not in default}
    explicit |= {"ds_config"} if ds_config else set()
    if options.resume:
        options = resume_options(options, explicit)

    def progress(line: str) -> None:
        if not quiet:
            click.echo(line, err=True)

    summary = run_training(options, explicit, progress=progress)
    if summary is not None and (json or not quiet):
        click.echo(summary.to_json() if json else _text(summary))


def _text(summary: TrainSummary) -> str:
    """Return the losses, the checkpoint, and the next command."""
    from zexport.report.text import near

    out = near(summary.out)
    folder = out if summary.partitioned else f"{out}/gathered"
    text = (
        f"trained {summary.steps} steps on {summary.world_size} ranks, ZeRO stage {summary.stage}:"
        f" loss {summary.first_loss:.3f} -> {summary.last_loss:.3f}\n"
        f"checkpoint: {folder}/{summary.tag}"
    )
    if summary.partitioned:
        text += f"\nnext: zexport consolidate {shell_word(out)} {shell_word(f'{out}-model')}"
    return text
