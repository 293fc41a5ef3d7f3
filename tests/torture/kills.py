"""A process that is gone between two of the system's calls, and the run after it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.support.stopping import files
from tests.torture.faults import Calls, killing, watched
from zexport.export.plan import ExportPlan
from zexport.run.execute import run_plan


def count_calls(plan: ExportPlan) -> int:
    """How many of the system's calls an export makes; nothing is left of it."""
    with watched(Calls()) as calls:
        run_plan(plan)
    shutil.rmtree(plan.out_dir)
    return calls.counts.total()


def killed_at(plan: ExportPlan, at: int, whole: dict[str, bytes]) -> int:
    """Kill an export before its ``at``-th call, then run it; how many shards were taken over.

    Raises:
        AssertionError: something half-made had the output's name, or the rerun differs.
    """
    child = os.fork()
    if child == 0:
        with watched(killing(at)):
            run_plan(plan)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, 9), f"ended with {status}"
    if plan.out_dir.exists():
        assert files(plan.out_dir) == whole, "an incomplete folder has the output's name"
        rerun = 0
    else:
        rerun = len(run_plan(plan).resumed)
        assert files(plan.out_dir) == whole, "the rerun gave other bytes"
    _assert_tidy(plan)
    shutil.rmtree(plan.out_dir)
    return rerun


def _assert_tidy(plan: ExportPlan) -> None:
    """Nothing lies beside the output; a kill after the last rename leaves the lock alone."""
    place = plan.out_dir.parent
    beside = {path.name for path in place.iterdir() if path.name.startswith(plan.out_dir.name)}
    lock = f"{plan.out_dir.name}.partial.lock"
    assert beside <= {plan.out_dir.name, lock}, f"left {sorted(beside)}"
    Path(place / lock).unlink(missing_ok=True)
