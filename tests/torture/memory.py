"""Memory that the system refuses: one allocation, or all beyond a limit."""

from __future__ import annotations

import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.forked import typed
from tests.support.stopping import Job, files
from zexport.cli import main as entry

try:
    import _testcapi
except ImportError:  # some builds of Python lack it
    _testcapi = None

_PAGE = resource.getpagesize()
_SECONDS = 10
"""A thread that has no memory to start, or to set a future's result, hangs Python (gh-140746)."""


def refused_memory(
    job: Job, whole: dict[str, bytes], allocations: Iterable[int], limits: Iterable[int]
) -> str:
    """Refuse one allocation of Python, or all memory beyond so many bytes; rerun; describe."""
    one, beyond = Counter[str](), Counter[str]()
    for number in allocations if _testcapi else ():
        one[_run(job, whole, lambda: _testcapi.set_nomemory(number, number + 1))] += 1  # noqa: B023
    for nbytes in limits:
        beyond[_run(job, whole, lambda: _limit(nbytes))] += 1  # noqa: B023
    assert not beyond["ended by Python"]
    assert one["ended by Python"] <= 1 + one.total() // 10, "usually a SystemError, or a TypeError"
    assert (one + beyond)["hung in Python"] <= 1 + (one + beyond).total() // 50
    return f"one allocation: {dict(one)}; a limit: {dict(beyond)}"


def _limit(nbytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, used + nbytes))


def _run(job: Job, whole: dict[str, bytes], refuse: Callable[[], None]) -> str:
    """Type the command, which gets less memory from its start on."""
    run = entry.run

    def limited(words: Sequence[str]) -> int:
        refuse()
        return run(words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "run", limited)
        words = ("--layout", "memory", "--max-shard-size", "1MB", "--jobs", "2")
        done = typed("consolidate", job.source, job.out, *words, limit_s=_SECONDS)
    if job.out.exists():
        what = "exported"
    elif done.stderr.startswith("Error: ") and "Traceback" not in done.stderr:
        what = "refused"
    else:
        what = "hung in Python" if done.returncode == -9 else "ended by Python"
    assert (what == "exported") >= (done.returncode == 0), done
    if what != "exported":
        job.run()
    assert files(job.out) == whole, done
    shutil.rmtree(job.out)
    shutil.rmtree(job.partial.with_name(f"{job.partial.name}.journal"), ignore_errors=True)
    return what
