"""A pruning that is gone between two of the system's calls, and the next one."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.pruning import tensors_of
from tests.torture.faults import Calls, ended, forked, killing, watched
from zexport import prune


def count_calls(old: Path, out: Path) -> int:
    """How many of the system's calls a pruning makes; the run is as before."""
    kept = shutil.copytree(old.parent, old.parent.with_name("kept"), dirs_exist_ok=True)
    with watched(Calls()) as calls:
        prune(old, out)
    _put_back(kept, old.parent)
    return calls.counts.total()


def _put_back(kept: Path, run: Path) -> None:
    shutil.rmtree(run)
    shutil.copytree(kept, run)


def killed_at(old: Path, out: Path, at: int) -> None:
    """Kill a pruning before its ``at``-th call, then prune again; the run is as before."""
    run, scratch = old.parent, out.with_name("scratch")
    kept = run.with_name("kept")
    before = tensors_of(old, scratch)
    assert ended(forked(lambda: prune(old, out), killing(at))) in (0, -9)
    pruned = old.with_name(f"pruned-{old.name}")
    there = [path for path in (old, pruned) if path.exists()]
    assert len(there) == 1, there
    assert tensors_of(there[0], scratch) == before
    prune(old, out)
    assert not old.exists()
    left = {path.name for path in run.iterdir()} - {pruned.name, f"{pruned.name}.partial.lock"}
    assert left == {path.name for path in kept.iterdir()} - {old.name}, left
    assert tensors_of(pruned, scratch) == before
    assert prune(pruned, out).nbytes_freed == 0
    _put_back(kept, run)
