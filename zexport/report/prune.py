"""What was removed of a checkpoint, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zexport.report.text import Console, plural, print_line, print_list, size

if TYPE_CHECKING:
    from zexport.beside.prune import PruneReport


def print_prune(console: Console, done: PruneReport) -> None:
    """A line of what is free again and what is left, and what was held against what."""
    freed, before = size(done.nbytes_freed), size(done.nbytes_before)
    if done.is_dry_run:
        what = "would be removed" if done.is_deleted else "would be freed"
        print_line(console, f"{done.checkpoint}: {freed} of {before} {what}")
        return
    print_line(console, f"{done.checkpoint}: {freed} of {before} freed", "bold green")
    if done.pruned is not None:
        print_line(console, f"It is {done.pruned} now, and exports as before")
    if done.tensors:
        print_line(console, f"Proof: {plural(done.tensors, 'tensor')} of {done.export}, all equal")
    print_list(console, "Left out, as they cannot be written safely", done.left_out)
