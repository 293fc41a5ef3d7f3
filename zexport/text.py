"""What is shown: foreign text with nothing that a terminal would obey, and values in brief."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

_SHOWN_MAX = 2000
_END = 400
"""Characters of one fact in a message; a name in a hostile file may have ten million. The end is
kept as well: a sentence says there what is wrong with the name before it."""


_PLACE = r"(?i)(?<![\w.~/])(?:[a-z][a-z0-9+.-]+:/|~/|\.{1,2}/|/)[^\s'\",;()]*"
"""A path from a root or a working directory, or an address."""

_EMPTY: tuple[object, ...] = ((), {}, frozenset())
_ITEMS_SHOWN = 3
_ITEM_LENGTH_MAX = 150


def printable(text: str) -> str:
    """``text`` with everything that is not visible written out as an escape.

    That covers control characters, line breaks, terminal escapes, marks that change the direction
    of writing, blanks without width, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """A fact as a message has it: ``printable``, and cut where it would fill the screen."""
    text = str(value)
    if len(text) <= _SHOWN_MAX:
        return printable(text)
    begin, end = text[: _SHOWN_MAX - _END], text[-_END:]
    return f"{printable(begin)}... ({len(text)} characters) ...{printable(end)}"


def placeless(text: str) -> str:
    """``text`` with the last two names of each path and address in it alone.

    So it says the same wherever its files lie, and nothing of a machine.
    """
    return re.sub(_PLACE, _last_names, text)


def _last_names(place: re.Match[str]) -> str:
    names = [one for one in place[0].split("/") if one.strip(".~") and not one.endswith(":")]
    return "/".join(names[-2:])


def some(names: Sequence[str], shown: int = 12) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - shown
    listed = ", ".join(names[:shown])
    return f"{listed} and {more:,} more" if more > 0 else listed


def shell_word(word: str | Path) -> str:
    """A word of a command that can be pasted into a shell, whatever is in it.

    What is not visible, or not in this locale, is given by its bytes (``$'...'``, which bash, zsh
    and POSIX 2024 know).
    """
    text = str(word)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, os.fsencode(text))) + "'"


def _escaped(byte: int) -> str:
    char = chr(byte)
    if char in "\\'":
        return f"\\{char}"
    return char if " " <= char <= "~" else f"\\{byte:03o}"


def brief(value: Any) -> str:
    """A record in a few lines: of many items their number, and nothing of what is empty."""
    told = ((name, getattr(value, name)) for name in type(value).__match_args__)
    known = (one for one in told if one[1] is not None and one[1] not in _EMPTY)
    return f"{type(value).__name__}({', '.join(f'{name}={_brief(item)}' for name, item in known)})"


def _brief(item: object) -> str:
    number = len(item) if isinstance(item, Collection) and not isinstance(item, str) else 0
    if number <= _ITEMS_SHOWN and len(text := repr(item)) <= _ITEM_LENGTH_MAX:
        return text
    return f"<{number:,} item{'s' * (number != 1)}>" if number else f"<{type(item).__name__}>"
