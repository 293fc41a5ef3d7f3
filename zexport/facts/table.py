"""The table of facts: for each one how its statements must agree, and what a difference is.

A fact is added by adding a row here, and by stating it where it is read.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from zexport.errors import (
    DamagedCheckpointError,
    FrozenLeftOutError,
    UsageError,
    ZexportError,
)
from zexport.findings import FindingKind


class Severity(Enum):
    """What a difference leads to."""

    REFUSED = "refused"
    WARNED = "warned of"
    NOTED = "noted"


class Agreement(Enum):
    """When statements agree."""

    EQUAL = "all are the same"
    BELOW = "all are below the first"
    SHARED = "each has one in common with the first"


class Row(Struct, frozen=True):
    """What is to be known of a fact.

    Attributes:
        name: of the fact, in words.
        problem: what is wrong where statements differ, without a full stop.
        expected: what there should be, if that says more.
        hint: the next step; empty where there is none.
        severity: what a difference leads to.
        kind: the finding that it is; a refusal is lifted by allowing it, where there is one.
        agreement: when statements agree.
        error: what it is refused as; what the user chose is at fault where that is a usage error.
    """

    name: str
    problem: str
    expected: str | None = None
    hint: str = ""
    severity: Severity = Severity.REFUSED
    kind: FindingKind | None = None
    agreement: Agreement = Agreement.EQUAL
    error: type[ZexportError] = DamagedCheckpointError


def _of_one_save(name: str, kind: FindingKind | None = None) -> Row:
    """What all rank files of one save state alike."""
    return Row(
        name,
        f"mixes files of different saves: the {name} differs",
        expected="one save",
        hint="Copy all rank files of one save again",
        kind=kind,
    )


def _of_one_base(name: str, told: str) -> Row:
    """What the base that was given has in common with the one that was trained."""
    return Row(
        name,
        f"the base is another model than the one that training began from: {told}",
        expected="the same model",
        hint="Give the model that training began from with --base",
        kind=FindingKind.BASE_MISMATCH,
        error=UsageError,
    )


def _of_one_adapter(name: str) -> Row:
    """What an adapter's configuration says as its tensors do."""
    return Row(
        name,
        f"adapter_config.json does not fit the adapter's tensors: the {name} differs",
        hint="Take the adapter_config.json that this run wrote",
    )


