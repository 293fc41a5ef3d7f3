"""Tokens by name: the one that ends a text, and the numbers of those that were added."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import (
    ADDED,
    CONFIG,
    GENERATION_CONFIG,
    PROCESSOR_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from zexport.model.chat_template import marks
from zexport.model.config import ConfigFile, settings_of
from zexport.model.sidecars import MODULES, Files
from zexport.model.tokenizer import Tokenizer, read_tokenizer, table_of
from zexport.store.json import Json, JsonObject, as_list, as_table, several

_END, _PAD = "eos_token", "pad_token"
_END_OF_TURN = re.compile(
    r"<\|(?:im_end|eot_id|eot|end|end_of_turn|return|END_OF_TURN_TOKEN)\|>"
    r"|<end_of_(?:turn|utterance)>|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
_OF_INPUTS = re.compile(r"\w*(?:image|video|audio|vision|speech)\w*_token_(?:id|index)")
_GENERATING = ("ForCausalLM", "ForConditionalGeneration")
_TOKEN_ID = re.compile(r"(?P<name>(?!eos_|pad_)\w+_token)_(?:id|index)")
_EMBEDDING = {MODULES, "cls_token", "sep_token"}
"""Files, or settings of a tokenizer, of models that make no texts."""

_LACKING_MAX = 64
"""More of them tell nothing more, and looking for each reads the whole vocabulary."""

_ENDING_TEXT = "<|endoftext|>"
_OF_CLASS = {
    "LlamaTokenizer": {"bos_token": "<s>", _END: "</s>", "unk_token": "<unk>"},
    "GPT2Tokenizer": dict.fromkeys(("bos_token", _END, "unk_token"), _ENDING_TEXT),
    "Qwen2Tokenizer": dict.fromkeys((_END, "unk_token", _PAD), _ENDING_TEXT),
    "BertTokenizer": {
        name: f"[{name.partition('_')[0].upper()}]"
        for name in ("unk_token", "sep_token", _PAD, "cls_token", "mask_token")
    },
    "GemmaTokenizer": {
        name: f"<{name.partition('_')[0]}>"
        for name in ("bos_token", _END, "unk_token", _PAD, "mask_token")
    },
}
"""Tokens that a tokenizer's class has where its files name no others.

Source: transformers 5.23, ``__init__`` of the most used tokenizers.
"""


def decoder_tokens(files: Files) -> dict[str, int]:
    """The added tokens that a tokenizer's config tells of."""
    named = {_text(token): number for number, token in _decoder(files).items()}
    return {token: int(n) for token, n in named.items() if token and re.fullmatch(r"\d{1,12}", n)}


def _decoder(files: Files) -> JsonObject:
    return as_table(table_of(files, TOKENIZER_CONFIG).get("added_tokens_decoder"))


def added_statements(files: Files) -> Iterator[Statement]:
    """The number of each token that one of several files adds."""
    numbers = {token: n for token, n in table_of(files, ADDED).items() if type(n) is int}
    beside = {TOKENIZER_CONFIG: decoder_tokens(files), ADDED: numbers}
    if not any(beside.values()):
        return
    tokenizer = read_tokenizer(files)
    yield from _flags(files, tokenizer)
    stated = {TOKENIZER: tokenizer.added}
    for by, tokens in (stated | beside).items():
        for token, number in tokens.items():
            yield Statement(Fact.ADDED_TOKEN, number, by, repr(token))


def _flags(files: Files, tokenizer: Tokenizer) -> Iterator[Statement]:
    """How added tokens are found in a text, as both files of a tokenizer have it."""
    table = _decoder(files)
    for one in tokenizer.added_tokens:
        other = table.get(str(one.id))
        if not isinstance(other, dict) or _text(other) != one.content:
            continue
        for key, value in one.flags.items():
            about = f"{one.content!r}, {key}:"
            yield Statement(Fact.TOKEN_FLAG, value, TOKENIZER, about)
            yield Statement(Fact.TOKEN_FLAG, other.get(key), TOKENIZER_CONFIG, about)


