r"""Match names by a pattern from an adapter's config, in bounded time."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import prod
from typing import Any

_WILD_NBYTES = 64 << 20
"""Memory that RE2 may use for a pattern."""

_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATED = re.compile(r"[*+{]|(?<![(*+?}])\?")
_READ_OTHERWISE = re.compile(r"\{,|\[:")  # a{,2} and [[:alpha:]]
_REPEATED_MAX = 6
_CHOICES_MAX = 1000


def match_whole(pattern: str, text: str) -> re.Match[str] | None:
    r"""``re.fullmatch``, in a time that no pattern makes long.

    RE2 never goes back; of what it does not know, such as looking around, or reads in another way,
    Python matches what is simple. RE2 has ``\w`` and ``\d`` for ASCII alone.

    Raises:
        ValueError: it is no pattern, or one that may take for ever.
    """
    match = _whole_matcher(pattern, is_ascii=text.isascii())
    found: re.Match[str] | None = match(text)
    return found


@cache
def _whole_matcher(pattern: str, *, is_ascii: bool) -> Callable[[str], Any]:
    import re2  # noqa: PLC0415 - most checkpoints have none

    options = re2.Options()
    options.max_mem, options.log_errors = _WILD_NBYTES, False
    try:
        known = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if is_ascii and not _READ_OTHERWISE.search(pattern):
        with suppress(re2.error):
            match: Callable[[str], Any] = re2.compile(pattern, options).fullmatch
            return match
    choices = prod(1 + group.count("|") for group in pattern.split(")"))
    repeated = len(_REPEATED.findall(pattern))
    if _REPEATED_GROUP.search(pattern) or repeated > _REPEATED_MAX or choices > _CHOICES_MAX:
        raise ValueError("it may take for ever to match")
    return known.fullmatch
