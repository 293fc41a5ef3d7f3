"""``zexport watch``: every checkpoint of a run exported while the training goes on."""

from __future__ import annotations

import gc
import json as json_text
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from zexport.storage.files import exists

if TYPE_CHECKING:
    from zexport.monitor.events import WatchEvent


_watch_options = together(
    click.option("--once", is_flag=True, help="Export what is complete, and end; for cron."),
    click.option(
        "--until-eof",
        is_flag=True,
        help="End when standard input does, once what is left is exported; for a parent process.",
    ),
    click.option(
        "--then",
        metavar="CMD",
        default="",
        help="Run CMD after each export, without a shell. The words {} and {step} become its "
        "folder and its step.",
    ),
    number_option("--keep", None, "Keep only the newest N exports."),
    number_option("--every", 1, "Export only checkpoints of every N steps."),
    click.option("--newest-only", is_flag=True, help="Skip what a newer checkpoint has overtaken."),
    click.option(
        "--interval",
        type=click.FloatRange(0.05),
        metavar="N",
        default=15,
        show_default=True,
        help="Seconds between two looks at RUN.",
    ),
)


@click.command(short_help="Export every checkpoint of a run while it trains.")
@click.argument("run", type=PATH)
@click.argument("outs", type=PATH)
@_watch_options
@export_options
@verify_option
@links_option
@storage_option
@click.option("--json", is_flag=True, help="Print one JSON object a line on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Tell of failures and warnings alone.")
def watch(
    *,
    run: Path,
    outs: Path,
    interval: float,
    until_eof: bool,
    verify: str,
    follow_symlinks: bool,
    json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Export every checkpoint of the run in RUN to OUTS, under its own name, once it is complete.

    It looks at RUN every --interval seconds until it is ended by Ctrl-C or SIGTERM, and goes on
    where it was when it is started again. Checkpoints that wait for their export are kept, even if
    the run removes them meanwhile; nothing is written into RUN. With --once the exit code is the
    worst of all.

    Example: zexport watch run models --dtype bf16 --keep 3
    """
    from zexport.checkpoint.resolve import list_run_checkpoints, list_tags
    from zexport.monitor import watch as beside
    from zexport.monitor.choices import WatchOptions

    gc.enable()  # unlike other commands it lives for days
    given["interval_s"] = interval
    asked = WatchOptions(**{n: given.pop(n) for n in WatchOptions.__dataclass_fields__})
    events = beside.watch(
        run,
        outs,
        asked,
        options_of(**given),
        follow_symlinks=follow_symlinks,
        verify=verify,
        is_over=_end_of_input() if until_eof else lambda: False,
    )
    if not (asked.once or until_eof or quiet):
        _begin(run, outs)
    with closing(events):  # an interrupt may come while one is told
        codes = [event.code for event in _told(events, json=json, quiet=quiet)]
    if asked.once and not (codes or quiet):
        is_run = bool(list_tags(run) or list_run_checkpoints(run))
        click.echo(f"{'Nothing new' if is_run else 'No ZeRO checkpoint'} in {run}.", err=True)
    click.get_current_context().exit(max(codes, default=0))


def _begin(run: Path, outs: Path) -> None:
    """Say what is watched, and that a run which is not there is waited for."""
    absent = "" if exists(run) else ", which is not there yet"
    click.echo(f"Watching {run}{absent}; exports go to {outs}. Ctrl-C ends it.", err=True)


def _told(events: Iterator[WatchEvent], *, json: bool, quiet: bool) -> Iterator[WatchEvent]:
    """The events, each once it is printed."""
    from zexport.report.monitor import print_event
    from zexport.report.text import PlainConsole

    warnings: tuple[str, ...] = ()
    for event in events:
        if json:
            click.echo(json_text.dumps(event.to_json(), allow_nan=False))
        elif event.code or event.warnings or not quiet:
            print_event(PlainConsole(sys.stdout), event, warnings)
            warnings = event.warnings or warnings
        sys.stdout.flush()
        yield event


def _end_of_input() -> Callable[[], bool]:
    """Whether standard input has ended, or a byte has said so; all else in it is passed over."""
    from zexport.monitor.jobs import END_OF_INPUT

    is_over = False

    def has_ended() -> bool:
        nonlocal is_over
        while not is_over and select.select([0], [], [], 0)[0]:
            found = os.read(0, 1 << 16)
            is_over = not found or END_OF_INPUT in found
        return is_over

    return has_ended