def number_statements(files: Files) -> Iterator[Statement]:
    """The numbers that one tokenizer gives a token in several places: parts of its file."""
    found = read_tokenizer(files)
    added = {number: token for token, number in found.added.items()}
    for number, token in found.in_vocabulary(added):
        about = f"{TOKENIZER}, token {number}:"
        yield Statement(Fact.ADDED_TOKEN, repr(added[number]), "its added_tokens", about)
        yield Statement(Fact.ADDED_TOKEN, repr(token), "its vocabulary", about)
    around = found.around_texts
    numbers = _numbers_of(around, files)
    for token, number in around.items():
        yield Statement(Fact.ADDED_TOKEN, numbers.get(token), TOKENIZER, repr(token))
        yield Statement(Fact.ADDED_TOKEN, number, "its post_processor", repr(token))


def end_statements(files: Files, config: ConfigFile | None) -> Iterator[Statement]:
    """The tokens at which generating ends, that first which decides, and the tokenizer's own.

    Source: transformers 5.23, ``generation/configuration_utils.py``: without a generation config it
    is made of the model's, and what that leaves out of its language model's.
    """
    content = settings_of(config)
    stated = {GENERATION_CONFIG: table_of(files, GENERATION_CONFIG), CONFIG: content}
    is_generating = any(c.endswith(_GENERATING) for c in (config.architectures if config else ()))
    if is_generating and "eos_token_id" not in stated[GENERATION_CONFIG]:
        stated |= {f"{CONFIG}, {key}": table for key, table in _language_models(content)}
    ends = {by: numbers_in(table.get("eos_token_id")) for by, table in stated.items()}
    if is_generating:  # else nothing ends
        yield from _words_that_end(files, ends)
    named = _text(table_of(files, TOKENIZER_CONFIG).get(_END))
    if not any(ends.values()):
        if is_generating and named:
            yield Statement(Fact.END_TOKEN, "none", CONFIG)
            yield Statement(Fact.END_TOKEN, named, TOKENIZER_CONFIG)
        return
    for by in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        token = _text(table_of(files, by).get(_END))
        if token:
            ends[f"{by} ({token})"] = numbers_in(_number_of(token, files))
            break
    template, used = marks(files)
    turns = _numbers_of(filter(_END_OF_TURN.fullmatch, used), files)
    ends[f"{template} ({', '.join(turns)})"] = sorted(turns.values())
    generating = stated[GENERATION_CONFIG]
    is_whole = bool(generating) and generating.get("_from_model_config") is not True
    if is_whole and not ends[GENERATION_CONFIG] and is_generating:  # none is taken from elsewhere
        yield Statement(Fact.END_TOKEN, "none", GENERATION_CONFIG)
    for by, numbers in ends.items():
        yield Statement(Fact.END_TOKEN, numbers or None, by)


def behind_statements(files: Files, config: ConfigFile | None) -> Iterator[Statement]:
    """The token that ends a text, put behind every text: nothing is generated after it."""
    settings = table_of(files, TOKENIZER_CONFIG)
    is_decoder = any(c.endswith("ForCausalLM") for c in (config.architectures if config else ()))
    if not is_decoder or {*files, *settings} & _EMBEDDING:
        return
    end = _text(settings.get(_END))
    behind = {
        f"add_eos_token of {TOKENIZER_CONFIG}": settings.get("add_eos_token") is True,
        f"the post_processor of {TOKENIZER}": end in read_tokenizer(files).behind_texts,
    }
    for by in (by for by, is_put in behind.items() if is_put):
        yield Statement(Fact.END_BEHIND, repr(end), by)
        yield Statement(Fact.END_BEHIND, "nothing", "what texts are generated from")


