"""``zexport reshard``: a ZeRO checkpoint in, the same training for another number of ranks out."""

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
    allow_option,
    check_option,
    jobs_option,
    json_option,
    links_option,
    missing_path,
    progress_options,
    storage_option,
    tag_option,
    verify_option,
)
from zexport.cli.part import part_option
from zexport.cli.streams import put_out
from zexport.findings import FindingKind
from zexport.options import ReshardOptions, ResumeFormat
from zexport.printable import shell_word

if TYPE_CHECKING:
    from zexport.plan.plan import ExportPlan
    from zexport.run.execute import ExportReport
    from zexport.run.parts import PartReport
    from zexport.run.shares import Share


@click.command(short_help="Turn a ZeRO checkpoint into one for another number of ranks or stage.")
@click.argument("paths", type=PATH, nargs=-1, metavar="CKPT... OUT")
@tag_option
@click.option(
    "-n",
    "--world-size",
    type=int,
    metavar="N",
    help="How many data-parallel ranks are to go on; needed for rank files.",
)
@click.option(
    "--stage",
    type=int,
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
    type=click.Choice([one.value for one in ResumeFormat]),
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
@links_option
@storage_option
@part_option
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace an older result at OUT, once the new one is complete.",
)
@json_option
@progress_options
def reshard(
    *,
    paths: tuple[Path, ...],
    world_size: int | None,
    tag: str | None,
    follow_symlinks: bool,
    verify: str,
    part: Share | None,
    dry_run: bool,
    json: bool,
    progress: str,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Turn the ZeRO checkpoint CKPT into OUT, from which the same training goes on with N ranks.

    Weights, optimizer states, schedule and the client's own state come along. OUT is loaded as any
    checkpoint is: by DeepSpeed's load_checkpoint, Trainer, Accelerate or Lightning. It appears
    complete or not at all.

    Example: zexport reshard run/checkpoint-100 on-3 --world-size 3
    """
    from zexport.api.export import run_export
    from zexport.api.parts import Request, run_part
    from zexport.api.reshard import plan_reshard
    from zexport.checkpoint.opening import open_checkpoint
    from zexport.cli.progress import progress_printer
    from zexport.run.execute import VerifyMode

    is_bare = world_size is None and chosen["format"] == ResumeFormat.NATIVE.value
    _check(paths, is_bare=is_bare)
    options = _options(world_size=world_size, **chosen)
    ckpts, out, mode = paths[:-1], paths[-1], VerifyMode(verify)
    began = time.monotonic()
    with progress_printer(progress, quiet=quiet) as on_progress:
        checkpoint = open_checkpoint(ckpts, tag=tag, follow_symlinks=follow_symlinks)
        plan = plan_reshard(checkpoint, out, options)
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


def _check(paths: tuple[Path, ...], *, is_bare: bool) -> None:
    """Refuse a command line that lacks OUT, or is bare of a number of ranks, with an example."""
    source, out = (*map(shell_word, paths), "on-3")[:2] if paths else ("", "")
    example = f"zexport reshard {source} {out} -n 3"
    if len(paths) < 2:  # noqa: PLR2004 - the source and the folder to make
        raise missing_path(paths, example)
    if is_bare:
        told = f"Say how many ranks are to go on, as in: {example}"
        raise click.MissingParameter(told, param_hint="'-n'", param_type="option")


def _options(
    *, max_memory: int | None, allow: tuple[FindingKind, ...], **chosen: Any
) -> ReshardOptions:
    """What was chosen, by the library's names for it."""
    return ReshardOptions(max_memory_nbytes=max_memory, allow=frozenset(allow), **chosen)


def _show(plan: ExportPlan, *, as_json: bool, quiet: bool) -> None:
    from zexport.plan.summary import side_nbytes, summarize
    from zexport.report.reshard import print_reshard_plan
    from zexport.resume.plan import recorded_settings
    from zexport.store.json import form_of

    summary, settings = summarize(plan), recorded_settings(plan.provenance)
    put_out(
        lambda: form_of(summary, plan.provenance),
        lambda console: print_reshard_plan(
            console, summary, side_nbytes(plan), settings, quiet=quiet
        ),
        as_json=as_json,
    )


def _tell(done: ExportReport | PartReport, plan: ExportPlan, *, as_json: bool, quiet: bool) -> None:
    from zexport.report.export import print_part, print_warnings
    from zexport.report.reshard import print_reshard
    from zexport.report.text import PlainConsole
    from zexport.resume.plan import recorded_settings
    from zexport.run.parts import PartReport
    from zexport.store.json import form_of

    if quiet and not as_json:
        print_warnings(PlainConsole(sys.stderr), done)
    elif isinstance(done, PartReport):
        put_out(done.to_json, lambda console: print_part(console, done), as_json=as_json)
    else:
        put_out(
            lambda: form_of(done, plan.provenance),
            lambda console: print_reshard(console, done, recorded_settings(plan.provenance)),
            as_json=as_json,
        )
