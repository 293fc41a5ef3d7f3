"""What an export would read, write and need; how worker threads divide ``--max-memory``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec import UNSET, Struct, UnsetType

from zexport.errors import MemoryLimitError
from zexport.export.plan import ExportPlan, FilePlan, Form, Origin
from zexport.findings import Finding
from zexport.model.hub_cache import GivenBase
from zexport.options import ExportOptions, ReshardOptions
from zexport.ranges.calculator import held_nbytes
from zexport.ranges.computed import updates_in
from zexport.storage.files import version
from zexport.storage.json import Natural
from zexport.storage.os_errors import reading

_PROCESS_NBYTES = 96 << 20
"""Memory of the process before the first chunk: interpreter, numpy and the plan."""

_CHUNK_NBYTES_MAX = 2 << 20
_CHUNK_NBYTES_MIN = 64 << 10
_BUFFERS_PER_JOB = 3
"""Source bytes, cast bytes, and a temporary."""


def _calculation_nbytes(shards: Iterable[FilePlan], jobs: int) -> int:
    """Return the memory for the largest computed tensor (a merged weight), without buffers."""
    updates = updates_in(tensor.source for shard in shards for tensor in shard.tensors)
    largest = max(updates, key=lambda update: held_nbytes(update, jobs), default=None)
    return 0 if largest is None else held_nbytes(largest, jobs)


def share_memory(
    options: ExportOptions | ReshardOptions, shards: Iterable[FilePlan] = ()
) -> tuple[int, int]:
    """Return worker threads and bytes of a chunk that stay within ``--max-memory``.

    Raises:
        MemoryLimitError: ``--max-memory`` is too small for one thread.
    """
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
            found=f"{options.max_memory_nbytes // _MB:,} MB",
            expected=f"{-(-(needed + _BUFFERS_PER_JOB * _CHUNK_NBYTES_MIN) // _MB):,} MB or more",
            hint="Raise --max-memory",
        )
    return jobs, chunk - chunk % 4096


_BYTES_PER_SECOND = 1_000_000_000
_MB = 1_000_000


class PlannedFile(Struct, frozen=True):
    """A safetensors file.

    Attributes:
        name: name in the output folder.
        nbytes: size, with its header.
        tensors: number of tensors.
    """

    name: str
    nbytes: Natural
    tensors: Natural


class PlannedSource(Struct, frozen=True):
    """A file that would be read, at least in part.

    Attributes:
        path: its path.
        nbytes: its size.
    """

    path: Path
    nbytes: Natural


class PlanSummary(Struct, frozen=True, kw_only=True):
    """What an export would do.

    Attributes:
        out_dir: the output folder.
        origin: the checkpoint.
        base: the base model; null without one.
        form: dtypes and names of the output.
        files: the safetensors files.
        side_files: the other files, except the manifest.
        sources: the files that would be read.
        tensors: number of tensors.
        nbytes_to_read: bytes of tensors to read.
        nbytes_to_write: bytes of the safetensors files.
        nbytes_compared: bytes of tensors that planning read to compare weights, if any.
        memory_nbytes: upper estimate of the memory of the process.
        seconds_at_1_gb_per_s: reading, then writing, at 10^9 bytes per second; an export overlaps
            them.
        jobs: worker threads.
        overwrite: an existing folder would be replaced.
        findings: findings of planning.
        warnings: what the user should act on.
        notes: what the user may want to know.
    """

    out_dir: Path
    origin: Origin
    base: GivenBase | None
    form: Form
    files: tuple[PlannedFile, ...]
    side_files: tuple[str, ...]
    sources: tuple[PlannedSource, ...]
    tensors: Natural
    nbytes_to_read: Natural
    nbytes_to_write: Natural
    nbytes_compared: Natural | UnsetType = UNSET
    memory_nbytes: Natural
    seconds_at_1_gb_per_s: float
    jobs: Natural
    overwrite: bool
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def summarize(plan: ExportPlan) -> PlanSummary:
    """Return the figures of a plan."""
    to_read = sum(tensor.source.nbytes for file in plan.shards for tensor in file.tensors)
    to_write = sum(file.nbytes for file in plan.shards)
    buffers_nbytes = plan.jobs * _BUFFERS_PER_JOB * plan.chunk_nbytes
    calculation_nbytes = _calculation_nbytes(plan.shards, plan.jobs)
    return PlanSummary(
        out_dir=plan.out_dir,
        origin=plan.origin,
        base=plan.base,
        form=plan.form,
        files=tuple(PlannedFile(f.filename, f.nbytes, len(f.tensors)) for f in plan.shards),
        side_files=tuple(file.filename for file in plan.side_files),
        sources=tuple(PlannedSource(file.path, file.version.nbytes) for file in plan.sources),
        tensors=sum(len(file.tensors) for file in plan.shards),
        nbytes_to_read=to_read,
        nbytes_to_write=to_write,
        nbytes_compared=plan.nbytes_compared or UNSET,
        memory_nbytes=_PROCESS_NBYTES + buffers_nbytes + calculation_nbytes,
        seconds_at_1_gb_per_s=(to_read + to_write) / _BYTES_PER_SECOND,
        jobs=plan.jobs,
        overwrite=plan.overwrite,
        findings=plan.findings,
        warnings=plan.warnings,
        notes=plan.notes,
    )


def side_nbytes(plan: ExportPlan) -> dict[str, int]:
    """Return the sizes of the side files by name."""
    nbytes = {}
    for side in plan.side_files:
        if side.origin is None:
            nbytes[side.filename] = len(side.content or b"")
        else:
            with reading(side.origin):
                nbytes[side.filename] = version(side.origin).nbytes
    return nbytes
