"""Several workers side by side, any of them gone between two of the system's calls."""

from __future__ import annotations

import os
import shutil
import traceback
from collections import Counter
from random import Random

from tests.support.stopping import files
from tests.torture.faults import Calls, killing, watched
from zexport.export.plan import ExportPlan
from zexport.run.shares import Share
from zexport.run.workers import run_part

_KILLED = 9
_CALLS_MAX = 260
"""Among so many calls a worker is killed; those that make fewer end well."""


def killed_workers(
    plan: ExportPlan, count: int, times: int, seed: int, whole: dict[str, bytes]
) -> Counter[str]:
    """Make a folder by so many workers, again and again; any is killed anywhere, and started anew.

    Raises:
        AssertionError: something half-made had the output's name, the outcome differs, a worker
            ended with an error, or something is left beside the output.
    """
    chance = Random(seed)  # noqa: S311 - nothing secret
    found: Counter[str] = Counter()
    while found["kills"] < times:
        waiting, folders = [*range(1, count + 1)], plan.out_dir.parent
        while waiting:
            started = {_started(plan, Share(n, count), chance): n for n in waiting}
            waiting = []
            for process, number in started.items():
                _, status = os.waitpid(process, 0)
                assert status in (0, _KILLED), f"worker {number} ended with {status}"
                waiting += [number] * (status == _KILLED)
            found["kills"] += len(waiting)
            if plan.out_dir.exists():
                assert files(plan.out_dir) == whole, "an incomplete folder has the output's name"

        assert files(plan.out_dir) == whole, "the workers gave other bytes"
        left = {one.name for one in folders.iterdir() if one.name.startswith("out.")}
        assert not {name for name in left if not name.endswith(".lock")}, f"left {sorted(left)}"
        found["folders"] += 1
        shutil.rmtree(plan.out_dir)
        for name in left:
            (folders / name).unlink()
    return found


def _started(plan: ExportPlan, share: Share, chance: Random) -> int:
    """A process that writes a share, and is killed at a random call or not."""
    calls = killing(chance.randrange(1, _CALLS_MAX)) if chance.random() < 0.7 else Calls()
    if (child := os.fork()) == 0:
        status = 1
        try:
            with watched(calls):
                run_part(plan, share)
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    return child
