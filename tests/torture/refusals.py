"""Refuse the n-th system call, for every n: once, several times, or always."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.stopping import Job, files
from tests.torture.faults import READS, RENAMES, SYNCS, WRITES, failing, watched
from tests.torture.kills import count_calls
from zexport import CheckpointError, OutputError

ALWAYS = 1 << 30
_CUT_SHORT = (errno.EINTR, errno.EAGAIN)
_PASSING = (*_CUT_SHORT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@dataclass(frozen=True)
class Fault:
    """Calls that fail, with which errno, and how often."""

    names: tuple[str, ...]
    number: int
    times: int

    @property
    def passes(self) -> bool:
        """Whether an export succeeds in spite of it."""
        once_only = {*SYNCS, *RENAMES} & {*self.names} and self.number not in _CUT_SHORT
        return self.times < 4 and self.number in _PASSING and not once_only

    @property
    def ends(self) -> bool:
        """Whether it must end an export: the disk may have lost bytes."""
        return self.names == SYNCS and self.number not in _CUT_SHORT


FAULTS = (
    Fault(("pwrite",), errno.ENOSPC, ALWAYS),
    Fault(("pwrite",), errno.EIO, ALWAYS),
    Fault(("pwrite",), errno.ESTALE, 3),
    Fault(("posix_fallocate", "ftruncate"), errno.ENOSPC, ALWAYS),
    Fault(SYNCS, errno.EIO, 1),
    Fault(SYNCS, errno.EINTR, 3),
    Fault(RENAMES, errno.EIO, 1),
    Fault(("mkdir", "open"), errno.EACCES, ALWAYS),
    Fault(READS, errno.EIO, ALWAYS),
    Fault(READS, errno.EIO, 3),
    Fault(READS, errno.ESTALE, 3),
    Fault(READS, errno.EAGAIN, 2),
    Fault((*WRITES, *SYNCS, *RENAMES), errno.ENOSPC, 1),
)


def every_fault(
    job: Job, fault: Fault, whole: dict[str, bytes], step: int | None = None
) -> Iterator[bool]:
    """Refuse every ``step``-th call; yield whether that ended the export.

    By default, refuse the first call and one in the middle.
    """
    counts = count_calls(job)
    count = sum(counts[name] for name in fault.names)
    for at in range(1, count + 1, step or max(1, count // 2)):
        yield _refused(job, fault, at, whole)


def _refused(job: Job, fault: Fault, at: int, whole: dict[str, bytes]) -> bool:
    """Run with a fault, then without; return whether the first run failed."""
    stopped = False
    calls = failing(fault.names, at, fault.number, times=fault.times)
    try:
        with watched(calls):
            job.run()
    except (OutputError, CheckpointError):
        stopped = True
    if stopped:
        assert not job.out.exists(), f"{fault} at {at}: the output exists"
        kept = {path.name for path in job.partial.glob("model-*.safetensors")}
        resumed = {*job.run().resumed}
        if "open" not in fault.names:  # else nothing can be removed
            assert kept == resumed, f"{fault} at {at}: an unfinished file is left"
    happened = sum(calls.counts[name] for name in fault.names) >= at
    assert not (stopped and fault.passes), f"{fault} at {at}: was not retried"
    assert stopped or not (happened and fault.ends), f"{fault} at {at}: was ignored"
    assert files(job.out) == whole, f"{fault} at {at}: other bytes"
    shutil.rmtree(job.out)
    return stopped
