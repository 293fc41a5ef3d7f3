"""Checkpoints exported and pruned beside a training: what happened to each, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zexport.report.text import Console, duration, near, plural, print_line, print_list, size

if TYPE_CHECKING:
    from zexport.monitor.events import WatchEvent
    from zexport.monitor.prune import PruneReport

_SAID = {
    "exported": "exported to {out} in {time}",
    "failed": "not exported: {why}",
    "lost": "lost: {why}",
    "changed": "not exported yet: {why}",
    "skipped": "skipped: {why}",
    "waiting": "waits: {why}",
    "ran": "its --then command ended well, after {time}",
    "command-failed": "{why}",
    "removed": "{out} is removed, as newer exports are there",
    "left": "its export stays: {why}",
    "not-again": "not exported again: {why}",
}


def print_event(console: Console, event: WatchEvent, known: Sequence[str] = ()) -> None:
    """One line, and one for each warning, or for all where they are ``known`` from the last one."""
    why = event.why if event.failure is None else event.failure.message
    out, time = near(event.out), duration(event.seconds)
    said = _SAID[event.event.value].format(why=why, out=out, time=time)
    step = "" if event.step is None else f" (step {event.step:,})"
    style = "bold red" if event.code else "bold green" if event.event.value == "exported" else ""
    print_line(console, f"{event.checkpoint}{step}: {said}", style)
    same = bool(event.warnings) and event.warnings == known
    for warning in () if same else event.warnings:
        print_line(console, f"  Warning: {warning}", "yellow")
    if same:
        print_line(console, "  Warnings: the same as of the export before", "yellow")


def print_prune(console: Console, done: PruneReport) -> None:
    """A line of what is free again and what is left, and what was held against what."""
    freed, before = size(done.nbytes_freed), size(done.nbytes_before)
    checkpoint = near(done.checkpoint)
    if not done.nbytes_freed:
        print_line(console, f"{checkpoint} is pruned already: nothing is left to remove")
    elif done.is_dry_run:
        print_line(console, f"{checkpoint}: {freed} of {before} would be freed")
    else:
        print_line(console, f"{checkpoint}: {freed} of {before} freed", "bold green")
    if done.pruned is not None and done.pruned != done.checkpoint:
        print_line(console, f"It is {near(done.pruned)} now, and exports as before")
    if done.tensors:
        held = f"{plural(done.tensors, 'tensor')} of {near(done.export)}"
        print_line(console, f"Proof: {held}, all equal")
    print_list(console, "Left out, as they cannot be written safely", done.left_out)
