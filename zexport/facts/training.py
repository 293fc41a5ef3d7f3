"""The facts of a training: how it was saved, where its run stands, and how it goes on.

A fact is added by adding a row here, and by stating it where it is read.
"""

from __future__ import annotations

from zexport.facts.rows import Agreement, AnyFact, Row, Severity, noted, warned_of
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
    RUN_STEP = warned_of(
        "step of the run",
        "names or files beside the tag tell of another step",
    )
    RUN_UPDATES = warned_of(
        "updates that the optimizer has taken",
        "the optimizer has taken fewer updates than the run: unless it began anew, its files are "
        "of an older save than the model's",
    )
    OUT_STEP = noted(
        "step of the checkpoint, and the name of the output folder",
        "the name of the output folder tells of another step",
    )
    RUN_BATCH = warned_of(
        "size of a micro-batch",
        "files beside the tag tell of another batch, and may be of another run",
    )
    RUN_RANKS = warned_of(
        "random states of ranks",
        "files beside the tag have the random states of more ranks, and may be of another run",
        agreement=Agreement.BELOW,
    )
    RUN_PAST = warned_of(
        "what was logged at one step",
        "the checkpoint before this one tells of another past: they may be of different runs in "
        "one folder",
    )
    MODEL_VOCABULARY = warned_of(
        "numbers of the tokens that a model is trained with",
        "the tokenizer is not the model's, whose embedding has a row for each of its tokens: take "
        "care that training is to go on from these rows",
    )
    MORE_WEIGHTS = noted(
        "weights of the model, in what the training's own code saved",
        "the checkpoint holds weights of the model's names beside its own, such as an average "
        "(EMA), and they are not exported",
    )
    RUN_PARTS = warned_of(
        "what was logged at one step, in folders of one checkpoint",
        "folders of the checkpoint tell of different pasts: they may be of different runs, whose "
        "parts make no model together",
    )
    RUN_BEST = noted(
        "the best checkpoint of a run",
        "another checkpoint is the one that the run calls its best",
    )
    NEXT_OPTIMIZER = warned_of(
        "optimizer of a resharded training",
        "--ds-config does not name the optimizer whose states the files hold: DeepSpeed loads "
        "these into whichever there is",
    )
    NEXT_SCHEDULER = warned_of(
        "scheduler of a resharded training",
        "--ds-config does not name the scheduler that the training had: lr follows the one that "
        "it names",
    )
    NEXT_SCHEDULE = warned_of(
        "numbers of a resharded training's scheduler",
        "lr follows the scheduler of --ds-config, whose numbers are others: take care that this is "
        "meant",
    )
    NEXT_UPDATES = warned_of(
        "what changes the updates of a resharded training",
        "updates change with --ds-config: take care that this is meant",
    )
    NEXT_SETTINGS = Row(
        "settings of a resharded training's optimizer",
        "the optimizer goes on with what the checkpoint holds, which loading puts in the place of "
        "what --ds-config says",
        severity=Severity.NOTED,
        agreement=Agreement.SHARED,
    )
    DP_WORLD_SIZE = _of_one_save("number of data-parallel ranks")
    DEEPSPEED_VERSION = _of_one_save("DeepSpeed version", FindingKind.MIXED_VERSIONS)
    CELL_WORLD_SIZE = _of_one_save("data-parallel world size")
