"""Processes that are gone between two of the system's calls, and the runs after them."""

from __future__ import annotations

import shutil
from collections import Counter
from random import Random

from tests.support.stopping import Job, files
from tests.torture.faults import Calls, ended, forked, killing, watched

_CALLS_MAX = 260
"""Among so many calls a worker is killed; those that make fewer end well."""


def count_calls(job: Job) -> Counter[str]:
    """How often the system is called, by what; nothing is left of it."""
    with watched(Calls()) as calls:
        job.made()
    return calls.counts


def killed_at(job: Job, at: int, whole: dict[str, bytes]) -> int:
    """Kill it before its ``at``-th call, then run it; how many shards were taken over."""
    assert ended(forked(job.run, killing(at))) in (0, -9)
    taken_over = 0
    if not job.out.exists():
        taken_over = len(job.run().resumed)
    assert files(job.out) == whole, f"killed at {at}: an incomplete folder, or other bytes"
    _clear(job)
    return taken_over


def killed_workers(
    job: Job, count: int, times: int, seed: int, whole: dict[str, bytes]
) -> Counter[str]:
    """Make a folder by so many workers, again and again; any is killed anywhere, and restarted."""
    chance = Random(seed)  # noqa: S311 - nothing secret
    found: Counter[str] = Counter()
    while found["kills"] < times:
        waiting = [*range(1, count + 1)]
        while waiting:
            started = {n: _started(job, n, count, chance) for n in waiting}
            codes = {n: ended(process) for n, process in started.items()}
            assert {*codes.values()} <= {0, -9}, codes
            waiting = [n for n, code in codes.items() if code]
            found["kills"] += len(waiting)
            if job.out.exists():
                assert files(job.out) == whole, "an incomplete folder has the output's name"
        assert files(job.out) == whole, "the workers gave other bytes"
        found["folders"] += 1
        _clear(job)
    return found


def _started(job: Job, number: int, count: int, chance: Random) -> int:
    """A process that writes a part, and is killed at a random call or not."""
    calls = killing(chance.randrange(1, _CALLS_MAX)) if chance.random() < 0.7 else Calls()
    return forked(lambda: job.part(number, count), calls)


def _clear(job: Job) -> None:
    """Remove the output; nothing lies beside it but a lock of a process that was killed."""
    assert job.left() == {job.out.name}, job.left()
    shutil.rmtree(job.out)
    for lock in job.out.parent.glob(f"{job.out.name}.*.lock"):
        lock.unlink()
