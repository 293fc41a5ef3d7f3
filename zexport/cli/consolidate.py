"""``zexport consolidate``: a ZeRO checkpoint in, a Hugging Face model folder out."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zexport.cli.options import (
    PATH,
    ByteSize,
    Named,
    Rename,
    adapter_options,
    allow_option,
    check_option,
    jobs_option,
    json_option,
    links_option,
    missing_path,
    progress_options,
    tag_option,
    verify_option,
)
from zexport.cli.part import part_option
from zexport.cli.streams import put_out
from zexport.findings import FindingKind
from zexport.options import Engine, ExportDType, ExportOptions, NameLayout
from zexport.printable import shell_word
from zexport.store.folders import exists

if TYPE_CHECKING:
    from zexport.plan.plan import ExportPlan
    from zexport.run.execute import ExportReport
    from zexport.run.parts import PartReport
    from zexport.run.shares import Share

_DEFAULTS = ExportOptions()
_SHARD_NBYTES_MIN = 10**6


@click.command(short_help="Turn a ZeRO checkpoint into a Hugging Face model folder.")
@click.argument("paths", type=PATH, nargs=-1, metavar="CKPT... OUT")
@click.option("-o", "--output", type=PATH, metavar="OUT", help="OUT, given by name.")
@tag_option
@click.option(
    "--dtype",
    type=Named(ExportDType),
    default=_DEFAULTS.dtype.value,
    show_default=True,
    help="Element type of the weights; auto is the one the module trained in.",
)
@click.option(
    "--base",
    type=PATH,
    help="Model folder, or the name of one in the hub's cache, for config, tokenizer and frozen "
    "weights not saved.",
)
@click.option(
    "--only",
    metavar="PREFIX",
    default=_DEFAULTS.only,
    help="Export what lies under PREFIX in the model alone, such as one of model and ema.",
)
@click.option(
    "--max-shard-size",
    type=ByteSize(_SHARD_NBYTES_MIN),
    default="5GB",
    show_default=True,
    help="Largest safetensors file.",
)
@click.option(
    "--engine",
    type=Named(Engine),
    default=_DEFAULTS.engine.value,
    show_default=True,
    help="Who rebuilds the weights; deepspeed runs its own converter, as a reference.",
)
@click.option("--exclude-frozen", is_flag=True, help="Leave frozen weights out.")
@click.option(
    "--layout",
    type=Named(NameLayout),
    default=_DEFAULTS.layout.value,
    show_default=True,
    help="Tensor names: the hub's, or the module's in memory as the checkpoint records them.",
)
@click.option(
    "--rename",
    type=Rename(),
    multiple=True,
    help="Rename tensors: REGEX=REPLACEMENT, in the order given.",
)
@adapter_options
@jobs_option
@click.option("--max-memory", type=ByteSize(), help="Bound on memory; refused if too small.")
@verify_option
@check_option
@allow_option
@click.option("--no-verify", is_flag=True, help="The same as --verify none.")
@links_option
@part_option
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace an export or a model at OUT once the new folder is complete.",
)
@json_option
@progress_options
def consolidate(
    *,
    paths: tuple[Path, ...],
    output: Path | None,
    tag: str | None,
    follow_symlinks: bool,
    verify: str,
    no_verify: bool,
    part: Share | None,
    dry_run: bool,
    json: bool,
    progress: str,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Turn the ZeRO checkpoint CKPT into the Hugging Face model folder OUT.

    CKPT may be any level: a run's folder, checkpoint-N, the folder with `latest`, or global_stepN
    itself; several, where nodes kept their own parts. OUT appears complete or not at all.

    Example: zexport consolidate run/checkpoint-100 model --dtype bf16
    """
    from zexport.api.export import plan_export, run_export
    from zexport.api.parts import Request, run_part
    from zexport.checkpoint.opening import open_checkpoint
    from zexport.cli.progress import progress_printer
    from zexport.run.execute import VerifyMode

    ckpts, out = _split(paths, output)
    mode = VerifyMode("none" if no_verify else verify)
    options = _options(**chosen)
    began = time.monotonic()
    with progress_printer(progress, quiet=quiet) as on_progress:
        checkpoint = open_checkpoint(ckpts, tag=tag, follow_symlinks=follow_symlinks)
        plan = plan_export(checkpoint, out, options)
        done: ExportReport | PartReport | None = None
        if part is not None and not dry_run:
            request = Request.of(ckpts, options, tag, follow=follow_symlinks)
            done = run_part(plan, part, request, verify=mode, progress=on_progress)
        elif not dry_run:
            done = run_export(plan, verify=mode, progress=on_progress)
    if done is None:
        _show(plan, as_json=json, quiet=quiet)
    else:
        _tell(replace(done, seconds=time.monotonic() - began), plan, as_json=json, quiet=quiet)


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


def _options(
    *,
    max_shard_size: int,
    max_memory: int | None,
    rename: tuple[tuple[str, str], ...],
    allow: tuple[FindingKind, ...],
    **chosen: Any,
) -> ExportOptions:
    """What was chosen, by the library's names for it."""
    return ExportOptions(
        max_shard_nbytes=max_shard_size,
        max_memory_nbytes=max_memory,
        renames=rename,
        allow=frozenset(allow),
        **chosen,
    )


def _show(plan: ExportPlan, *, as_json: bool, quiet: bool) -> None:
    from zexport.plan.summary import side_nbytes, summarize
    from zexport.report.export import print_plan
    from zexport.store.json import form_of

    summary = summarize(plan)
    put_out(
        lambda: form_of(summary, plan.provenance),
        lambda console: print_plan(console, summary, side_nbytes(plan), quiet=quiet),
        as_json=as_json,
    )


def _tell(done: ExportReport | PartReport, plan: ExportPlan, *, as_json: bool, quiet: bool) -> None:
    from zexport.report.export import print_export, print_part, print_warnings
    from zexport.report.text import PlainConsole
    from zexport.run.parts import PartReport
    from zexport.store.json import form_of

    if quiet and not as_json:
        print_warnings(PlainConsole(sys.stderr), done)
    elif isinstance(done, PartReport):
        put_out(done.to_json, lambda console: print_part(console, done), as_json=as_json)
    else:
        put_out(
            lambda: form_of(done, plan.provenance),
            lambda console: print_export(console, done),
            as_json=as_json,
        )
