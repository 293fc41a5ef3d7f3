"""Completing a folder whose parts are written: sources proved as a whole, and the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from zexport.errors import OutputError
from zexport.findings import Finding, FindingKind
from zexport.plan.plan import ExportPlan, FilePlan, TensorPlan
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
from zexport.run.receipts import Receipt

_OVERFLOW = {
    DType.F32: FindingKind.FP32_OVERFLOW,
    DType.F16: FindingKind.FP16_OVERFLOW,
    DType.BF16: FindingKind.BF16_OVERFLOW,
}


@dataclass(frozen=True, slots=True)
class Finished:
    """A folder that lacks nothing but its name.

    Attributes:
        files: everything in it.
        findings: what was remarkable.
    """

    files: Mapping[str, FileEntry]
    findings: tuple[Finding, ...]


def finish(
    work: Workplace, begun: Begun, reader: TensorReader, findings: tuple[Finding, ...]
) -> Finished:
    """Complete a folder: every file has its receipt, and what was read for them was what was saved.

    Args:
        work: the folder, whose parts may have been written by others.
        begun: how it began.
        reader: checks the CRC of the records that were read, and reads what is missing of them.
        findings: what was found before the files were written.
    """
    plan, folder = work.plan, work.folder
    work.receipts.check_plan()
    files = dict(begun.side_files)
    tensors: dict[str, TensorEntry] = {}
    for file in plan.shards:
        receipt = _receipt(work, file)
        reader.take(receipt.ranges)
        files[file.filename] = FileEntry(receipt.nbytes, receipt.blake3)
        tensors |= _entries(file, receipt)
        findings += tuple(_findings_of(plan, file, receipt))
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


def _receipt(work: Workplace, file: FilePlan) -> Receipt:
    receipt = work.receipts.find(file)
    if receipt is None:
        raise OutputError(
            f"has no receipt for {file.filename}",
            path=work.folder,
            hint="Run the same command again: it goes on from what is there",
        )
    return receipt


def _entries(file: FilePlan, receipt: Receipt) -> dict[str, TensorEntry]:
    return {
        tensor.name: TensorEntry(tensor.dtype, tensor.shape, file.filename, receipt.digest(number))
        for number, tensor in enumerate(file.tensors)
    }


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


def _findings_of(plan: ExportPlan, file: FilePlan, receipt: Receipt) -> Iterator[Finding]:
    """What was remarkable about a file's values, in the order of the tensors."""
    for tensor in file.tensors if receipt.remarkable else ():
        if tensor.name in receipt.remarkable:
            yield from _findings(tensor, receipt.remarkable[tensor.name], plan.allow)


def _findings(tensor: TensorPlan, seen: Statistics, allow: Set[FindingKind]) -> Iterator[Finding]:
    counts = {FindingKind.NAN: seen.nan, FindingKind.INF: seen.inf}
    if seen.overflow:
        counts[_OVERFLOW[tensor.dtype]] = seen.overflow
    if seen.all_zero:
        counts[FindingKind.ALL_ZERO] = tensor.numel
    for kind, count in counts.items():
        if count:
            yield Finding(kind, tensor.name, count, accepted=kind in allow)
