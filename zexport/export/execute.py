"""Running a plan: from nothing to a complete, checked folder, or to nothing again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from zexport.dtypes import DType
from zexport.errors import CheckpointError
from zexport.export.commit import staged_folder, writing
from zexport.export.convert import FileReader, TensorReader
from zexport.export.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    SourceEntry,
    TensorEntry,
    new_manifest,
)
from zexport.export.plan import ExportPlan, SideFile, TensorPlan
from zexport.export.readback import Checks, Meter, Phase, Progress, VerifyMode
from zexport.export.replicas import compare_replicas
from zexport.export.writer import ShardResult, TensorResult, write_shards
from zexport.findings import Finding, FindingKind
from zexport.jsontypes import Json
from zexport.streams.casts import Statistics
from zexport.streams.reader import SourceReader

__all__ = [
    "ExportReport",
    "Finding",
    "Phase",
    "Progress",
    "TensorReader",
    "VerifyMode",
    "run_plan",
]

REPORT_SCHEMA = 1
_COPY_NBYTES = 1 << 20
_MANIFEST_NBYTES_PER_TENSOR = 400
_OVERFLOW = {
    DType.F32: FindingKind.FP32_OVERFLOW,
    DType.F16: FindingKind.FP16_OVERFLOW,
    DType.BF16: FindingKind.BF16_OVERFLOW,
}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did.

    Attributes:
        out_dir: the folder that now exists.
        files: its files, sorted, the manifest among them.
        tensors: how many tensors it holds.
        nbytes_read: bytes read from the checkpoint.
        nbytes_written: bytes of all its files.
        seconds: how long it took.
        findings: what was remarkable about the values.
        warnings: the plan's.
        verified: how it was read again.
    """

    out_dir: Path
    files: tuple[str, ...]
    tensors: int
    nbytes_read: int
    nbytes_written: int
    seconds: float
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    verified: VerifyMode

    def to_json(self) -> dict[str, Json]:
        """The report as JSON values, with a ``schema`` number."""
        return {
            "schema": REPORT_SCHEMA,
            "out_dir": str(self.out_dir),
            "files": list(self.files),
            "tensors": self.tensors,
            "nbytes_read": self.nbytes_read,
            "nbytes_written": self.nbytes_written,
            "seconds": self.seconds,
            "findings": [asdict(finding) for finding in self.findings],
            "warnings": list(self.warnings),
            "verified": self.verified.value,
        }


def run_plan(
    plan: ExportPlan,
    *,
    reader: TensorReader | None = None,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: Callable[[Progress], None] | None = None,
) -> ExportReport:
    """Make the plan's output folder, complete, checked and on the disk, or nothing at all.

    Args:
        plan: what to do; its sources must be as they were when it was made.
        reader: where the stored bytes come from; the plan's sources where none is given.
        verify: how the result is read again before the folder gets its name.
        progress: told of every step, from one thread at a time, but not always from the same one.

    Raises:
        OutputError: the folder cannot be made.
        CheckpointError: a source cannot be read, is damaged, or was changed.
        VerificationError: what was written is not what was meant.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        sources = stack.enter_context(SourceReader(plan.sources))
        reader = FileReader(sources) if reader is None else reader
        folder = stack.enter_context(
            staged_folder(
                plan.out_dir,
                nbytes=_nbytes_needed(plan),
                overwrite=plan.overwrite,
                sources=tuple(source.path for source in plan.sources),
            )
        )
        found = (*plan.findings, *compare_replicas(plan, sources))
        filled = _fill(plan, folder, reader, verify, Meter(plan, verify, progress), found=found)
    return ExportReport(
        out_dir=plan.out_dir,
        files=tuple(sorted(filled.files)),
        tensors=sum(len(shard.tensors) for shard in filled.shards),
        nbytes_read=reader.nbytes_read,
        nbytes_written=sum(entry.nbytes for entry in filled.files.values()),
        seconds=time.monotonic() - began,
        findings=filled.findings,
        warnings=plan.warnings,
        verified=verify,
    )


@dataclass(frozen=True, slots=True)
class _Filled:
    """What was put into the folder, and what was remarkable about it."""

    files: dict[str, FileEntry]
    shards: list[ShardResult]
    findings: tuple[Finding, ...]


def _fill(
    plan: ExportPlan,
    folder: Path,
    reader: TensorReader,
    verify: VerifyMode,
    meter: Meter,
    *,
    found: tuple[Finding, ...],
) -> _Filled:
    """Write and check every file of the folder; ``found`` is what was found before."""
    files: dict[str, FileEntry] = {}
    shards: list[ShardResult] = []
    planned = {shard.filename: shard for shard in plan.shards}
    with Checks(folder, verify, meter) as checks:

        def on_shard(shard: ShardResult) -> None:
            shards.append(shard)
            files[shard.filename] = FileEntry(shard.nbytes, shard.blake3)
            checks.add_shard(planned[shard.filename], shard)

        write_shards(plan, folder, reader, on_bytes=meter.written, on_shard=on_shard)
        reader.finish()
        for side in plan.side_files:
            files[side.filename] = _write_file(folder / side.filename, _side_content(side))
            checks.add_file(side.filename, files[side.filename])
        findings = (*found, *_findings(plan, shards))
        manifest = _manifest(plan, shards, files, findings)
        files[MANIFEST_NAME] = _write_file(folder / MANIFEST_NAME, manifest.lines())
        checks.add_file(MANIFEST_NAME, files[MANIFEST_NAME])
        checks.wait()
    return _Filled(files, shards, findings)


def _nbytes_needed(plan: ExportPlan) -> int:
    """Bytes of the whole folder; the manifest's are estimated."""
    tensors = sum(len(shard.tensors) for shard in plan.shards)
    return (
        sum(shard.nbytes for shard in plan.shards)
        + sum(_side_nbytes(side) for side in plan.side_files)
        + tensors * _MANIFEST_NBYTES_PER_TENSOR
    )


