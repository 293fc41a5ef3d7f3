"""What a watch tells, a line for each thing that has happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zexport.report.text import Console, duration, near, print_line, size

if TYPE_CHECKING:
    from zexport.beside.events import WatchEvent

_SAID = {
    "exported": "exported to {out} in {time}",
    "failed": "not exported: {why}",
    "lost": "lost: {why}",
    "skipped": "skipped: {why}",
    "waiting": "waits: {why}",
    "ran": "the command after it has ended well in {time}",
    "command-failed": "{why}",
    "removed": "{out} is removed, as newer exports are there",
    "pruned": "pruned, {freed} are free again",
    "not-pruned": "not pruned: {why}",
    "left": "its export stays: {why}",
}


def print_event(console: Console, event: WatchEvent) -> None:
    """One line, and one for each warning."""
    why = event.why if event.failure is None else event.failure.message
    told = {
        "out": near(event.out),
        "time": duration(event.seconds),
        "freed": size(event.nbytes_freed),
    }
    said = _SAID[event.event.value].format(why=why, **told)
    step = "" if event.step is None else f" (step {event.step:,})"
    style = "bold red" if event.code else "bold green" if event.event.value == "exported" else ""
    print_line(console, f"{event.checkpoint}{step}: {said}", style)
    for warning in event.warnings:
        print_line(console, f"  Warning: {warning}", "yellow")
