"""What may be remarkable about a checkpoint or its values: a stable word for each kind."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class FindingKind(StrEnum):
    """A kind of finding; the value is its word in reports, manifests and ``--allow``."""

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
        """Whether it ends an export, unless it was allowed by name."""
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
    """Something remarkable, which did not prevent the export.

    Attributes:
        kind: what it is; see errors.md.
        tensor: the tensor's name in the output, or in the checkpoint where it has none there; empty
            where it is not about one tensor.
        count: how many of its elements, as far as they were looked at; without a tensor, 0.
        detail: what was found, in words without paths; empty where the kind says all.
        accepted: whether it would have been refused, or warned of, and was allowed by name.
    """

    kind: FindingKind
    tensor: str
    count: int
    detail: str = ""
    accepted: bool = False
