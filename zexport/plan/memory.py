"""What memory an export takes: how it is shared among the workers, and whether it suffices."""

from __future__ import annotations

from collections.abc import Iterable

from zexport.errors import MemoryLimitError
from zexport.options import ExportOptions
from zexport.plan.plan import ExportPlan, FilePlan
from zexport.ranges.calculator import held_nbytes
from zexport.ranges.computed import updates_in

_PROCESS_NBYTES = 96 << 20
"""What the process itself takes before the first chunk: interpreter, numpy, and the plan."""

_CHUNK_NBYTES_MAX = 2 << 20
_CHUNK_NBYTES_MIN = 64 << 10
_BUFFERS_PER_JOB = 3
"""Stored bytes, cast bytes, and the temporary of a cast."""


def memory_nbytes(plan: ExportPlan) -> int:
    """Upper estimate of the memory that running ``plan`` takes."""
    calculation = _calculation_nbytes(plan.shards, plan.jobs)
    return _PROCESS_NBYTES + plan.jobs * _BUFFERS_PER_JOB * plan.chunk_nbytes + calculation


def _calculation_nbytes(shards: Iterable[FilePlan], jobs: int) -> int:
    """What working out the tensors takes that are in no file, beside the buffers."""
    updates = updates_in(tensor.source for shard in shards for tensor in shard.tensors)
    largest = max(updates, key=lambda update: held_nbytes(update, jobs), default=None)
    return 0 if largest is None else held_nbytes(largest, jobs)


def share_memory(options: ExportOptions, shards: Iterable[FilePlan] = ()) -> tuple[int, int]:
    """Worker threads and bytes of a chunk that stay within ``--max-memory``."""
    jobs = max(1, options.jobs)
    if options.max_memory_nbytes is None:
        return jobs, _CHUNK_NBYTES_MAX
    needed = _PROCESS_NBYTES + _calculation_nbytes(shards, 1)
    extra = _calculation_nbytes(shards, 2) - _calculation_nbytes(shards, 1)
    spare = options.max_memory_nbytes - needed
    jobs = min(jobs, max(1, spare // (extra + _BUFFERS_PER_JOB * _CHUNK_NBYTES_MIN)))
    chunk = min(_CHUNK_NBYTES_MAX, (spare - (jobs - 1) * extra) // (_BUFFERS_PER_JOB * jobs))
    if chunk < _CHUNK_NBYTES_MIN:
        raise MemoryLimitError(
            "--max-memory is too small",
            found=f"{options.max_memory_nbytes} bytes",
            expected=f"{needed + _BUFFERS_PER_JOB * _CHUNK_NBYTES_MIN} bytes or more",
            hint="Raise --max-memory",
        )
    return jobs, chunk - chunk % 4096
