"""What is to be said of an export whose bytes are written: its manifest, and remarkable values."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from zexport.findings import Finding, FindingKind
from zexport.plan.plan import ExportPlan, TensorPlan
from zexport.ranges.casts import Statistics
from zexport.ranges.dtypes import DType
from zexport.run.manifest import (
    FileEntry,
    Manifest,
    SourceEntry,
    TensorEntry,
    new_manifest,
)
from zexport.run.results import ShardResult

_OVERFLOW = {
    DType.F32: FindingKind.FP32_OVERFLOW,
    DType.F16: FindingKind.FP16_OVERFLOW,
    DType.BF16: FindingKind.BF16_OVERFLOW,
}

_TENSOR_NBYTES = 260
"""A tensor's line in the manifest, less its name, shape and shard; in the journal it is less."""

_SOURCE_NBYTES = 400
_FIXED_NBYTES = 1 << 16


def manifest_of(
    plan: ExportPlan,
    shards: Mapping[str, ShardResult],
    files: Mapping[str, FileEntry],
    *,
    sources: Mapping[Path, str],
    findings: tuple[Finding, ...],
) -> Manifest:
    """The manifest of a folder.

    Args:
        plan: what was done.
        shards: what was written of each, by filename.
        files: everything in the folder but the manifest.
        sources: what was read of each source.
        findings: what was remarkable.
    """
    return new_manifest(
        provenance=plan.provenance,
        sources=source_entries(plan, sources),
        tensors={
            tensor.name: TensorEntry(
                tensor.dtype,
                tensor.shape,
                shard.filename,
                shards[shard.filename].tensors[tensor.name].blake3,
            )
            for shard in plan.shards
            for tensor in shard.tensors
        },
        files=dict(files),
        findings=findings,
    )


def manifest_nbytes(plan: ExportPlan) -> int:
    """No less than what the manifest and the journal of a plan take together."""
    tensors = sum(
        _TENSOR_NBYTES + len(json.dumps(tensor.name)) + len(str(tensor.shape))
        for shard in plan.shards
        for tensor in shard.tensors
    )
    provenance = len(json.dumps(dict(plan.provenance)))
    return 2 * (tensors + provenance + _SOURCE_NBYTES * len(plan.sources) + _FIXED_NBYTES)


def source_entries(plan: ExportPlan, digests: Mapping[Path, str]) -> list[SourceEntry]:
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
            source.mtime_ns,
            digests.get(source.path),
        )
        for source in plan.sources
    ]


def findings_of(plan: ExportPlan, shards: Mapping[str, ShardResult]) -> tuple[Finding, ...]:
    """What was remarkable about the values, in the order of the tensors."""
    return tuple(
        finding
        for shard in plan.shards
        for tensor in shard.tensors
        for finding in _findings(
            tensor, shards[shard.filename].tensors[tensor.name].statistics, plan.allow
        )
    )


def _findings(tensor: TensorPlan, seen: Statistics, allow: Set[FindingKind]) -> Iterator[Finding]:
    counts = {FindingKind.NAN: seen.nan, FindingKind.INF: seen.inf}
    if seen.overflow:
        counts[_OVERFLOW[tensor.dtype]] = seen.overflow
    if seen.all_zero:
        counts[FindingKind.ALL_ZERO] = tensor.numel
    for kind, count in counts.items():
        if count:
            yield Finding(kind, tensor.name, count, accepted=kind in allow)