class Fact(Enum):
    """What may be stated more than once."""

    PARTITION_COUNT = _of_one_save("partition count")
    FILE_PREFIX = _of_one_save("prefix of the file names, which tells of bf16")
    STAGE = _of_one_save("ZeRO stage")
    FLAT_GROUPS = _of_one_save("number of flat groups")
    OPTIMIZER_STEP = _of_one_save("optimizer step", FindingKind.MIXED_STEPS)
    GLOBAL_STEP = _of_one_save("global step", FindingKind.MIXED_STEPS)
    SKIPPED_STEPS = _of_one_save("number of skipped steps", FindingKind.MIXED_STEPS)
    CONFIG = _of_one_save("DeepSpeed configuration", FindingKind.MIXED_SETTINGS)
    GROUP_SETTINGS = _of_one_save("optimizer's settings", FindingKind.MIXED_SETTINGS)
    LOSS_SCALE = _of_one_save("loss scaler's state", FindingKind.MIXED_SETTINGS)
    SCHEDULE = _of_one_save("scheduler's state", FindingKind.MIXED_SETTINGS)
    RUN_STEP = Row(
        "step of the run",
        "names or files beside the tag tell of another step",
        severity=Severity.WARNED,
    )
    DP_WORLD_SIZE = _of_one_save("number of data-parallel ranks")
    DEEPSPEED_VERSION = _of_one_save("DeepSpeed version", FindingKind.MIXED_VERSIONS)
    CELL_WORLD_SIZE = _of_one_save("data-parallel world size")
    BASE_CONFIG = _of_one_base("what the base model is built like", "their configs differ")
    BASE_NAME = _of_one_base("name of the base model", "their names on the hub differ")
    BASE_WEIGHTS = _of_one_base("frozen weights of the base model", "weights differ")
    BASE_MERGED = _of_one_base(
        "whether the adapter is merged already",
        "the checkpoint's adapter is merged into it already",
    )
    BASE_UNTRACED = Row(
        "name of the base model, where nothing compares the weights",
        "nothing shows that the base is the model that the adapter was trained on",
        severity=Severity.WARNED,
    )
    ADAPTER_METHOD = _of_one_adapter("method")
    ADAPTER_RANK = _of_one_adapter("rank")
    ADAPTER_TARGETS = _of_one_adapter("choice of target_modules")
    ADAPTER_DORA = _of_one_adapter("use of DoRA (use_dora)")
    ADAPTER_BIAS = _of_one_adapter("use of biases (lora_bias)")
    ADAPTER_TOKENS = _of_one_adapter("choice of trainable_token_indices")
    ADAPTER_COPIES = _of_one_adapter("choice of modules_to_save")
    ADAPTER_TASK = Row(
        "task of a merged adapter",
        "the adapter was trained for another task than the model is built for",
        hint="Give the base with the config of the class that was trained with --base",
        severity=Severity.WARNED,
    )
    ADAPTER_CONFIGS = Row(  # warned of: the nearest was taken, or the one that the user named
        "keys that decide values, in several adapter_config.json",
        "files of the adapter's configuration differ, and the export goes by the first of these: "
        "take care that it is the one that was trained with",
        severity=Severity.WARNED,
    )
    RESIZED_EMBEDDING = Row(
        "added tokens, where the embedding is the base's",
        "the embedding was resized for added tokens, and left out when the checkpoint was saved",
        hint="Give the base model as it was resized for the training with --base, train with the "
        "embeddings in modules_to_save, or leave frozen weights out with --exclude-frozen",
        agreement=Agreement.BELOW,
        error=FrozenLeftOutError,
    )
    KEPT_EMBEDDING = Row(
        "tokens, where an adapter is kept",
        "without the embedding, which was resized if it was trained with all tokens: no file has "
        "it; save it with modules_to_save",
        severity=Severity.WARNED,
        agreement=Agreement.BELOW,
    )
    KEPT_CHANGES = Row(  # warned of: peft repeats what was neither random nor made of data
        "base weights, where an adapter is kept",
        "peft changed the base weights before training, and they are not in this folder: the "
        "adapter is right only where peft's loading makes the same change to the same base again",
        severity=Severity.WARNED,
    )
    TOKENS = Row(  # warned of: the weights are right, and a token that is never used harms nobody
        "numbers of tokens",
        "tokens without a row in the embedding cannot be embedded, nor end a text: give the "
        "tokenizer and generation_config.json that the model was trained with",
        severity=Severity.WARNED,
        agreement=Agreement.BELOW,
    )
    MODEL_TYPE = Row(
        "model type",
        "config.json names a class of another model type, and transformers loads the model that "
        "model_type names",
        hint="Mend model_type or architectures in config.json, or give the right one with --base",
    )
    LABELS = Row(
        "names of classes",
        "config.json gives a class two names: mend id2label or label2id",
        severity=Severity.WARNED,
    )
    BASE_LABELS = Row(
        "names of classes, beside the base's",
        "classes have other names than the base's: take care that config.json has those that were "
        "trained with",
        severity=Severity.WARNED,
    )
    END_TOKEN = Row(
        "token that ends a text",
        "files differ in the token that ends a text, and the first of these is what generating "
        "ends at: take care that it is the one that was trained with",
        severity=Severity.WARNED,
        agreement=Agreement.SHARED,
    )
    ADDED_TOKEN = Row(
        "numbers of an added token",
        "files of the tokenizer give one token several numbers, and only one has the row that was "
        "trained: give the tokenizer that the model was trained with",
        severity=Severity.WARNED,
    )
    CHAT_TEMPLATE = Row(
        "chat template",
        "files differ in the chat template, and the export has the first of these: take care that "
        "it is the one that was trained with",
        severity=Severity.WARNED,
    )
    BASE_TEMPLATE = Row(
        "chat template of the base",
        "the chat template is not the base's",
        severity=Severity.NOTED,
    )
    CONFIG_KEY = Row(
        "other keys of the config",
        "config.json is the one beside the checkpoint, and the base's says otherwise",
        severity=Severity.NOTED,
    )


OF_BASE = frozenset({Fact.BASE_CONFIG, Fact.BASE_NAME, Fact.BASE_WEIGHTS, Fact.BASE_UNTRACED})
"""What tells whether a base is the model that training began from."""
