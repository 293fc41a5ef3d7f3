"""A plan in figures: what an export would read, write and need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET, UnsetType

from zexport.findings import Finding
from zexport.plan.memory import memory_nbytes
from zexport.plan.plan import ExportPlan
from zexport.store.files import version
from zexport.store.json import Natural

_BYTES_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A safetensors file.

    Attributes:
        name: name in the folder.
        nbytes: its size, header included.
        tensors: tensors in it.
    """

    name: str
    nbytes: Natural
    tensors: Natural


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """A file that would be read.

    Attributes:
        path: where it lies.
        nbytes: its size, of which a part is read.
    """

    path: Path
    nbytes: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """The figures of the whole job.

    Attributes:
        out_dir: the folder that would be made.
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
        warnings: what should be known beforehand.
    """

    out_dir: Path
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


def summarize(plan: ExportPlan) -> PlanSummary:
    """The figures of a plan."""
    to_read = sum(tensor.source.nbytes for file in plan.shards for tensor in file.tensors)
    to_write = sum(file.nbytes for file in plan.shards)
    return PlanSummary(
        out_dir=plan.out_dir,
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
    )


def side_nbytes(plan: ExportPlan) -> dict[str, int]:
    """The sizes of the files beside the shards, by name; those that are copied are looked at."""
    return {
        side.filename: len(side.content or b"")
        if side.origin is None
        else version(side.origin).nbytes
        for side in plan.side_files
    }
