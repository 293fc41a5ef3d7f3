"""Tokens by name: the one that ends a text, and the numbers of those that were added."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from zexport.errors import ZexportError
from zexport.facts.statements import Statement
from zexport.facts.table import Fact
from zexport.model.config import ConfigFile
from zexport.model.sidecars import CONFIG, GENERATION_CONFIG, TOKENIZER
from zexport.store.files import read_regular
from zexport.store.json import Json, JsonObject, read_json_object

TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
_NBYTES_MAX = 64 << 20
_END = "eos_token"
Files = Mapping[str, Path]


class _Token(Struct, frozen=True):
    id: int
    content: str


class _Model(Struct, frozen=True):
    vocab: msgspec.Raw = msgspec.Raw(b"")


class _Tokenizer(Struct, frozen=True):
    added_tokens: list[_Token] = []
    model: _Model = _Model()


def decoder_tokens(files: Files) -> dict[str, int]:
    """The added tokens that a tokenizer's config tells of."""
    found = _read(files, TOKENIZER_CONFIG).get("added_tokens_decoder")
    table = found if isinstance(found, dict) else {}
    named = {_text(token): number for number, token in table.items()}
    return {token: int(n) for token, n in named.items() if token and re.fullmatch(r"\d{1,12}", n)}


def added_statements(files: Files) -> Iterator[Statement]:
    """The number of each token that one of several files adds."""
    numbers = {token: n for token, n in _read(files, ADDED).items() if type(n) is int}
    beside = {TOKENIZER_CONFIG: decoder_tokens(files), ADDED: numbers}
    if not any(beside.values()):
        return
    stated = {TOKENIZER: {token.content: token.id for token in _tokenizer(files).added_tokens}}
    for by, tokens in (stated | beside).items():
        for token, number in tokens.items():
            yield Statement(Fact.ADDED_TOKEN, number, by, repr(token))


def end_statements(files: Files, config: ConfigFile | None) -> Iterator[Statement]:
    """The tokens at which generating ends, that first which decides, and the tokenizer's own.

    Source: transformers 5.23, ``generation/configuration_utils.py``: without a generation config it
    is made of the model's.
    """
    content = {} if config is None else config.content
    stated = {GENERATION_CONFIG: _read(files, GENERATION_CONFIG), CONFIG: content}
    ends = {by: _numbers(table.get("eos_token_id")) for by, table in stated.items()}
    if not any(ends.values()):
        return
    for by in (TOKENIZER_CONFIG, "special_tokens_map.json"):
        token = _text(_read(files, by).get(_END))
        if token:
            ends[f"{by} ({token})"] = _numbers(_number_of(token, files))
            break
    for by, numbers in ends.items():
        yield Statement(Fact.END_TOKEN, numbers or None, by)


def _number_of(token: str, files: Files) -> int | None:
    """The number of a token; none where it is not certain."""
    found = _tokenizer(files)
    added = {one.content: one.id for one in found.added_tokens} or decoder_tokens(files)
    if token in added:
        return added[token]
    name = re.escape(json.dumps(token, ensure_ascii=False).encode(errors="replace"))
    vocabulary = memoryview(found.model.vocab) if TOKENIZER in files else b""
    numbers = {int(n) for n in re.findall(rb"(?<!\\)%b\s*:\s*(\d{1,12})\b" % name, vocabulary)}
    return numbers.pop() if len(numbers) == 1 else None


def _numbers(value: Json) -> list[int]:
    """One number or several, in order; what is below zero means none."""
    several = value if isinstance(value, list) else [value]
    return sorted({number for number in several if isinstance(number, int) and number >= 0})


def _text(token: Json) -> str:
    """A token, which is written as it is or in a table."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _tokenizer(files: Files) -> _Tokenizer:
    with suppress(msgspec.MsgspecError, ValueError, RecursionError, OSError, KeyError):
        return msgspec.json.decode(
            read_regular(files[TOKENIZER], _NBYTES_MAX) or b"", type=_Tokenizer
        )
    return _Tokenizer()


def _read(files: Files, name: str) -> JsonObject:
    """What a file says; nothing where it cannot be read, which is told elsewhere."""
    with suppress(ZexportError, OSError):
        return read_json_object(files[name]) if name in files else {}
    return {}
