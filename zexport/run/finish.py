"""Completing a folder whose parts are written: sources proved as a whole, and the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from msgspec import Struct

from zexport.findings import Finding, FindingKind
from zexport.plan.plan import ExportPlan, TensorPlan
from zexport.ranges.casts import Statistics
from zexport.ranges.dtypes import DType
from zexport.run.begin import Begun, Workplace, write_file
from zexport.run.manifest import (
    MANIFEST_NAME,
    FileEntry,
    SourceEntry,
    TensorEntry,
    new_manifest,
)
from zexport.run.pieces import TensorReader

_OVERFLOW = {
    DType.F32: FindingKind.FP32_OVERFLOW,
    DType.F16: FindingKind.FP16_OVERFLOW,
    DType.BF16: FindingKind.BF16_OVERFLOW,
}


class Finished(Struct, frozen=True):
    """A folder that lacks nothing but its name: everything in it, and what was remarkable."""

    files: Mapping[str, FileEntry]
    findings: tuple[Finding, ...]


def finish(
    work: Workplace, begun: Begun, reader: TensorReader, findings: tuple[Finding, ...]
) -> Finished:
    """Complete a folder, whoever wrote its parts.

    Every file has its receipt, what was read for them was what was saved, and ``findings`` go on
    from those before.
    """
    plan, folder = work.plan, work.folder
    work.receipts.check_plan()
    files = dict(begun.side_files)
    tensors: dict[str, TensorEntry] = {}
    for file in plan.shards:
        receipt = work.receipts.of(file)
        reader.take(receipt.ranges)
        files[file.filename] = FileEntry(receipt.nbytes, receipt.blake3)
        tensors |= {
            tensor.name: TensorEntry(tensor.dtype, tensor.shape, file.filename, digest)
            for tensor, digest in zip(file.tensors, receipt.tensor_digests(), strict=True)
        }
        for tensor in file.tensors if receipt.remarkable else ():
            if (seen := receipt.remarkable.get(tensor.name)) is not None:
                findings += tuple(_findings(tensor, seen, plan.allow))
    manifest = new_manifest(
        provenance=plan.provenance,
        sources=source_entries(plan, reader.finish()),
        tensors=tensors,
        files=dict(files),
        findings=findings,
    )
    files[MANIFEST_NAME] = write_file(folder / MANIFEST_NAME, manifest.lines())
    with work.checks() as checks:
        for filename in (*begun.side_files, MANIFEST_NAME):
            checks.add_file(filename, files[filename])
        checks.wait()
    return Finished(files, findings)


def source_entries(plan: ExportPlan, digests: Mapping[Path, str]) -> list[SourceEntry]:
    """The files that were read, by their names in the plan."""
    names = plan.source_names
    return [
        SourceEntry(
            names[source.path],
            source.version.nbytes,
            source.version.mtime_ns,
            digests.get(source.path),
        )
        for source in plan.sources
    ]


def _findings(tensor: TensorPlan, seen: Statistics, allow: Set[FindingKind]) -> Iterator[Finding]:
    counts = {FindingKind.NAN: seen.nan, FindingKind.INF: seen.inf}
    if seen.overflow:
        counts[_OVERFLOW[tensor.dtype]] = seen.overflow
    if seen.all_zero:
        counts[FindingKind.ALL_ZERO] = tensor.numel
    for kind, count in counts.items():
        if count:
            yield Finding(kind, tensor.name, count, accepted=kind in allow)
