"""Events of a watch, its decisions, and the result of pruning, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zexport.report.text import Console, duration, near, plural, print_line, print_list, size

if TYPE_CHECKING:
    from zexport.monitor.policy import Decisions, WatchEvent
    from zexport.monitor.prune import PruneReport
    from zexport.monitor.snapshot import Snapshot

_TEXT = {
    "exported": "exported to {out} in {time}",
    "failed": "not exported: {why}",
    "lost": "lost: {why}",
    "changed": "not exported yet: {why}",
    "skipped": "skipped: {why}",
    "waiting": "waits: {why}",
    "ran": "its --then command succeeded after {time}",
    "command-failed": "{why}",
    "removed": "{out} was removed (--keep)",
    "left": "its export stays: {why}",
    "not-again": "not exported again: {why}",
}


def print_event(console: Console, event: WatchEvent) -> None:
    style = "bold red" if event.code else "bold green" if event.event == "exported" else ""
    print_line(console, describe_event(event), style)
    for warning in event.warnings:
        print_line(console, f"  Warning: {warning}", "yellow")


def describe_event(event: WatchEvent) -> str:
    why = event.why if event.failure is None else event.failure.message
    out, time = near(event.out), duration(event.seconds)
    text = _TEXT[event.event].format(why=why, out=out, time=time)
    return f"{_title(event.checkpoint, event.step)}: {text}"


def print_preview(console: Console, seen: Snapshot, decided: Decisions) -> None:
    """Print what a watch would do with each checkpoint and each export, and why."""
    for name, one in decided.checkpoints.items():
        title = _title(name, seen.checkpoints[name].step)
        print_line(console, f"{title}: {one.verdict}: {one.reason}")
    for name, one in decided.exports.items():
        print_line(console, f"export {name}: {one.verdict}: {one.reason}")


def _title(name: str, step: int | None) -> str:
    return name if step is None else f"{name} (step {step:,})"


def print_prune(console: Console, done: PruneReport) -> None:
    freed, before = size(done.nbytes_freed), size(done.nbytes_before)
    checkpoint = near(done.checkpoint)
    if not done.nbytes_freed:
        print_line(console, f"{checkpoint} is already pruned")
    elif done.is_dry_run:
        print_line(console, f"{checkpoint}: {freed} of {before} would be freed")
    else:
        print_line(console, f"{checkpoint}: {freed} of {before} freed", "bold green")
    if done.pruned is not None and done.pruned != done.checkpoint:
        print_line(console, f"It is {near(done.pruned)} now, and exports as before")
    print_line(
        console, f"Proof: {plural(done.tensors, 'tensor')} of {near(done.export)}, all equal"
    )
    print_list(console, "Removed, as they cannot be rewritten", done.left_out)
