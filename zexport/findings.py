"""Named anomalies of a checkpoint or its values; ``--allow`` accepts them."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct


class FindingKind(StrEnum):
    """Kind of a finding; the value is its name in reports, manifests and ``--allow``."""

    NAN = "nan"
    INF = "inf"
    ALL_ZERO = "all-zero"
    FP32_OVERFLOW = "fp32-overflow"
    FP16_OVERFLOW = "fp16-overflow"
    BF16_OVERFLOW = "bf16-overflow"
    FP16_UNDERFLOW = "fp16-underflow"
    UPDATE_LOST = "update-lost"
    STEP_MISMATCH = "step-mismatch"
    GATHERED_MISMATCH = "gathered-mismatch"
    CAST_MISMATCH = "cast-mismatch"
    REPLICA_MISMATCH = "replica-mismatch"
    SHAPE_MISMATCH = "shape-mismatch"
    MIXED_STEPS = "mixed-steps"
    MIXED_SETTINGS = "mixed-settings"
    MIXED_VERSIONS = "mixed-versions"
    STRAY_FILES = "stray-files"
    BASE_MISMATCH = "base-mismatch"

    @property
    def is_refused(self) -> bool:
        """Whether it ends an export without ``--allow``."""
        return self in _REFUSED


_REFUSED = frozenset(
    {
        FindingKind.CAST_MISMATCH,
        FindingKind.REPLICA_MISMATCH,
        FindingKind.SHAPE_MISMATCH,
        FindingKind.MIXED_STEPS,
        FindingKind.MIXED_SETTINGS,
        FindingKind.MIXED_VERSIONS,
        FindingKind.STRAY_FILES,
        FindingKind.BASE_MISMATCH,
    }
)


class Finding(Struct, frozen=True):
    """An anomaly that did not prevent the export.

    Attributes:
        kind: see errors.md.
        tensor: name in the output, or in the checkpoint if the output lacks it; empty if the
            finding is not about one tensor.
        count: number of affected elements among those that were checked.
        detail: what was found, without paths; empty if the kind is enough.
        accepted: whether ``--allow`` accepted it.
    """

    kind: FindingKind
    tensor: str
    count: int
    detail: str = ""
    accepted: bool = False


Findings: TypeAlias = tuple[Finding, ...]
