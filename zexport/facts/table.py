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
        f"mixes files of different saves, which differ in the {name}",
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


def _warned(name: str, problem: str, hint: str = "", agreement: Agreement = Agreement.EQUAL) -> Row:
    """What is right or wrong for reasons that no file tells: the user has to look."""
    return Row(name, problem, hint=hint, severity=Severity.WARNED, agreement=agreement)


def _noted(name: str, problem: str) -> Row:
    """What is usual, and worth a word."""
    return Row(name, problem, severity=Severity.NOTED)


class Fact(Enum):
    """What may be stated more than once."""

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
    RUN_STEP = _warned(
        "step of the run",
        "names or files beside the tag tell of another step",
    )
    RUN_BATCH = _warned(
        "size of a micro-batch",
        "files beside the tag tell of another batch, and may be of another run",
    )
    RUN_RANKS = _warned(
        "random states of ranks",
        "files beside the tag have the random states of more ranks, and may be of another run",
        agreement=Agreement.BELOW,
    )
    RUN_PAST = _warned(
        "what was logged at one step",
        "the checkpoint before this one tells of another past: they may be of different runs in "
        "one folder",
    )
    RUN_BEST = _noted(
        "the best checkpoint of a run",
        "another checkpoint is the one that the run calls its best",
    )
    NEXT_OPTIMIZER = _warned(
        "optimizer of a resharded training",
        "--ds-config does not name the optimizer whose states the files hold: DeepSpeed loads "
        "these into whichever there is",
    )
    NEXT_SCHEDULER = _warned(
        "scheduler of a resharded training",
        "--ds-config does not name the scheduler whose state the files hold",
    )
    NEXT_UPDATES = _warned(
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
    BASE_CONFIG = _of_one_base("shape of the base model", "their configs differ")
    BASE_ROPE = Row(  # another model of the same sizes, or the same one trained for longer texts
        "rotary positions (RoPE) of the base",
        "the base is another model than the one that training began from, or was trained for "
        "longer texts than it was made for: their configs differ",
        expected="the same rope settings",
        hint="Give the model that training began from with --base; where training changed "
        "them, go on with --allow base-mismatch: config.json keeps those of the checkpoint",
        kind=FindingKind.BASE_MISMATCH,
        error=UsageError,
    )
    LONGER_TEXTS = _warned(
        "rotary positions (RoPE), where the weights are the base's",
        "config.json, the one beside the checkpoint, rotates positions otherwise than the base, "
        "whose weights are those that were trained: right only if this run was trained so",
    )
    BASE_NAME = _of_one_base("name of the base model", "their names on the hub differ")
    BASE_WEIGHTS = _of_one_base("frozen weights of the base model", "weights differ")
    BASE_MERGED = _of_one_base(
        "whether the adapter is merged already",
        "the checkpoint's adapter is merged into it already",
    )
    BASE_OF_RUN = _warned(  # or of another run in a folder of that name
        "whether an adapter of the run is merged already",
        "the base has the adapter of another checkpoint in it, from a run of this name: merging "
        "into it is right only if this training began from that",
    )
    BASE_ADAPTED = _warned(
        "what a base consists of",
        "the base has an adapter beside its weights, which transformers loads with them: merge it "
        "first if training began from both",
    )
    BASE_MADE_OF = _warned(
        "name of the base model, and of what that was made of",
        "the base says that it was made of the model that training began from",
    )
    BASE_QUANTIZED = _noted(
        "form of the base that an adapter was trained on",
        "the adapter was trained on a quantized form of the base that it is merged into",
    )
    BASE_UNTRACED = _warned(
        "name of the base model, where nothing compares the weights",
        "nothing shows that the base is the model that training began from",
    )
    ADAPTER_METHOD = _of_one_adapter("method")
    ADAPTER_RANK = _of_one_adapter("rank")
    ADAPTER_TARGETS = _of_one_adapter("choice of target_modules")
    ADAPTER_DORA = _of_one_adapter("use of DoRA (use_dora)")
    ADAPTER_BIAS = _of_one_adapter("use of biases (lora_bias)")
    ADAPTER_TOKENS = _of_one_adapter("number of trainable_token_indices")
    ADAPTER_PROMPT = _of_one_adapter("size of the prompt")
    ADAPTER_FEEDFORWARD = _of_one_adapter("choice of feedforward_modules")
    ADAPTER_COPIES = _of_one_adapter("choice of modules_to_save")
    ADAPTER_EFFECT = _warned(
        "effect of an adapter",
        "the adapter changes nothing, as one before its first step",
    )
    ADAPTER_UNHELD = _warned(
        "parts that an adapter's configuration names",
        "adapter_config.json names parts that the adapter has no tensors for: take care that it is "
        "the file that this run wrote",
    )
    ADAPTER_TASK = _warned(
        "task of a merged adapter",
        "the adapter was trained for another task than the model is built for",
        hint="Give the base with the config of the class that was trained with --base",
        agreement=Agreement.SHARED,
    )
    ADAPTER_CLASS = _warned(
        "class of the model that an adapter was trained on",
        "the adapter was trained on a model of another class than config.json names: take care "
        "that the base is the one that was trained on",
    )
    KEPT_BASE = _noted(
        "name of the base model, where an adapter is kept",
        "adapter_config.json names the base by a path, where no other machine has it: load the "
        "base yourself, or write its name on the hub there",
    )
    ADAPTER_CONFIGS = _warned(  # the nearest was taken, or the one that the user named
        "keys that decide values, in several adapter_config.json",
        "files of the adapter's configuration differ, and the export goes by the first of these: "
        "take care that it is the one that was trained with",
    )
    RESIZED_EMBEDDING = Row(
        "added tokens, where the embedding is the base's",
        "the embedding was resized for added tokens, and left out when the checkpoint was saved",
        hint="Give the base model as it was resized for the training with --base, train with the "
        "embeddings in modules_to_save, or leave frozen weights out with --exclude-frozen",
        agreement=Agreement.BELOW,
        error=FrozenLeftOutError,
    )
    KEPT_EMBEDDING = _warned(
        "tokens, where an adapter is kept",
        "without the embedding, which was resized if it was trained with all tokens: no file has "
        "it; save it with modules_to_save",
        agreement=Agreement.BELOW,
    )
    KEPT_CHANGES = _warned(  # peft repeats what was neither random nor made of data
        "base weights, where an adapter is kept",
        "peft changed the base weights before training, and they are not in this folder: the "
        "adapter is right only where peft's loading makes the same change to the same base again",
    )
    TOKENS = _warned(  # the weights are right, and a token that is never used harms nobody
        "numbers of tokens",
        "tokens without a row in the embedding cannot be embedded, nor end a text: give the "
        "tokenizer and generation_config.json that the model was trained with",
        agreement=Agreement.BELOW,
    )
    MODEL_TYPE = Row(
        "model type",
        "config.json names a class of another model type, and transformers loads the model that "
        "model_type names",
        hint="Mend model_type or architectures in config.json, or give the right one with --base",
    )
    LABELS = _warned(
        "names of classes",
        "config.json contradicts itself in classes: mend id2label, label2id or num_labels",
    )
    BASE_LABELS = _warned(
        "names of classes, beside the base's",
        "classes have other names than the base's: take care that config.json has those that were "
        "trained with",
    )
    END_TOKEN = _warned(
        "token that ends a text",
        "files differ in the token that ends a text, and the first of these is what generating "
        "ends at: take care that it is the one that was trained with",
        agreement=Agreement.SHARED,
    )
    ADDED_TOKEN = _warned(
        "numbers of an added token",
        "files of the tokenizer give one token several numbers, and only one has the row that was "
        "trained: give the tokenizer that the model was trained with",
    )
    CHAT_TEMPLATE = _warned(
        "chat template",
        "files differ in the chat template, and the export has the first of these: take care that "
        "it is the one that was trained with",
    )
    BASE_TEMPLATE = _noted(
        "chat template of the base",
        "the chat template is not the base's",
    )
    VOCABULARY = _warned(
        "numbers of the tokenizer's tokens, and its merges",
        "tokenizers differ, and the export has the first of these: take care that it is the one "
        "that was trained with",
    )
    TOKENIZER_RULE = _warned(
        "what a tokenizer makes of letters before it cuts",
        "tokenizer_config.json has other rules than tokenizer.json, and the first of these were "
        "trained with: loading takes those of tokenizer_config.json",
    )
    TOKEN_NAME = _warned(
        "special tokens, by what they are for",
        "files name different tokens for one thing: give the tokenizer that was trained with",
    )
    TOKEN_ID = _warned(
        "numbers of special tokens, by what they are for",
        "files give a special token different numbers: take care that config.json has those that "
        "were trained with",
    )
    SPECIAL_TOKEN = _warned(
        "special tokens",
        "a special token is named that the tokenizer does not have: loading gives it a number of "
        "its own, which was not trained",
    )
    TEMPLATE_TOKEN = _noted(  # some models were trained with such marks as plain text
        "special tokens that the chat template uses",
        "the chat template has marks that are no tokens, and are read as plain text",
    )
    TEXT_LENGTH = Row(  # transformers does not go by it
        "length of texts, in tokens",
        "tokenizer.json has a length set, as its training left it: programs that use it without "
        "transformers give all texts that length",
        severity=Severity.NOTED,
        agreement=Agreement.SHARED,
    )
    TEXT_POSITIONS = Row(  # some models are made for more than they were trained for
        "length of texts, beside the model's positions",
        "texts may be longer than the model has positions for",
        severity=Severity.NOTED,
        agreement=Agreement.BELOW,
    )
    PAD_TOKEN = _warned(
        "token that fills up texts, for a classifier",
        "a classifier looks for the last token that is not pad_token_id: set it in config.json to "
        "the one that was trained with",
    )
    RUN_CONFIG = _warned(
        "keys of the config, in files of one run",
        "files differ in what config.json says, and the export goes by the first of these: take "
        "care that it is the one that was trained with",
    )
    REPEATED_KEY = _warned(
        "keys that a file has twice",
        "a file has a key twice, and programs go by the last: leave the one that was trained with",
    )
    RUN_FILE = _warned(
        "what other files of one run say",
        "files of the run differ, and the export has the first of these: take care that it is the "
        "one that was trained with",
    )
    BASE_FILE = _noted(
        "what other files say, beside the base's",
        "files that the export takes from the run are not the base's",
    )
    CODE = _warned(
        "code that a config names",
        "a config names code that is nowhere beside it, and loading fails without: put it there, "
        "or give a model folder that has it with --base",
    )
    PROCESSOR = _warned(
        "processor",
        "files differ in the processor: take care that all are of the model that was trained",
    )
    PATCHES = _warned(
        "sizes of what a processor makes",
        "the processor cuts images, or sounds, otherwise than the model takes them: give the "
        "processor that was trained with",
    )
    IMAGE_SIZE = _noted(  # models that take several sizes have the largest in their config
        "size of an image",
        "the processor brings images to another size than config.json tells of",
    )
    SENTENCE_SIZE = _warned(
        "size of what a step of a sentence-transformers model takes",
        "a step takes another size than the step before it gives: give the files of the model "
        "that was trained",
    )
    SENTENCE_STEP = _warned(
        "steps of a sentence-transformers model",
        "the export lacks files of a step that modules.json names: copy that step's folder from "
        "where the model was trained",
    )
    SENTENCE_LENGTH = _warned(
        "length of the texts of a sentence-transformers model",
        "texts may be longer than the model has positions for: mend max_seq_length",
        agreement=Agreement.BELOW,
    )
    CARD_TASK = _noted(
        "what the model is, in the model card",
        "the model card tells of another kind of model: mend README.md",
    )
    NAMED_BASE = _warned(
        "name of the base model, in all files that name it",
        "different base models are named: take care which one training began from",
    )
    LICENSE = _warned(
        "licence",
        "files tell of different licences: take care which one holds for this model",
    )
    CONFIG_DTYPE = _noted(
        "element type, told twice by one config",
        "config.json tells of two element types, and the export's has the one that is written",
    )
    CONFIG_ROPE = _warned(
        "rotary positions (RoPE), told twice by one config",
        "config.json tells twice how positions are rotated, and not every program goes by the "
        "same: leave what was trained with",
    )
    TIES = _noted(  # both are written, with equal bytes
        "ties between weights",
        "training had two weights as one, and config.json does not tie them: training on will set "
        "them apart",
    )
    RENAMED_ONTO = _warned(
        "names that --rename gives and takes",
        "--rename gives weights the names that other weights had: take care that none were "
        "exchanged, since nothing but their names tells",
    )
    RENAMED_NONE = _warned(
        "names that --rename is for",
        "--rename changes no name: take care that its pattern is what was meant",
    )
    BASE_DTYPE = _warned(
        "element type that the base was trained in",
        "--base-dtype is not the type that the module was trained in",
    )
    CONFIG_KEY = _noted(
        "other keys of the config",
        "config.json is the one beside the checkpoint, and the base's says otherwise",
    )


OF_BASE = frozenset(
    {
        *(Fact.BASE_CONFIG, Fact.BASE_ROPE, Fact.BASE_NAME, Fact.BASE_WEIGHTS),
        Fact.BASE_UNTRACED,
    }
)
"""What tells whether a base is the model that training began from."""
