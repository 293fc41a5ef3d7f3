"""A pruning that is gone between two of the system's calls, and the next one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.pruning import tensors_of
from tests.torture.faults import Calls, killing, watched
from zexport import prune
from zexport.errors import NotACheckpointError


def count_calls(old: Path, out: Path, *, delete: bool = False) -> int:
    """How many of the system's calls a pruning makes; the run is as before."""
    kept = shutil.copytree(old.parent, old.parent.with_name("kept"), dirs_exist_ok=True)
    with watched(Calls()) as calls:
        prune(old, out, delete=delete)
    _put_back(kept, old.parent)
    return calls.counts.total()


def _put_back(kept: Path, run: Path) -> None:
    shutil.rmtree(run)
    shutil.copytree(kept, run)


def killed_at(old: Path, out: Path, at: int, *, delete: bool = False) -> None:
    """Kill a pruning before its ``at``-th call, then prune again; the run is as before.

    Raises:
        AssertionError: what was left was neither whole nor called pruned, or lacked a weight, or
            the next pruning did not end as the first would have.
    """
    run, scratch = old.parent, out.with_name("scratch")
    kept = run.with_name("kept")
    before = tensors_of(old, scratch)
    child = os.fork()
    if child == 0:
        with watched(killing(at)):
            prune(old, out, delete=delete)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, 9), f"ended with {status}"
    pruned = old.with_name(f"pruned-{old.name}")
    there = [path for path in (old, pruned) if path.exists()]
    assert len(there) == (0 if delete and status == 0 else min(len(there), 1)), there
    is_going = any(there) and '"is_deleted": true' in _note(there[0])
    files = [path for folder in there for path in folder.rglob("*") if path.is_file()]
    if files and not is_going:
        assert tensors_of(there[0], scratch) == before
    if files:
        prune(old, out, delete=delete)
    elif there:  # all went but the folders
        with pytest.raises(NotACheckpointError, match="does not exist"):
            prune(old, out, delete=delete)
    assert not old.exists()
    assert pruned.exists() is not delete
    left = {path.name for path in run.iterdir()} - {pruned.name, f"{pruned.name}.partial.lock"}
    assert left == {path.name for path in kept.iterdir()} - {old.name}, left
    if not delete:
        assert tensors_of(pruned, scratch) == before
        assert prune(pruned, out).nbytes_freed == 0
    _put_back(kept, run)


def _note(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.rglob("zexport_pruned.json"))
