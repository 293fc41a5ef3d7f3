"""Kill a pruning, or a watch that removes an export, before calls that change files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.support.pruning import AS_STORED, state_of, tensors_of, trainers_run
from tests.torture.faults import CHANGES, Calls, ended, forked, killing, watched
from zexport import EventKind, WatchOptions, consolidate, prune, verify_export, watch

_KEEP = WatchOptions(once=True, interval_s=0.2, keep=1)


def killed_prunings(folder: Path, step: int = 1) -> int:
    """Kill before every ``step``-th call, the last first, and prune again; count kills."""
    old, out, scratch = trainers_run(folder / "run"), folder / "out", folder / "scratch"
    consolidate(old, out, AS_STORED)
    tensors, whole = tensors_of(old, scratch), state_of(old)
    pruned = old.with_name(f"pruned-{old.name}")

    def check_killed() -> None:
        assert old.exists() or pruned.exists(), "neither name is there"
        assert not old.exists() or state_of(old) == whole, "a resume finds less than before"
        assert not pruned.exists() or tensors_of(pruned, scratch) == tensors

    def check_done() -> None:
        left = {path.name for path in old.parent.iterdir()}
        assert left <= {"checkpoint-4", pruned.name, f"{pruned.name}.partial.lock"}, left
        assert tensors_of(pruned, scratch) == tensors

    return _killed(old.parent, lambda: prune(old, out), check_killed, check_done, step)


def killed_removals(folder: Path, step: int = 1) -> int:
    """Kill ``watch --keep 1`` before every ``step``-th call, and watch again; count kills."""
    run, outs = folder / "run", folder / "outs"
    trainers_run(run)
    made = [one.event for one in watch(run, outs, WatchOptions(once=True, interval_s=0.2))]
    assert made == [EventKind.EXPORTED] * 2

    def remove() -> None:
        assert {one.event for one in watch(run, outs, _KEEP)} <= {EventKind.REMOVED}

    def check_killed() -> None:
        for out in outs.glob("checkpoint-*"):
            assert verify_export(out, against=run / out.name).ok

    def check_done() -> None:
        assert {path.name for path in outs.iterdir()} == {".zexport-watch", "checkpoint-4"}
        assert not [*(outs / ".zexport-watch").glob("removed-*")]

    return _killed(outs, remove, check_killed, check_done, step)


def _killed(
    folder: Path,
    act: Callable[[], object],
    check_killed: Callable[[], None],
    check_done: Callable[[], None],
    step: int,
) -> int:
    kept = shutil.copytree(folder, folder.with_name("kept"))

    def put_back() -> None:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)

    with watched(Calls(names=CHANGES)) as calls:
        act()
    check_done()
    points = range(calls.counts.total(), 0, -step)
    for at in points:
        put_back()
        assert ended(forked(act, killing(at, CHANGES))) == -9
        check_killed()
        act()
        check_done()
    return len(points)
