"""The facts of a model: its base, and all the files around its weights.

A fact is added by adding a row here, and by stating it where it is read.
"""

from __future__ import annotations

from zexport.errors import FrozenLeftOutError, UsageError
from zexport.facts.rows import Agreement, AnyFact, Row, Severity, noted, warned_of
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
    BASE_LABELS = warned_of(
        "names of classes, beside the base's",
        "classes have other names than the base's: take care that config.json has those that were "
        "trained with",
    )
    END_TOKEN = warned_of(
        "token that ends a text",
        "files differ in the token that ends a text, and the first of these is what generating "
        "ends at: take care that it is the one that was trained with",
        agreement=Agreement.SHARED,
    )
    END_WORD = warned_of(
        "tokens that end a text, and the special tokens there are",
        "a word ends a text wherever it is made: take its number out of eos_token_id, or give the "
        "tokenizer that was trained with",
    )
    END_BEHIND = warned_of(
        "what is put behind every text",
        "the tokenizer ends every text, and nothing is generated after that: take it out, unless "
        "the model is one that embeds",
    )
    ADDED_TOKEN = warned_of(
        "numbers of an added token",
        "files of the tokenizer give one token several numbers, and only one has the row that was "
        "trained: give the tokenizer that the model was trained with",
    )
    CHAT_TEMPLATE = warned_of(
        "chat template",
        "files differ in the chat template, and the export has the first of these: take care that "
        "it is the one that was trained with",
    )
    TEMPLATE_WHOLE = warned_of(
        "what a chat template consists of",
        "the chat template is not whole, or of no conversation: give the one that was trained with",
    )
    BASE_TEMPLATE = noted(
        "chat template of the base",
        "the chat template is not the base's",
    )
    VOCABULARY = warned_of(
        "numbers of the tokenizer's tokens, and its merges",
        "tokenizers differ, and the export has the first of these: take care that it is the one "
        "that was trained with",
    )
    TOKENIZER_RULE = warned_of(
        "what a tokenizer makes of letters before it cuts",
        "tokenizer_config.json has other rules than tokenizer.json, and the first of these were "
        "trained with: loading takes those of tokenizer_config.json",
    )
    TOKENIZER_LEFT = warned_of(
        "what a tokenizer was left with, which changes every text",
        "the tokenizer was left with what is for a training or for other texts: take it out",
    )
    TOKENIZER_MARK = warned_of(
        "mark of a word's beginning, in the tokens and in the steps around them",
        "the tokens of tokenizer.json mark where words begin, and no step makes the mark, or takes "
        "it back: give the tokenizer that was trained with",
    )
    TOKEN_FLAG = warned_of(
        "how an added token is found in a text",
        "files of the tokenizer find a token in other ways, and loading takes those of "
        "tokenizer_config.json: give the tokenizer that the model was trained with",
    )
    TOKEN_NAME = warned_of(
        "special tokens, by what they are for",
        "files name different tokens for one thing: give the tokenizer that was trained with",
    )
    TOKEN_ID = warned_of(
        "numbers of special tokens, by what they are for",
        "files give a special token different numbers: take care that config.json has those that "
        "were trained with",
    )
    SPECIAL_TOKEN = warned_of(
        "special tokens",
        "a special token is named that the tokenizer does not have: loading gives it a number of "
        "its own, which was not trained",
    )
    SPECIAL_WORD = noted(
        "special tokens, among the words of a tokenizer",
        "a word is named as a special token: it is left out wherever special tokens are",
    )
    TEMPLATE_TOKEN = noted(  # some models were trained with such marks as plain text
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
    TEXT_CUT = noted(
        "length of texts, where that is far below the model's positions",
        "texts are cut to fewer tokens than the model has positions for, if cutting is asked for",
    )
    PAD_TOKEN = warned_of(
        "token that fills up texts, for a classifier",
        "a classifier looks for the last token that is not pad_token_id: set it in config.json to "
        "the one that was trained with",
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
    RUN_FILE = warned_of(
        "what other files of one run say",
        "files of the run differ, and the export has the first of these: take care that it is the "
        "one that was trained with",
    )
    NODE_FILE = Row(  # whichever node was named first would decide
        "what files say that several nodes have beside their parts",
        "nodes of one checkpoint have other files of one name beside their parts",
        hint="Leave the one that was trained with in one of the folders, and remove the others",
    )
    BASE_FILE = noted(
        "what other files say, beside the base's",
        "files that the export takes from the run are not the base's",
    )
    CODE = warned_of(
        "code that a config names",
        "a config names code that is nowhere beside it, and loading fails without: put it there, "
        "or give a model folder that has it with --base",
    )
    PROCESSOR = warned_of(
        "processor",
        "files differ in the processor: take care that all are of the model that was trained",
    )
    PATCHES = warned_of(
        "sizes of what a processor makes",
        "the processor cuts images, or sounds, otherwise than the model takes them: give the "
        "processor that was trained with",
    )
    IMAGE_FAMILY = noted(  # a few models were trained with the other's
        "kind of model that images are prepared for",
        "the processor is that of another kind of model than the one that sees",
    )
    IMAGE_SIZE = noted(  # models that take several sizes have the largest in their config
        "size of an image",
        "the processor brings images to another size than config.json tells of",
    )
    SENTENCE_SIZE = warned_of(
        "size of what a step of a sentence-transformers model takes",
        "a step takes another size than the step before it gives: give the files of the model "
        "that was trained",
    )
    SENTENCE_STEP = warned_of(
        "steps of a sentence-transformers model",
        "the export lacks files of a step that modules.json names: copy that step's folder from "
        "where the model was trained",
    )
    SENTENCE_LENGTH = warned_of(
        "length of the texts of a sentence-transformers model",
        "texts may be longer than the model has positions for: mend max_seq_length",
        agreement=Agreement.BELOW,
    )
    CARD_TASK = noted(
        "what the model is, in the model card",
        "the model card tells of another kind of model: mend README.md",
    )
    NAMED_BASE = warned_of(
        "name of the base model, in all files that name it",
        "different base models are named: take care which one training began from",
    )
    LICENSE = warned_of(
        "licence",
        "files tell of different licences: take care which one holds for this model",
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


OF_BASE = frozenset(
    {
        *(Fact.BASE_CONFIG, Fact.BASE_ROPE, Fact.BASE_NAME, Fact.BASE_WEIGHTS),
        Fact.BASE_UNTRACED,
    }
)
"""What tells whether a base is the model that training began from."""
