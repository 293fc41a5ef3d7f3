"""The tokens of a tokenizer by number, compared with those of other folders."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec
from msgspec import Raw, Struct

from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import TOKENIZER
from zexport.model.sidecars import Files
from zexport.model.tokenizer import PIECES, VOCABULARY_LINES, Tokenizer, content_of, read_tokenizer

_VOCABULARY = "vocab.json"
_MERGES = "merges"
_COPIED = (*PIECES, VOCABULARY_LINES)
"""Vocabularies that are saved as they were loaded, byte for byte."""

_COMMAS_MAX = 1_000_000
"""A vocabulary with more is not compared: it would take the memory of an export twice."""

_OWN = "the export's"
_BETWEEN = b' \t\r\n",[]\\'
"""What stands between letters of merges, in JSON and in lines."""


class _Vocabulary(Struct, frozen=True):
    """The number of each token, and the merges by their letters."""

    by: str
    tokens: dict[str, int]
    merges: str | None


def vocabulary_statements(copied: Files, folders: Mapping[str, Files]) -> Iterator[Statement]:
    """The numbers of tokens, as the tokenizer that is copied, and that of every folder, has them.

    Tokens that only the one copied has were added, and are not compared. Nor are its rules:
    transformers 5 writes those of an older tokenizer in other words.
    """
    others = {f"{where}'s": files for where, files in folders.items()}
    yield from _of_copies(copied, others)
    tokenizer = read_tokenizer(copied)
    own = None
    for by, files in others.items() if TOKENIZER in copied else ():
        is_same = files.get(TOKENIZER) == copied[TOKENIZER] or read_tokenizer(files) == tokenizer
        other = None if is_same else _of_folder(files, by)
        own = own or (other and _of_tokenizer(tokenizer, f"{_OWN} {TOKENIZER}"))
        if own is not None and other is not None:
            yield from _compared(own, other)


def _compared(own: _Vocabulary, other: _Vocabulary) -> Iterator[Statement]:
    both = own.tokens.keys() & other.tokens.keys()
    differing = [token for token in both if own.tokens[token] != other.tokens[token]]
    if differing:
        token = min(differing, key=own.tokens.__getitem__)
        about = f"{len(differing):,} of {len(both):,} tokens, such as {token!r},"
        for one in (own, other):
            yield Statement(Fact.VOCABULARY, one.tokens[token], one.by, about)
    if lost := other.tokens.keys() - own.tokens.keys():
        about = f"{len(lost):,} tokens, such as {min(lost, key=other.tokens.__getitem__)!r},"
        yield Statement(Fact.VOCABULARY, "not there", own.by, about)
        yield Statement(Fact.VOCABULARY, "there", other.by, about)
    for one in () if differing else (own, other):
        yield Statement(Fact.VOCABULARY, one.merges, one.by, _MERGES)


def _of_copies(copied: Files, others: dict[str, Files]) -> Iterator[Statement]:
    for name in _COPIED:
        for by, files in {_OWN: copied, **others}.items() if name in copied else ():
            if (content := content_of(files, name)) is not None:
                told = f"{len(content):,} bytes ({zlib.crc32(content):08x})"
                yield Statement(Fact.VOCABULARY, told, f"{by} {name}")


def _of_folder(files: Files, by: str) -> _Vocabulary | None:
    """The vocabulary of a folder's tokenizer, or, where it has none, of its older form."""
    if TOKENIZER in files:
        return _of_tokenizer(read_tokenizer(files), f"{by} {TOKENIZER}")
    with suppress(ValueError, RecursionError):
        tokens = _tokens(content_of(files, _VOCABULARY) or b"")
        lines = (content_of(files, f"{_MERGES}.txt") or b"").splitlines()
        merges = _merges(b"".join(one for one in lines if not one.startswith(b"#version")))
        return _Vocabulary(f"{by} {_VOCABULARY}", tokens, merges)
    return None


def _of_tokenizer(found: Tokenizer, by: str) -> _Vocabulary | None:
    with suppress(ValueError, RecursionError):
        tokens = _tokens(found.model.vocab)
        merges = _merges(bytes(found.model.merges))
        return _Vocabulary(by, tokens | found.added, merges) if tokens else None
    return None


def _tokens(raw: Raw | bytes) -> dict[str, int]:
    """The tokens with their numbers, which in a list are their places; of too many, none."""
    if bytes(raw).count(b",") > _COMMAS_MAX:
        return {}
    found = msgspec.json.decode(raw, type=dict[str, int] | list[tuple[str, float]])
    if isinstance(found, dict):
        return found
    return {token: number for number, (token, _) in enumerate(found)}


def _merges(text: bytes) -> str | None:
    """The merges by the CRC of their letters, however they are written.

    In JSON a merge is one string or two, in ``merges.txt`` a line.
    """
    if b"\\u" in text:  # escaped letters, as no tokenizer's library writes
        return None
    letters = text.translate(None, _BETWEEN)
    return f"{len(letters):,} letters ({zlib.crc32(letters):08x})" if letters else None
