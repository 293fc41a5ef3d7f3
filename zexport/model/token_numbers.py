"""The numbers of tokens that files beside the weights name, and the embedding's rows for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from zexport.facts.rows import AnyFact
from zexport.facts.statements import Statement
from zexport.filenames import ADDED, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG
from zexport.model.config import ConfigFile
from zexport.model.sidecars import Files
from zexport.model.tokenizer import content_of, older_tokens, read_tokenizer, table_of
from zexport.ranges.dtypes import Shape
from zexport.store.json import Json, as_table, several

ADDED_TOKENS = "added tokens up to"
_VOCABULARY = "vocabulary up to"
_SLOW_VOCABULARIES = {"vocab.json": _VOCABULARY, ADDED: ADDED_TOKENS}
_DECODER, _BESIDE = "added_tokens_decoder up to", "tokens added beside the tokenizer up to"
_IDS = re.compile(r"\w+_token_(?:ids?|index)")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"\s*(?::\s*(\d{1,12})|,)', re.DOTALL)
"""A token of a vocabulary with its number, or with its score where its place is its number."""

_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings?|embed_in|tok_embeddings|token_embedding|shared"
    r"|embeddings)\.(?:base_layer\.)?weight$"
)
"""What input embeddings are called (transformers 5.23, ``get_input_embeddings`` of all models)."""


class TokenNumber(Struct, frozen=True):
    """The number of a token, or the largest of several, and the file that names it."""

    about: str
    number: int
    by: str


def token_numbers(files: Files) -> tuple[TokenNumber, ...]:
    """Those that a tokenizer and a generation config name; what cannot be read names none."""
    tokenizer = read_tokenizer(files)
    largest = {_VOCABULARY: _largest(memoryview(tokenizer.model.vocab))}
    largest[ADDED_TOKENS] = max(tokenizer.added.values(), default=-1)
    found = [TokenNumber(about, n, TOKENIZER) for about, n in largest.items() if n >= 0]
    if beside := _in_decoder(files):
        found.append(TokenNumber(_DECODER, max(beside), TOKENIZER_CONFIG))
    if TOKENIZER in files and (content := content_of(files, ADDED)):
        found.append(TokenNumber(_BESIDE, _largest(content), ADDED))
    for name, about in () if TOKENIZER in files else _SLOW_VOCABULARIES.items():
        if content := content_of(files, name):
            found.append(TokenNumber(about, _largest(content), name))
    older = older_tokens(files) if TOKENIZER not in files else {}
    found += [TokenNumber(_VOCABULARY, len(all_of) - 1, name) for name, all_of in older.items()]
    return (*found, *_ids(table_of(files, GENERATION_CONFIG), GENERATION_CONFIG))


def _in_decoder(files: Files) -> list[int]:
    """The numbers of the added tokens that a tokenizer's config names."""
    decoder = as_table(table_of(files, TOKENIZER_CONFIG).get("added_tokens_decoder"))
    named = (number for number, token in decoder.items() if as_table(token).get("content"))
    return [int(number) for number in named if re.fullmatch(r"\d{1,12}", number)]


def _largest(vocabulary: bytes | memoryview) -> int:
    """The largest number of a vocabulary: in a list of tokens and scores that of the last."""
    largest = count = -1
    for found in _TOKEN.finditer(vocabulary):
        count += 1
        largest = max(largest, int(found[1] or -1))
    return count if vocabulary[:1] == b"[" else largest


def _ids(content: Mapping[str, Json], by: str) -> Iterator[TokenNumber]:
    """The tokens that a config names, one or several under a key; what is below zero means none."""
    for key, value in content.items():
        if not _IDS.fullmatch(key):
            continue
        known = [number for number in several(value) if type(number) is int]
        if known:
            yield TokenNumber(key, max(known), by)


def embedding_rows(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The rows of the embeddings among weights, by name."""
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    return {name: shape[0] for name, shape in matrices.items() if _EMBEDDING.search(name)}


def stated_rows(config: ConfigFile | None) -> int | None:
    """The rows that a config tells of."""
    sizes = [] if config is None else config.vocab_sizes.values()
    return max((size for size in sizes if type(size) is int), default=None)


def config_numbers(config: ConfigFile | None) -> Iterator[TokenNumber]:
    """The tokens that a config names, of its language model too."""
    content = {} if config is None else dict(config.content)
    inner = () if config is None else (key for path in config.vocab_sizes for key in path)
    for table in (content, *map(content.get, inner)):
        yield from _ids(as_table(table), CONFIG)


def token_statements(
    fact: AnyFact, rows: int | None, by: str, numbers: Iterable[TokenNumber]
) -> Iterator[Statement]:
    """The rows of an embedding and the tokens that need one; nothing where no rows are known."""
    numbers = [] if rows is None else [*numbers]
    yield from (
        Statement(fact, rows, by, about) for about in dict.fromkeys(one.about for one in numbers)
    )
    yield from (Statement(fact, one.number, one.by, one.about) for one in numbers)
