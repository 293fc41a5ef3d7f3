"""The files of a tokenizer, read: ``tokenizer.json``, and tables that stand beside it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import msgspec
from msgspec import Raw, Struct

from zexport.errors import ZexportError
from zexport.model.sidecars import TOKENIZER, Files
from zexport.store.files import read_regular
from zexport.store.json import JsonObject, read_json_object

_NBYTES_MAX = 64 << 20


class _Added(Struct, frozen=True):
    id: int
    content: str


class _Model(Struct, frozen=True):
    vocab: Raw = Raw(b"")
    merges: Raw = Raw(b"[]")


class Tokenizer(Struct, frozen=True):
    """What ``tokenizer.json`` says; the large parts, vocabulary and merges, as they are written.

    Source: tokenizers 0.23, ``tokenizer/serialization.rs``.
    """

    added_tokens: list[_Added] = []
    model: _Model = _Model()
    normalizer: Raw = Raw(b"null")
    pre_tokenizer: Raw = Raw(b"null")
    truncation: object = None
    padding: object = None

    @property
    def added(self) -> dict[str, int]:
        """The numbers of tokens that were added to the vocabulary."""
        return {one.content: one.id for one in self.added_tokens}

    @property
    def lengths(self) -> dict[str, int]:
        """What is done to texts, with the length in tokens that it is done to.

        Programs that use the tokenizers library alone go by it; transformers does not.
        """
        padding = _of(self.padding, "strategy")
        told = {
            "texts are cut to": _of(self.truncation, "max_length"),
            "texts are filled up to": _of(padding, "Fixed"),
        }
        return {done: length for done, length in told.items() if isinstance(length, int)}


def _of(table: object, key: str) -> object:
    return table.get(key) if isinstance(table, Mapping) else None


def read_tokenizer(files: Files) -> Tokenizer:
    """The tokenizer of some files; an empty one where there is none, or none that can be read."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return msgspec.json.decode(content_of(files, TOKENIZER) or b"", type=Tokenizer)
    return Tokenizer()


def content_of(files: Files, name: str) -> bytes | None:
    """What a file holds; nothing where it cannot be read, which is told elsewhere."""
    with suppress(OSError):
        return read_regular(files[name], _NBYTES_MAX) if name in files else None
    return None


def table_of(files: Files, name: str) -> JsonObject:
    """What a JSON file says; nothing where it cannot be read, which is told elsewhere."""
    with suppress(ZexportError, OSError):
        return read_json_object(files[name]) if name in files else {}
    return {}
