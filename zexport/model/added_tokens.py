"""Tokens that were added to a tokenizer: do they have a row in the embedding?"""

from __future__ import annotations

import json
from pathlib import Path

from zexport.model.config import ConfigFile
from zexport.model.sidecars import Sidecars
from zexport.regular_files import open_regular

_TOKENIZER = "tokenizer.json"
_KEY = b'"added_tokens"'
_HEAD_NBYTES = 4 << 20
"""Where the added tokens are: before the vocabulary, which may have tens of megabytes (tokenizers
0.22, ``tokenizer/serialization.rs``)."""


def tokens_without_a_row(sidecars: Sidecars) -> str:
    """What to say where the tokenizer has a token beyond the config's vocabulary; else nothing.

    Such a token ends a model with an index error, or worse. Tokens that were never added are not
    looked at.
    """
    rows, path = _largest_vocabulary(sidecars.config), sidecars.copied.get(_TOKENIZER)
    if rows is None or path is None:
        return ""
    last = _last_added_token(path)
    if last is None or last < rows:
        return ""
    return (
        f"the tokenizer has tokens up to number {last}, and the embedding {rows} rows: the last "
        "ones cannot be embedded; give the tokenizer that the model was trained with"
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