def _words_that_end(files: Files, ends: Mapping[str, list[int]]) -> Iterator[Statement]:
    """The tokens that end a text, where they are words among special tokens."""
    tokenizer = read_tokenizer(files)
    special = {one.id for one in tokenizer.added_tokens}
    strange = {*chain(*ends.values())} - special if special else set()
    for number, token in tokenizer.in_vocabulary(strange) if strange else ():
        if not token.startswith(("<", "[")):  # some are not told to be special
            for by in (by for by, numbers in ends.items() if number in numbers):
                yield Statement(Fact.END_WORD, f"{number} ends a text", by, repr(token))
            yield Statement(Fact.END_WORD, "a word", TOKENIZER, repr(token))


def _language_models(content: Mapping[str, Json]) -> Iterator[tuple[str, JsonObject]]:
    """The parts of a config that may be of a language model."""
    for key in ("decoder", "generator", "text_config"):
        if isinstance(table := content.get(key), dict):
            yield key, table


def id_statements(files: Files, config: ConfigFile | None) -> Iterator[Statement]:
    """The number of each named token (of an image, say), and the token's own number.

    Those that end texts and fill them up are stated apart.
    """
    tables = {CONFIG: settings_of(config)}
    tables[GENERATION_CONFIG] = table_of(files, GENERATION_CONFIG)
    for by, table in tables.items():
        for key, value in table.items():
            found = _TOKEN_ID.fullmatch(key)
            if found and isinstance(value, int):
                yield Statement(Fact.TOKEN_ID, value, by, found["name"])
    own = read_tokenizer(files).added.values()
    for key, value in tables[CONFIG].items():
        if _OF_INPUTS.fullmatch(key) and isinstance(value, int) and own and value not in own:
            yield Statement(Fact.TOKEN_ID, f"a special token, {value},", CONFIG, key)
            yield Statement(Fact.TOKEN_ID, "no special token of this number", TOKENIZER, key)
    named = [
        (by, key, token)
        for by in (TOKENIZER_CONFIG, PROCESSOR_CONFIG, SPECIAL_TOKENS)
        for key, value in table_of(files, by).items()
        if key.endswith("_token") and (token := _text(value))
    ]
    numbers = _numbers_of((token for _, key, token in named if key not in (_END, _PAD)), files)
    for by, key, token in named:
        yield Statement(Fact.TOKEN_NAME, token, by, key)
        if key not in (_END, _PAD):
            yield Statement(Fact.TOKEN_ID, numbers.get(token), f"{by} ({token})", key)
    yield from _more_names(files)


def _more_names(files: Files) -> Iterator[Statement]:
    """The special tokens without a purpose, where two files list them."""
    listed = {by: _listed(files, by) for by in (TOKENIZER_CONFIG, SPECIAL_TOKENS)}
    every = dict.fromkeys(token for tokens in listed.values() for token in tokens)
    for token in every if all(listed.values()) else ():
        for by, tokens in listed.items():
            said = "special" if token in tokens else "not named"
            yield Statement(Fact.TOKEN_NAME, said, by, repr(token))


def _listed(files: Files, by: str) -> list[str]:
    """The special tokens that a file lists, by the newer key and the older."""
    table = table_of(files, by)
    keys = ("extra_special_tokens", "additional_special_tokens")
    return [text for key in keys for token in as_list(table.get(key)) if (text := _text(token))]


def lacking_statements(files: Files) -> Iterator[Statement]:
    """Special tokens that files name, or a template uses, and ``tokenizer.json`` does not have."""
    if TOKENIZER not in files:
        return
    found = read_tokenizer(files)
    template, used = marks(files)
    named = dict.fromkeys(used, (Fact.TEMPLATE_TOKEN, template))
    named |= {token: (Fact.SPECIAL_TOKEN, by) for token, by in _named_special(files).items()}
    added = found.added
    unknown = (token for token in named if token not in added) if found.model.vocab else ()
    lacking = (token for token in unknown if not _in_vocabulary(token, found, rb"[:,]"))
    for token in islice(lacking, _LACKING_MAX):
        fact, by = named[token]
        yield Statement(fact, "a special token", by, repr(token))
        yield Statement(fact, "no token", TOKENIZER, repr(token))
    for token in islice((one for one in named if one.isalnum() and one not in added), _LACKING_MAX):
        known = _in_vocabulary(token, found, rb"[:,]")
        yield Statement(Fact.SPECIAL_WORD, "a special token", named[token][1], repr(token))
        yield Statement(Fact.SPECIAL_WORD, "a word" if known else None, TOKENIZER, repr(token))


