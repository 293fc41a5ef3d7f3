"""The files of a tokenizer, read: ``tokenizer.json``, and tables that stand beside it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from contextlib import suppress

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import asdict

from zexport.errors import ZexportError
from zexport.filenames import TOKENIZER
from zexport.model.sidecars import Files
from zexport.store.contents import read_json_object, read_regular
from zexport.store.json import JsonObject, as_list, as_table

_NBYTES_MAX = 64 << 20
_NUMBERED = re.compile(rb'("(?:[^"\\]|\\.)*+")\s*:\s*(\d{1,12})')
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
VOCABULARY_LINES = "vocab.txt"
_FIELD_1 = 0x0A
"""The mark of a protocol buffer's field 1, where that has a length."""

_VARINT_NBITS = 64


class _Added(Struct, frozen=True):
    id: int
    content: str
    lstrip: object = None
    rstrip: object = None
    normalized: object = None
    single_word: object = None
    special: object = None

    @property
    def flags(self) -> dict[str, object]:
        """How the token is found in a text."""
        return {key: said for key, said in asdict(self).items() if key not in ("id", "content")}


class _Model(Struct, frozen=True):
    vocab: Raw = Raw(b"")
    merges: Raw = Raw(b"[]")
    dropout: object = None
    unk_token: object = None
    continuing_subword_prefix: object = None
    end_of_word_suffix: object = None
    byte_fallback: object = False
    ignore_merges: object = False

    @property
    def switches(self) -> dict[str, object]:
        """What is said of how a word is made of tokens; an empty text says what none does."""
        said = asdict(self).items()
        return {key: one or None for key, one in said if key not in ("vocab", "merges", "dropout")}


class Tokenizer(Struct, frozen=True):
    """What ``tokenizer.json`` says; the large parts, vocabulary and merges, as they are written.

    Source: tokenizers 0.23, ``tokenizer/serialization.rs``.
    """

    added_tokens: list[_Added] = []
    model: _Model = _Model()
    normalizer: Raw = Raw(b"null")
    pre_tokenizer: Raw = Raw(b"null")
    decoder: Raw = Raw(b"null")
    post_processor: object = None
    truncation: object = None
    padding: object = None

    @property
    def added(self) -> dict[str, int]:
        """The numbers of tokens that were added to the vocabulary."""
        return {one.content: one.id for one in self.added_tokens}

    def in_vocabulary(self, numbers: Container[int]) -> Iterator[tuple[int, str]]:
        """Those of the numbers that the vocabulary gives to a token, unless it is a list."""
        vocabulary = memoryview(self.model.vocab)
        is_list = bytes(vocabulary[:1]) == b"["
        for found in () if is_list else _NUMBERED.finditer(vocabulary):
            if int(found[2]) in numbers:
                with suppress(ValueError, RecursionError):
                    yield int(found[2]), msgspec.json.decode(found[1], type=str)

    @property
    def normalizing(self) -> JsonObject:
        """What is done to a text before it is cut, where that is one step that can be read."""
        with suppress(ValueError, RecursionError):
            return as_table(msgspec.json.decode(self.normalizer))
        return {}

    @property
    def _posts(self) -> list[object]:
        """What is done to the tokens of a text, step by step."""
        steps = _of(self.post_processor, "processors")
        return steps if isinstance(steps, list) else [self.post_processor]

    @property
    def behind_texts(self) -> list[str]:
        """The tokens that are put behind every text."""
        found: list[str] = []
        for step in self._posts:
            for one in as_list(_of(step, "single")):
                token = _of(_of(one, "SpecialToken"), "id")
                found = [*found, token] if isinstance(token, str) else []
        return found

    @property
    def around_texts(self) -> dict[str, int]:
        """The tokens that are put around every text, with the numbers that are put there."""
        found: dict[str, int] = {}
        for step in self._posts:
            for token, one in as_table(_of(step, "special_tokens")).items():
                ids = as_list(_of(one, "ids"))
                if len(ids) == 1 and type(ids[0]) is int:
                    found[token] = ids[0]
        return found

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
    return as_table(table).get(key)


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
