"""The tokens of a tokenizer by number, held against its other files and those of other folders."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice

import msgspec
from msgspec import Raw, Struct

from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import TOKENIZER
from zexport.model.sidecars import Files
from zexport.model.tokenizer import (
    PIECES,
    VOCABULARY_LINES,
    Tokenizer,
    content_of,
    older_tokens,
    read_tokenizer,
)

_VOCABULARY = "vocab.json"
_MERGES = "merges"
_COPIED = (*PIECES, VOCABULARY_LINES)
"""Vocabularies that are saved as they were loaded, byte for byte."""


_COMMAS_MAX = 1_000_000
"""A vocabulary with more is not compared: it would take the memory of an export twice."""

_GIVEN = "--"
"""What the names of model folders begin with that training began from."""

_MARKS = {"\u0120": [b"ByteLevel"], "\u2581": [b"Metaspace"]}
"""What tokens have where a word begins, with the steps that know it by another name.

Source: tokenizers 0.23, ``pre_tokenizers/byte_level.rs`` and ``metaspace.rs``.
"""

_MARKED_MIN = 16
"""Fewer tokens may begin with a letter like that."""

_BETWEEN = b' \t\r\n",[]\\'
"""What stands between letters of merges, in JSON and in lines."""


class _Vocabulary(Struct, frozen=True):
    """The number of each token; the rules by name, of which merges have their number and CRC."""

    by: str
    tokens: dict[str, int]
    rules: dict[str, str | None]


def mark_statements(files: Files) -> Iterator[Statement]:
    """The mark that tokens have where a word begins, and what makes it and takes it back."""
    tokenizer = read_tokenizer(files)
    steps = {
        "what cuts texts": bytes(tokenizer.normalizer) + bytes(tokenizer.pre_tokenizer),
        "what joins tokens": bytes(tokenizer.decoder),
    }
    for mark, makers in _MARKS.items():
        forms = [form.encode() for form in (mark, json.dumps(mark)[1:-1])]
        begins = re.compile(rb'"(?:%b)' % b"|".join(map(re.escape, forms)))
        found = islice(begins.finditer(memoryview(tokenizer.model.vocab)), _MARKED_MIN)
        is_marked = len([*found]) == _MARKED_MIN
        for by, step in steps.items() if is_marked else ():
            is_made = any(maker in step for maker in (*makers, *forms))
            yield Statement(Fact.TOKENIZER_MARK, "known", "the vocabulary", repr(mark))
            yield Statement(Fact.TOKENIZER_MARK, "known" if is_made else "unknown", by, repr(mark))


def vocabulary_statements(
    copied: Files, folders: Mapping[str, Files], whose: str = "the export's"
) -> Iterator[Statement]:
    """The numbers of tokens, as the tokenizer that is copied, and every other of the run, has them.

    Tokens that the one copied alone has were added, and are held against nothing here; and
    transformers 5 writes the rules of an older base's tokenizer anew, in other words.
    """
    beside = {whose: {n: path for n, path in copied.items() if n != TOKENIZER}}
    others = beside | {f"{where}'s": files for where, files in folders.items()}
    yield from _of_copies(copied, others, whose)
    tokenizer = read_tokenizer(copied)
    yield from _of_older(copied, tokenizer, whose)
    own = None
    for by, files in others.items() if TOKENIZER in copied else ():
        is_same = files.get(TOKENIZER) == copied[TOKENIZER] or read_tokenizer(files) == tokenizer
        other = None if is_same else _of_folder(files, by)
        own = own or (other and _of_tokenizer(tokenizer, f"{whose} {TOKENIZER}"))
        if own is not None and other is not None:
            yield from _compared(own, other)


def _of_older(copied: Files, tokenizer: Tokenizer, whose: str) -> Iterator[Statement]:
    """A vocabulary of an older form beside the tokenizer, where most of its tokens are strange."""
    older = older_tokens(copied) if tokenizer.model.vocab else {}
    own = _of_tokenizer(tokenizer, TOKENIZER) if older else None
    known = own.tokens.keys() if own is not None else {*chain(*older.values())}
    for name, tokens in older.items():
        strange = {*tokens} - known
        if 2 * len(strange) > len(tokens):
            about = f"{len(strange):,} of {len(tokens):,} tokens, such as {min(strange)!r},"
            yield Statement(Fact.VOCABULARY, "not there", f"{whose} {TOKENIZER}", about)
            yield Statement(Fact.VOCABULARY, "there", f"{whose} {name}", about)


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
        for name, rule in one.rules.items():
            if name == _MERGES or not other.by.startswith(_GIVEN):
                yield Statement(Fact.VOCABULARY, rule, one.by, name)


def _of_copies(copied: Files, others: dict[str, Files], whose: str) -> Iterator[Statement]:
    for name in _COPIED:
        for by, files in {whose: copied, **others}.items() if name in copied else ():
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
        return _Vocabulary(f"{by} {_VOCABULARY}", tokens, {_MERGES: merges})
    return None


def _of_tokenizer(found: Tokenizer, by: str) -> _Vocabulary | None:
    with suppress(ValueError, RecursionError):
        tokens = _tokens(found.model.vocab)
        merges = _merges(bytes(found.model.merges))
        rules = {_MERGES: merges, "normalizer": _rule(found.normalizer)}
        rules["pre_tokenizer"] = _rule(found.pre_tokenizer)
        rules["post_processor"] = _rule(msgspec.json.encode(found.post_processor))
        rules["decoder"] = _rule(found.decoder)
        rules |= {f"the model's {key}": str(value) for key, value in found.model.switches.items()}
        return _Vocabulary(by, tokens | found.added, rules) if tokens else None
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


def _rule(raw: Raw | bytes) -> str:
    """A rule in a word, with the CRC of all that is said of it."""
    value = msgspec.json.decode(raw)
    kind = value.get("type") if isinstance(value, dict) else "none"
    return f"{kind} ({zlib.crc32(msgspec.json.encode(value, order='deterministic')):08x})"
