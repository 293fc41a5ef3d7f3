"""The facts of a model: its base, and all the files around its weights.

A fact is added by adding a row here, and by stating it where it is read.
"""

from __future__ import annotations

from zexport.errors import FrozenLeftOutError, UsageError
from zexport.facts.rows import Agreement, AnyFact, Row, noted, warned_of
from zexport.findings import FindingKind


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


class Fact(AnyFact):
    """What the files of a model may state more than once."""

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
    LONGER_TEXTS = warned_of(
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
    BASE_OF_RUN = warned_of(  # or of another run in a folder of that name
        "whether an adapter of the run is merged already",
        "the base has the adapter of another checkpoint in it, from a run of this name: merging "
        "into it is right only if this training began from that",
    )
    BASE_ADAPTED = warned_of(
        "what a base consists of",
        "the base has an adapter beside its weights, which transformers loads with them: merge it "
        "first if training began from both",
    )
    BASE_MADE_OF = warned_of(
        "name of the base model, and of what that was made of",
        "the base says that it was made of the model that training began from",
    )
    BASE_QUANTIZED = noted(
        "form of the base that an adapter was trained on",
        "the adapter was trained on a quantized form of the base that it is merged into",
    )
    BASE_UNTRACED = warned_of(
        "name of the base model, where nothing compares the weights",
        "nothing shows that the base is the model that training began from",
    )
    RESIZED_EMBEDDING = Row(
        "added tokens, where the embedding is the base's",
        "the embedding was resized for added tokens, and left out when the checkpoint was saved",
        hint="Give the base model as it was resized for the training with --base, train with the "
        "embeddings in modules_to_save, or leave frozen weights out with --exclude-frozen",
        agreement=Agreement.BELOW,
        error=FrozenLeftOutError,
    )
    TOKENS = warned_of(  # the weights are right, and a token that is never used harms nobody
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
    RUN_CONFIG = warned_of(
        "keys of the config, in files of one run",
        "files differ in what config.json says, and the export goes by the first of these: take "
        "care that it is the one that was trained with",
    )
    CONFIG_UNSTATED = warned_of(
        "keys of the config that another one leaves out",
        "one config says what another leaves to the model's class, which takes another value: "
        "write the one that was trained with into config.json",
    )
    REPEATED_KEY = warned_of(
        "keys that a file has twice",
        "a file has a key twice, and programs go by the last: leave the one that was trained with",
    )
    RUN_FOLDER = warned_of(
        "folder above the checkpoint",
        "files come from the folder above the checkpoint, where nothing shows that it is of this "
        "run: take care that they are of the model that was trained",
    )
    NODE_FILE = Row(  # whichever node was named first would decide
        "what files say that several nodes have beside their parts",
        "nodes of one checkpoint have other files of one name beside their parts",
        hint="Leave the one that was trained with in one of the folders, and remove the others",
    )
    CODE = warned_of(
        "code that a config names",
        "a config names code that is nowhere beside it, and loading fails without: put it there, "
        "or give a model folder that has it with --base",
    )
    NAMED_BASE = warned_of(
        "name of the base model, in all files that name it",
        "different base models are named: take care which one training began from",
    )
    CONFIG_DTYPE = noted(
        "element type, told twice by one config",
        "config.json tells of two element types, and the export's has the one that is written",
    )
    CONFIG_ROPE = warned_of(
        "rotary positions (RoPE), told twice by one config",
        "config.json tells twice how positions are rotated, and not every program goes by the "
        "same: leave what was trained with",
    )
    BUFFER_ROPE = warned_of(
        "rotary positions (RoPE), as a buffer of the checkpoint has them",
        "config.json rotates positions otherwise than the checkpoint's own buffer: mend rope_theta "
        "there, unless the buffer is a leftover",
    )
    CONFIG_LEVELS = warned_of(
        "the language model, told of at two levels of one config",
        "config.json says one thing of the language model twice, and not every program goes by "
        "the same: transformers takes text_config's, so leave what was trained with",
    )
    TIES = noted(  # both are written, with equal bytes
        "ties between weights",
        "training had two weights as one, and config.json does not tie them: training on will set "
        "them apart",
    )
    RENAMED_ONTO = warned_of(
        "names that --rename gives and takes",
        "--rename gives weights the names that other weights had: take care that none were "
        "exchanged, since nothing but their names tells",
    )
    RENAMED_MISFIT = warned_of(
        "names that --rename gives, and those of the model",
        "--rename gives names that the model of config.json does not have, and transformers will "
        "not load: it makes new weights in their place",
    )
    RENAMED_NONE = warned_of(
        "names that --rename is for",
        "--rename changes no name: take care that its pattern is what was meant",
    )
    BASE_DTYPE = warned_of(
        "element type that the base was trained in",
        "--base-dtype is not the type that the module was trained in",
    )
    CONFIG_KEY = noted(
        "other keys of the config",
        "config.json is the one beside the checkpoint, and the base's says otherwise",
    )
    TEMPLATE = noted("chat template", "chat templates differ")
    VOCABULARY = noted("tokenizer", "tokenizers differ")
    BASE_FILE = noted("settings of small files", "settings differ")


OF_BASE = frozenset(
    {
        *(Fact.BASE_CONFIG, Fact.BASE_ROPE, Fact.BASE_NAME, Fact.BASE_WEIGHTS),
        Fact.BASE_UNTRACED,
    }
)
"""What tells whether a base is the model that training began from."""

OF_DIFF = frozenset({Fact.TEMPLATE, Fact.VOCABULARY, Fact.BASE_FILE})
"""What only ``zexport diff`` compares."""
