"""The facts of a training: how it was saved, where its run stands, and how it goes on.

A fact is added by adding a row here, and by stating it where it is read.
"""

from __future__ import annotations

from zexport.facts.rows import AnyFact, Row, noted
from zexport.findings import FindingKind


def _of_one_save(name: str, kind: FindingKind | None = None) -> Row:
    """What all rank files of one save state alike."""
    return Row(
        name,
        f"mixes files of different saves, which differ in the {name}",
        expected="one save",
        hint="Copy all rank files of one save again",
        kind=kind,
    )


class TrainingFact(AnyFact):
    """What the files of a training may state more than once."""

    PARTITION_COUNT = _of_one_save("partition count")
    FILE_PREFIX = _of_one_save("prefix of the file names (bf16_)")
    STAGE = _of_one_save("ZeRO stage")
    FLAT_GROUPS = _of_one_save("number of flat groups")
    OPTIMIZER_STEP = _of_one_save("optimizer step", FindingKind.MIXED_STEPS)
    GLOBAL_STEP = _of_one_save("global step", FindingKind.MIXED_STEPS)
    SKIPPED_STEPS = _of_one_save("number of skipped steps", FindingKind.MIXED_STEPS)
    CONFIG = _of_one_save("DeepSpeed configuration", FindingKind.MIXED_SETTINGS)
    GROUP_SETTINGS = _of_one_save("optimizer's settings", FindingKind.MIXED_SETTINGS)
    LOSS_SCALE = _of_one_save("loss scaler's state", FindingKind.MIXED_SETTINGS)
    SCHEDULE = _of_one_save("scheduler's state", FindingKind.MIXED_SETTINGS)
    OUT_STEP = noted(
        "step of the checkpoint, and the name of the output folder",
        "the name of the output folder tells of another step",
    )
    DP_WORLD_SIZE = _of_one_save("number of data-parallel ranks")
    DEEPSPEED_VERSION = _of_one_save("DeepSpeed version", FindingKind.MIXED_VERSIONS)
    CELL_WORLD_SIZE = _of_one_save("data-parallel world size")
