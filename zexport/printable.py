"""Foreign text made fit to be shown: nothing in it that a terminal or a log would obey."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

_SHOWN_MAX = 2000
_END = 400
"""Characters of one fact in a message; a name in a hostile file may have ten million. The end is
kept as well: a sentence says there what is wrong with the name before it."""


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
