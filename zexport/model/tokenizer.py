"""The files of a tokenizer, read: ``tokenizer.json``, and tables that stand beside it."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import Raw, Struct

from zexport.errors import ZexportError
from zexport.filenames import TOKENIZER
from zexport.model.sidecars import Files
from zexport.store.contents import read_json_object, read_regular
from zexport.store.json import JsonObject

_NBYTES_MAX = 64 << 20
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
VOCABULARY_LINES = "vocab.txt"
_FIELD_1 = 0x0A
"""The mark of a protocol buffer's field 1, where that has a length."""

_VARINT_NBITS = 64


class _Added(Struct, frozen=True):
    id: int
    content: str


class _Model(Struct, frozen=True):
    vocab: Raw = Raw(b"")
    merges: Raw = Raw(b"[]")


class Tokenizer(Struct, frozen=True):
    """Added tokens, vocabulary and merges of ``tokenizer.json``; the large parts as written.

    Source: tokenizers 0.23, ``tokenizer/serialization.rs``.
    """

    added_tokens: list[_Added] = []
    model: _Model = _Model()

    @property
    def added(self) -> dict[str, int]:
        """The numbers of tokens that were added to the vocabulary."""
        return {one.content: one.id for one in self.added_tokens}


def read_tokenizer(files: Files) -> Tokenizer:
    """The tokenizer of some files; an empty one where there is none, or none that can be read."""
    with suppress(ValueError, RecursionError):
        return msgspec.json.decode(content_of(files, TOKENIZER) or b"", type=Tokenizer)
    return Tokenizer()


def older_tokens(files: Files) -> dict[str, list[str]]:
    """The tokens of vocabularies in older forms: SentencePiece's, and one in lines."""
    lines = (content_of(files, VOCABULARY_LINES) or b"").decode(errors="replace").splitlines()
    told = {name: _pieces(content_of(files, name) or b"") for name in PIECES}
    told[VOCABULARY_LINES] = [line.split(" ")[0] for line in lines]
    return {name: tokens for name, tokens in told.items() if tokens}


def _pieces(model: bytes) -> list[str]:
    """The pieces of a SentencePiece model, in order; none where it is something else.

    Source: sentencepiece 0.2, ``sentencepiece_model.proto``: pieces are field 1, of which field 1
    is the text.
    """
    pieces, at = [], 0
    with suppress(IndexError):
        while at < len(model) and model[at] == _FIELD_1:
            size, start = _varint(model, at + 1)
            if model[start] != _FIELD_1:
                return []
            length, text = _varint(model, start + 1)
            if text + length > start + size:
                return []
            pieces.append(model[text : text + length].decode(errors="replace"))
            at = start + size
    return pieces


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of a protocol buffer, and where it ends; an ``IndexError`` where it does not."""
    value = shift = 0
    while data[at] & 0x80:
        if shift >= _VARINT_NBITS:
            raise IndexError(at)
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


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
