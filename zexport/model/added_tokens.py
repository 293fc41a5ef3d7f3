"""Tokens that were added to a tokenizer: do they have a row in the embedding?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zexport.model.config import ConfigFile
from zexport.store.files import open_regular

_TOKENIZER = "tokenizer.json"
_KEY = b'"added_tokens"'
_HEAD_NBYTES = 4 << 20
"""Where the added tokens are: before the vocabulary, which may have tens of megabytes (tokenizers
0.22, ``tokenizer/serialization.rs``)."""


@dataclass(frozen=True, slots=True)
class TokensBeyond:
    """A tokenizer whose last added token has no row in the embedding that the config tells of."""

    last: int
    rows: int

    def __str__(self) -> str:
        """Both in words."""
        return f"tokens up to number {self.last}, and the embedding {self.rows} rows"


def tokens_beyond(config: ConfigFile | None, last: int | None) -> TokensBeyond | None:
    """A tokenizer's last added token, if it is beyond the config's vocabulary.

    Such a token ends a model with an index error, or worse. Tokens that were never added are not
    looked at.
    """
    rows = _largest_vocabulary(config)
    return None if rows is None or last is None or last < rows else TokensBeyond(last, rows)


def last_added_token(files: Mapping[str, Path]) -> int | None:
    """The largest number among a tokenizer's added tokens; ``None`` where they cannot be read."""
    try:
        with open_regular(files[_TOKENIZER]) as file:
            head = file.read(_HEAD_NBYTES)
        _, found, rest = head.partition(_KEY)
        text = rest.decode(errors="replace").lstrip(" \t\r\n:")
        tokens, _ = json.JSONDecoder().raw_decode(text) if found else ([], 0)
    except (KeyError, OSError, ValueError, RecursionError):  # it is copied, whatever it is
        return None
    entries = tokens if isinstance(tokens, list) else []
    numbers = (entry.get("id") for entry in entries if isinstance(entry, dict))
    return max((number for number in numbers if type(number) is int), default=None)


def _largest_vocabulary(config: ConfigFile | None) -> int | None:
    sizes = [] if config is None else config.vocab_sizes.values()
    return max((size for size in sizes if type(size) is int), default=None)
