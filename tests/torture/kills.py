"""Kill processes before any system call, and run them again."""

from __future__ import annotations

import shutil
from collections import Counter
from random import Random

from tests.support.stopping import Job, files
from tests.torture.faults import Calls, ended, forked, killing, watched

_CALLS_MAX = 260
"""Workers are killed before one of these calls."""


def count_calls(job: Job) -> Counter[str]:
    """Return how often each system call is made; remove the output."""
    with watched(Calls()) as calls:
        job.made()
    return calls.counts


def killed_at(job: Job, at: int, whole: dict[str, bytes]) -> int:
    """Kill the job before a call, run it again; return how many shards were resumed."""
    assert ended(forked(job.run, killing(at))) in (0, -9)
    resumed = 0
    if not job.out.exists():
        resumed = len(job.run().resumed)
    assert files(job.out) == whole, f"killed at {at}: an incomplete folder, or other bytes"
    _clear(job)
    return resumed


def killed_twice(job: Job, first: int, step: int, whole: dict[str, bytes]) -> int:
    """Kill the job before a call, and its rerun before every ``step``-th; count all kills."""
    kills, second, codes = 0, 1 + first % step, [-9, -9]
    while codes == [-9, -9]:
        codes = []
        for at in (first, second):
            if not job.out.exists():
                codes.append(ended(forked(job.run, killing(at))))
            assert not job.out.exists() or files(job.out) == whole, f"half made: {first}, {second}"
        assert {*codes} <= {0, -9}
        if not job.out.exists():
            job.run()
        assert files(job.out) == whole, f"killed at {first} and {second}: other bytes"
        _clear(job)
        kills, second = kills + codes.count(-9), second + step
    return kills


def killed_workers(
    job: Job, count: int, times: int, seed: int, whole: dict[str, bytes]
) -> Counter[str]:
    """Write a folder with ``count`` workers repeatedly; kill and restart them at random."""
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
        assert files(job.out) == whole, "the workers wrote other bytes"
        found["folders"] += 1
        _clear(job)
    return found


def _started(job: Job, number: int, count: int, chance: Random) -> int:
    """Start a part; most are killed at a random call."""
    calls = killing(chance.randrange(1, _CALLS_MAX)) if chance.random() < 0.7 else Calls()
    return forked(lambda: job.part(number, count), calls)


def _clear(job: Job) -> None:
    """Remove the output, and what a kill after publishing leaves: locks and the journal."""
    journal = job.partial.with_name(f"{job.partial.name}.journal")
    assert job.left() <= {job.out.name, journal.name}, job.left()
    shutil.rmtree(job.out)
    shutil.rmtree(journal, ignore_errors=True)
    for lock in job.out.parent.glob(f"{job.out.name}.*.lock"):
        lock.unlink()
