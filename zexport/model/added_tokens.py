"""Tokens that were added to a tokenizer: do they have a row in the embedding?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zexport.model.config import ConfigFile
from zexport.model.sidecars import Sidecars
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


def tokens_beyond(sidecars: Sidecars) -> TokensBeyond | None:
    """The tokenizer's last added token, if it is beyond the config's vocabulary.

    Such a token ends a model with an index error, or worse. Tokens that were never added are not
    looked at.
    """
    rows, path = _largest_vocabulary(sidecars.config), sidecars.copied.get(_TOKENIZER)
    if rows is None or path is None:
        return None
    last = _last_added_token(path)
    return None if last is None or last < rows else TokensBeyond(last, rows)


def tokens_without_a_row(sidecars: Sidecars) -> str:
    """What to say where the tokenizer has a token beyond the config's vocabulary; else nothing."""
    found = tokens_beyond(sidecars)
    if found is None:
        return ""
    return (
        f"the tokenizer has {found}: the last ones cannot be embedded; give the tokenizer that the "
        "model was trained with"
    )


def _largest_vocabulary(config: ConfigFile | None) -> int | None:
    sizes = [] if config is None else config.vocab_sizes.values()
    return max((size for size in sizes if type(size) is int), default=None)


def _last_added_token(tokenizer: Path) -> int | None:
    """The largest number among the added tokens; ``None`` where they cannot be read."""
    try:
        with open_regular(tokenizer) as file:
            head = file.read(_HEAD_NBYTES)
        _, found, rest = head.partition(_KEY)
        text = rest.decode(errors="replace").lstrip(" \t\r\n:")
        tokens, _ = json.JSONDecoder().raw_decode(text) if found else ([], 0)
    except (OSError, ValueError, RecursionError):  # whatever it is, it is copied as it is
        return None
    entries = tokens if isinstance(tokens, list) else []
    numbers = (entry.get("id") for entry in entries if isinstance(entry, dict))
    return max((number for number in numbers if type(number) is int), default=None)
