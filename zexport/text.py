"""Text for people: untrusted text without control characters, short lists, shell words."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

_SHOWN_MAX = 2000
_END = 400
"""Characters of one fact in a message; a hostile file may have a name of ten million. The end is
kept too, because a sentence has the cause there."""

_PLACE = r"(?i)(?<![\w.~/])(?:[a-z][a-z0-9+.-]+:/|~/|\.{1,2}/|/)[^\s'\",;()]*"
"""A path from a root or a working directory, or an address."""

_EMPTY: tuple[object, ...] = (None, (), {}, frozenset())
_ITEMS_SHOWN = 3
_ITEM_LENGTH_MAX = 150


def printable(text: str) -> str:
    """Return ``text`` with every invisible character escaped.

    That includes control characters, line breaks, marks of writing direction, zero-width spaces and
    lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """Return a value for a message: ``printable``, and shortened if it would fill the screen."""
    text = str(value)
    if len(text) <= _SHOWN_MAX:
        return printable(text)
    begin, end = text[: _SHOWN_MAX - _END], text[-_END:]
    return f"{printable(begin)}... ({len(text)} characters) ...{printable(end)}"


def placeless(text: str) -> str:
    """Return ``text`` with only the last two names of each path and address.

    It is then the same on every machine, and names none.
    """

    def last_names(place: re.Match[str]) -> str:
        names = [one for one in place[0].split("/") if one.strip(".~") and not one.endswith(":")]
        return "/".join(names[-2:])

    return re.sub(_PLACE, last_names, text)


def some(names: Sequence[str], shown: int = 12) -> str:
    """Return the first names and the number of the rest."""
    more = len(names) - shown
    listed = ", ".join(names[:shown])
    return f"{listed} and {more:,} more" if more > 0 else listed


def shell_word(word: str | Path) -> str:
    """Return a word of a command, quoted for a shell.

    Invisible characters, and those outside the locale, are bytes in ``$'...'``, which bash, zsh and
    POSIX 2024 accept.
    """
    text = str(word)
    if text.isprintable():
        return shlex.quote(text)
    special = {ord("\\"): r"\\", ord("'"): r"\'"}
    escaped = (
        special.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}")
        for byte in os.fsencode(text)
    )
    return f"$'{''.join(escaped)}'"


def brief(value: Any) -> str:
    """Return the ``repr`` of a record without empty fields, and with the length of long ones."""
    items = ((name, getattr(value, name)) for name in type(value).__match_args__)
    known = (f"{name}={_brief(item)}" for name, item in items if item not in _EMPTY)
    return f"{type(value).__name__}({', '.join(known)})"


def _brief(item: object) -> str:
    number = len(item) if isinstance(item, Collection) and not isinstance(item, str) else 0
    if number <= _ITEMS_SHOWN and len(text := repr(item)) <= _ITEM_LENGTH_MAX:
        return text
    return f"<{number:,} item{'s' * (number != 1)}>" if number else f"<{type(item).__name__}>"
