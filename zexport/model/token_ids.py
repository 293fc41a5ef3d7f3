"""The highest token ids of a tokenizer and of configs, which need a row in the embedding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TypedDict

import msgspec
from msgspec import Raw, Struct

from zexport.errors import DamagedCheckpointError
from zexport.filenames import ADDED, CONFIG, GENERATION_CONFIG, TOKENIZER
from zexport.model.config import ConfigFile
from zexport.model.hf_files import Files
from zexport.storage.files import read_regular
from zexport.storage.json import JsonTable, read_json_object, several

ADDED_TOKENS, _VOCABULARY = "added tokens up to", "vocabulary up to"
_NBYTES_MAX = 64 << 20
_IDS = re.compile(r"\w+_token_(?:ids?|index)")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"\s*(?::\s*(\d{1,12})|,)', re.DOTALL)
"""A token with its id, or followed by its score in a list, in which its position is its id."""


class _Added(TypedDict):
    id: int


class TokenId(Struct, frozen=True):
    """The id of a token, or the highest of several, and the file (``by``) that names it."""

    about: str
    number: int
    by: str

    def __str__(self) -> str:
        """Such as ``eos_token_id 2 in config.json``."""
        return f"{self.about} {self.number} in {self.by}"


def file_ids(files: Files) -> Iterator[TokenId]:
    """Yield the highest ids of a tokenizer and a generation config; an unreadable one has none."""
    if content := _content(files, TOKENIZER):
        with suppress(ValueError, RecursionError):
            tokenizer = msgspec.json.decode(content, type=dict[str, Raw])
            added = msgspec.json.decode(tokenizer.get("added_tokens", b"[]"), type=list[_Added])
            model = msgspec.json.decode(tokenizer.get("model", b"{}"), type=dict[str, Raw])
            yield TokenId(_VOCABULARY, _highest(bytes(model.get("vocab", b""))), TOKENIZER)
            yield TokenId(ADDED_TOKENS, max((one["id"] for one in added), default=-1), TOKENIZER)
    else:
        yield TokenId(_VOCABULARY, _highest(_content(files, "vocab.json")), "vocab.json")
        yield TokenId(ADDED_TOKENS, _highest(_content(files, ADDED)), ADDED)
    if GENERATION_CONFIG in files:
        with suppress(DamagedCheckpointError):
            yield from _named(read_json_object(files[GENERATION_CONFIG]), GENERATION_CONFIG)


def config_ids(config: ConfigFile | None) -> Iterator[TokenId]:
    for table in config.tables.values() if config is not None else ():
        yield from _named(table, CONFIG)


def _named(content: JsonTable, by: str) -> Iterator[TokenId]:
    for key, value in content.items():
        if ids := [one for one in several(value) if type(one) is int and _IDS.fullmatch(key)]:
            yield TokenId(key, max(ids), by)


def _highest(vocabulary: bytes) -> int:
    """Return the highest id of a vocabulary in JSON, or -1."""
    highest = last = -1
    for found in _TOKEN.finditer(vocabulary):
        last += 1
        highest = max(highest, int(found[1] or -1))
    return last if vocabulary[:1] == b"[" else highest


def _content(files: Files, name: str) -> bytes:
    return (read_regular(files[name], _NBYTES_MAX) or b"") if name in files else b""
