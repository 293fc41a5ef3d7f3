"""``zexport watch``: export every checkpoint of a run during training."""

from __future__ import annotations

import gc
import json as json_text
import os
import select
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from zexport.cli.options import (
    PATH,
    export_options,
    links_option,
    number_option,
    options_of,
    storage_option,
    together,
    verify_option,
)
from zexport.errors import UsageError
from zexport.storage.files import exists

_watch_options = together(
    click.option("--once", is_flag=True, help="Scan once and exit, for cron."),
    click.option(
        "--until-eof",
        is_flag=True,
        help="When stdin ends, export the rest and exit; for a parent process.",
    ),
    click.option("--dry-run", is_flag=True, help="Print what would be done and why, and exit."),
    click.option(
        "--then",
        metavar="CMD",
        default="",
        help="Run CMD after each export, without a shell. The words {} and {step} become its "
        "folder and step.",
    ),
    number_option("--keep", None, "Keep only the newest N exports of each model."),
    number_option("--every", 1, "Export only steps divisible by N."),
    click.option("--newest-only", is_flag=True, help="Skip a checkpoint if a newer is complete."),
    click.option(
        "--interval",
        type=click.FloatRange(0.05),
        metavar="N",
        default=15,
        show_default=True,
        help="Seconds between two scans of RUN.",
    ),
)


@click.command(short_help="Export every checkpoint of a run during training.")
@click.argument("run", type=PATH)
@click.argument("outs", type=PATH)
@_watch_options
@export_options
@verify_option
@links_option
@storage_option
@click.option("--json", is_flag=True, help="Print one JSON object per line on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print only failures and warnings.")
def watch(
    *,
    run: Path,
    outs: Path,
    interval: float,
    until_eof: bool,
    dry_run: bool,
    verify: str,
    follow_symlinks: bool,
    json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Export every checkpoint of the run in RUN to OUTS, once it is complete.

    Each export has the name of its checkpoint. RUN is scanned every --interval seconds until Ctrl-C
    or SIGTERM; the next start continues. Hard links keep waiting checkpoints, even if the run
    deletes them; nothing is written into RUN. The exit code with --once is that of the worst
    export.

    Example: zexport watch run models --dtype bf16 --keep 3
    """
    from zexport.monitor import watch as monitor
    from zexport.monitor.policy import WatchOptions
    from zexport.monitor.snapshot import is_run
    from zexport.report.monitor import print_event, print_preview
    from zexport.report.text import Console

    gc.enable()  # unlike other commands, it runs for days
    given["interval_s"] = interval
    options = WatchOptions(**{n: given.pop(n) for n in WatchOptions.__dataclass_fields__})
    export = options_of(**given)
    console = Console(sys.stdout)
    if dry_run:
        if json:
            raise UsageError("--dry-run prints only text", hint="Omit --json")
        preview = monitor.preview(run, outs, options, export, follow_symlinks=follow_symlinks)
        print_preview(console, *preview)
        return
    events = monitor.watch(
        run,
        outs,
        options,
        export,
        follow_symlinks=follow_symlinks,
        verify=verify,
        is_over=_has_stdin_ended if until_eof else lambda: False,
    )
    if not (options.once or until_eof or quiet):
        absent = "" if exists(run) else ", which does not exist yet"
        click.echo(f"Watching {run}{absent}; exports go to {outs}. Ctrl-C ends it.", err=True)
    worst, is_silent = 0, True
    with closing(events):  # Ctrl-C may come while one is printed
        for event in events:
            worst, is_silent = max(worst, event.code), False
            if json:
                click.echo(json_text.dumps(event.to_json(), allow_nan=False))
            elif event.code or event.warnings or not quiet:
                print_event(console, event)
            sys.stdout.flush()
    if options.once and is_silent and not quiet:
        click.echo(f"{'Nothing new' if is_run(run) else 'No checkpoint'} in {run}.", err=True)
    click.get_current_context().exit(worst)


def _has_stdin_ended() -> bool:
    """Whether stdin has ended, or its last bytes are the sign of that."""
    from zexport.monitor.jobs import END_OF_INPUT

    if not select.select([0], [], [], 0)[0]:
        return False
    found = os.read(0, 1 << 16)
    return not found or END_OF_INPUT in found
