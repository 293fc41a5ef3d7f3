"""A plan in figures: what an export would read, write and need; memory is shared to suffice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec import UNSET, Struct, UnsetType

from zexport.errors import MemoryLimitError
from zexport.findings import Finding
from zexport.model.hub_cache import GivenBase
from zexport.options import ExportOptions, ReshardOptions
from zexport.plan.plan import ExportPlan, FilePlan, Form, Origin
from zexport.ranges.calculator import held_nbytes
from zexport.ranges.computed import updates_in
from zexport.store.files import reading, version
from zexport.store.json import Natural

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


def share_memory(
    options: ExportOptions | ReshardOptions, shards: Iterable[FilePlan] = ()
) -> tuple[int, int]:
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
        name: name in the folder.
        nbytes: its size, header included.
        tensors: tensors in it.
    """

    name: str
    nbytes: Natural
    tensors: Natural


class PlannedSource(Struct, frozen=True):
    """A file that would be read.

    Attributes:
        path: where it lies.
        nbytes: its size, of which a part is read.
    """

    path: Path
    nbytes: Natural


class PlanSummary(Struct, frozen=True, kw_only=True):
    """The figures of the whole job.

    Attributes:
        out_dir: the folder that would be made.
        origin: the checkpoint that it would be made from.
        base: the model that was given for what the checkpoint lacks; null without one.
        form: what it would be made as.
        files: the safetensors files.
        side_files: the other files, but for the manifest.
        sources: the files that would be read.
        tensors: tensors that would be written.
        nbytes_to_read: bytes of tensors to read.
        nbytes_to_write: bytes of the safetensors files.
        nbytes_compared: bytes that planning itself had to read of tensors, to compare weights that
            it depends on; only where there were any.
        memory_nbytes: upper estimate of the memory of the process.
        seconds_at_1_gb_per_s: reading and writing one after the other, at 10^9 bytes a second; the
            real job overlaps them.
        jobs: worker threads.
        overwrite: an existing folder would be replaced.
        findings: what was found while planning, and does not end the export.
        warnings: what should be known before the result is used.
        notes: what may be of interest.
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
    """The figures of a plan."""
    to_read = sum(tensor.source.nbytes for file in plan.shards for tensor in file.tensors)
    to_write = sum(file.nbytes for file in plan.shards)
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
        memory_nbytes=memory_nbytes(plan),
        seconds_at_1_gb_per_s=(to_read + to_write) / _BYTES_PER_SECOND,
        jobs=plan.jobs,
        overwrite=plan.overwrite,
        findings=plan.findings,
        warnings=plan.warnings,
        notes=plan.notes,
    )


def side_nbytes(plan: ExportPlan) -> dict[str, int]:
    """The sizes of the files beside the shards, by name; those that are copied are looked at."""
    nbytes = {}
    for side in plan.side_files:
        if side.origin is None:
            nbytes[side.filename] = len(side.content or b"")
        else:
            with reading(side.origin):
                nbytes[side.filename] = version(side.origin).nbytes
    return nbytes
