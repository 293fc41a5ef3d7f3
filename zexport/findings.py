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

    @property
    def meaning(self) -> str:
        """What was found, in words."""
        return _MEANING[self]


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
_MEANING = {
    FindingKind.NAN: "elements are NaN",
    FindingKind.INF: "elements are infinite",
    FindingKind.ALL_ZERO: "every element is zero",
    FindingKind.FP32_OVERFLOW: "finite in the checkpoint, infinite as fp32",
    FindingKind.FP16_OVERFLOW: "finite in the checkpoint, infinite as fp16",
    FindingKind.BF16_OVERFLOW: "finite in the checkpoint, infinite as bf16",
    FindingKind.STEP_MISMATCH: "the optimizer counts other steps than the model files do",
    FindingKind.GATHERED_MISMATCH: "the gathered weights beside the checkpoint are not the "
    "masters, rounded",
    FindingKind.CAST_MISMATCH: "the module's own copy of a weight is not the master, rounded",
    FindingKind.REPLICA_MISMATCH: "ranks that should hold equal copies hold different ones",
    FindingKind.SHAPE_MISMATCH: "a weight has another shape than the config says",
    FindingKind.MIXED_STEPS: "rank files are of different steps",
    FindingKind.MIXED_SETTINGS: "rank files are of runs with different settings",
    FindingKind.MIXED_VERSIONS: "rank files are of different versions of DeepSpeed",
    FindingKind.STRAY_FILES: "there are rank files beyond the world size",
    FindingKind.BASE_MISMATCH: "the base is another model than the one that was trained",
}


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