def _side_nbytes(side: SideFile) -> int:
    if side.origin is None:
        return len(side.content or b"")
    with _reading(side.origin):
        return side.origin.stat().st_size


def _side_content(side: SideFile) -> Iterator[bytes]:
    if side.origin is None:
        yield side.content or b""
        return
    with _reading(side.origin), side.origin.open("rb") as file:
        while data := file.read(_COPY_NBYTES):
            yield data


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise CheckpointError(f"cannot be read: {cause.strerror}", path=path) from cause


def _write_file(path: Path, content: Iterator[bytes]) -> FileEntry:
    digest = blake3()
    nbytes = 0
    with writing(path):
        path.parent.mkdir(exist_ok=True)  # such as additional_chat_templates
    with writing(path), path.open("xb") as file:
        for data in content:
            file.write(data)
            digest.update(data)
            nbytes += len(data)
    return FileEntry(nbytes, digest.hexdigest())


def _manifest(
    plan: ExportPlan,
    shards: list[ShardResult],
    files: dict[str, FileEntry],
    findings: tuple[Finding, ...],
) -> Manifest:
    results = _results(shards)
    return new_manifest(
        provenance=plan.provenance,
        sources=_source_entries(plan),
        tensors={
            tensor.name: TensorEntry(
                tensor.dtype, tensor.shape, shard.filename, results[tensor.name].blake3
            )
            for shard in plan.shards
            for tensor in shard.tensors
        },
        files=dict(files),
        findings=findings,
    )


def _source_entries(plan: ExportPlan) -> list[SourceEntry]:
    """The files that were read, by their paths below the folder that holds all of the checkpoint's.

    The folder's own place is left out, so that the same checkpoint elsewhere gives the same bytes.
    """
    folders = [source.path.parent for source in plan.sources if source.path.suffix == ".pt"]
    root = Path(os.path.commonpath(folders)) if folders else None
    return [
        SourceEntry(
            source.path.relative_to(root).as_posix()
            if root is not None and source.path.is_relative_to(root)
            else source.path.name,
            source.nbytes,
        )
        for source in plan.sources
    ]


def _results(shards: list[ShardResult]) -> dict[str, TensorResult]:
    return {name: result for shard in shards for name, result in shard.tensors.items()}


def _findings(plan: ExportPlan, shards: list[ShardResult]) -> tuple[Finding, ...]:
    """What was remarkable about the values, in the order of the tensors."""
    results = _results(shards)
    return tuple(
        finding
        for shard in plan.shards
        for tensor in shard.tensors
        for finding in _findings_of(tensor, results[tensor.name].statistics, plan.allow)
    )


def _findings_of(
    tensor: TensorPlan, seen: Statistics, allow: Set[FindingKind]
) -> Iterator[Finding]:
    counts = {FindingKind.NAN: seen.nan, FindingKind.INF: seen.inf}
    if seen.overflow:
        counts[_OVERFLOW[tensor.dtype]] = seen.overflow
    if seen.all_zero:
        counts[FindingKind.ALL_ZERO] = tensor.numel
    for kind, count in counts.items():
        if count:
            yield Finding(kind, tensor.name, count, accepted=kind in allow)