def _named_special(files: Files) -> dict[str, str]:
    """Special tokens, each with who names it: a file, or the tokenizer's class for want of one."""
    content = table_of(files, TOKENIZER_CONFIG)
    of_class = str(content.get("tokenizer_class")).removesuffix("Fast")
    named: dict[str, str] = {}
    for key, token in _OF_CLASS.get(of_class, {}).items():
        if key not in content:
            named[token] = f"{of_class}, the tokenizer_class"
    named |= dict.fromkeys(table_of(files, ADDED), ADDED)
    named |= dict.fromkeys(decoder_tokens(files), TOKENIZER_CONFIG)
    for by in (TOKENIZER_CONFIG, SPECIAL_TOKENS, PROCESSOR_CONFIG):
        for key, value in table_of(files, by).items():
            is_table = isinstance(value, dict) and key.endswith("_special_tokens")
            every = [*as_table(value).values()] if is_table else several(value)
            tokens = every if key.endswith(("_token", "_special_tokens")) else []
            named |= {text: by for token in tokens if (text := _text(token))}
    return named


def pad_statements(files: Files, config: ConfigFile) -> Iterator[Statement]:
    """The token that fills up texts, for a classifier that looks for the last one that does not.

    Source: transformers 5.23, ``modeling_layers.py``, ``GenericForSequenceClassification``.
    """
    content = dict(_language_models(config.content)).get("text_config", config.content)
    stated = content.get("pad_token_id")
    token = _text(table_of(files, TOKENIZER_CONFIG).get(_PAD))
    number = _number_of(token, files) if token else None
    if stated is None and number is None:
        yield Statement(Fact.PAD_TOKEN, "one", "a classifier that is given several texts at once")
    yield Statement(Fact.PAD_TOKEN, "none" if stated is None else stated, CONFIG)
    yield Statement(Fact.PAD_TOKEN, number, f"{TOKENIZER_CONFIG} ({token})")


def _number_of(token: str, files: Files) -> int | None:
    """The number of a token; none where it is not certain."""
    return _numbers_of([token], files).get(token)


def _numbers_of(tokens: Iterable[str], files: Files) -> dict[str, int]:
    """The numbers of tokens, but for those that are not certain."""
    found = read_tokenizer(files)
    added = found.added or decoder_tokens(files)
    numbers: dict[str, int] = {}
    for token in tokens:
        if token in added:
            numbers[token] = added[token]
            continue
        known = {int(n) for n in _in_vocabulary(token, found, rb":\s*(\d{1,12})\b")}
        if len(known) == 1:
            numbers[token] = known.pop()
    return numbers


def _in_vocabulary(token: str, found: Tokenizer, then: bytes) -> list[bytes]:
    """What follows a token's name in a vocabulary, wherever a pattern does."""
    names = (json.dumps(token, ensure_ascii=is_escaped) for is_escaped in (False, True))
    name = b"|".join({re.escape(one.encode(errors="replace")) for one in names})
    vocabulary = memoryview(found.model.vocab)
    return re.findall(rb"(?<!\\)(?:%b)\s*%b" % (name, then), vocabulary)


def numbers_in(value: Json) -> list[int]:
    """One number or several, in order; what is below zero means none."""
    return sorted({number for number in several(value) if isinstance(number, int) and number >= 0})


def _text(token: Json) -> str:
    """A token, which is written as it is or in a table."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
