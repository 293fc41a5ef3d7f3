"""Numbers, paths, lists and tables as text.

Names from a checkpoint may contain control characters, so all text goes through ``printable``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click
from msgspec import Struct

from zexport.storage.location import working_folder
from zexport.text import printable

if TYPE_CHECKING:
    from zexport.findings import Finding

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_COMMAND = re.compile(r"\bzexport [a-z]+ .*")


class Console(Struct, frozen=True):
    """A text stream; ``width`` is that of a terminal, on which text is wrapped and colored."""

    stream: IO[str]
    width: int | None = None
    has_color: bool = False


def size(nbytes: int) -> str:
    """Return bytes in decimal units, as on the Hub: ``512 B``, ``1.6 GB``."""
    value, unit = float(nbytes), 0
    while round(value, 1) >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Return a duration such as ``0.4 s``, ``42 s``, ``3 min 20 s`` or ``1 h 5 min``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60} s"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def plural(count: int, noun: str) -> str:
    """Return ``1 file`` or ``1,024 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def near(path: Path | str) -> str:
    """Return a path relative to the working directory, if it is in it."""
    here = working_folder()
    is_below = here is not None and Path(path).is_relative_to(here)
    return str(Path(path).relative_to(here)) if here and is_below else str(path)


def near_text(text: str) -> str:
    """Return a text whose paths in the working directory are relative."""
    here = working_folder()
    if here is None or here == here.parent:
        return text
    return re.sub(rf"(?<![\w.~/-]){re.escape(str(here))}/(?=[^\s/~-])(?!\w+:/)", "", text)


def print_line(console: Console, text: str = "", style: str = "") -> None:
    """Print one line; ``style`` is such as ``bold red``."""
    text = printable(text)
    if style and console.has_color:
        color = style.removeprefix("bold").strip() or None
        text = click.style(text, fg=color, bold=style.startswith("bold"))
    console.stream.write(f"{text}\n")


def print_text(console: Console, text: str, style: str = "", *, indent: int = 0) -> None:
    """Print words, wrapped on a terminal; lines after the first are indented.

    A command at the end, which may be copied, is not wrapped.
    """
    text = printable(text)
    if console.width is None or len(text) <= console.width:
        print_line(console, text, style)
        return
    command = _COMMAND.search(text)
    words, rest = (text[: command.start()], command[0]) if command else (text, "")
    blanks = " " * indent
    for line in textwrap.wrap(
        words,
        console.width,
        subsequent_indent=blanks,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        print_line(console, line, style)
    if rest:
        print_line(console, blanks + rest, style)


def print_list(console: Console, title: str, items: Iterable[str], style: str = "bold") -> None:
    """Print an empty line, a title, and its items; nothing if there are no items."""
    items = tuple(items)
    if not items:
        return
    print_line(console)
    print_line(console, title, style)
    for item in items:
        print_text(console, f"  - {item}", indent=4)


def print_rest(console: Console, hidden: int, option: str, noun: str = "more") -> None:
    """Print how many rows are hidden, and the option that lists all."""
    if hidden > 0:
        print_line(console, f"  and {hidden:,} {noun}; {option} lists all of them")


def print_findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    lines = []
    for found in findings:
        where = f"{found.tensor}: " if found.tensor else ""
        count = f" ({plural(found.count, 'element')})" if found.count else ""
        detail = f": {found.detail}" if found.detail else ""
        lines.append(f"{where}{found.kind}{count}{detail}{', allowed' if found.accepted else ''}")
    print_list(console, title, first_of(lines, 20), "bold yellow")


def first_of(lines: Sequence[str], count: int) -> list[str]:
    """Return the first lines, and another one if that is not all."""
    more = [f"and {len(lines) - count:,} more; --json lists all of them"]
    return [*lines[:count], *(more if len(lines) > count else ())]


def print_facts(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print labels and values in two columns, without the rows that have no value."""
    shown = [(printable(label), value) for label, value in rows if value]
    width = max((_cells(label) for label, _ in shown), default=0)
    for label, value in shown:
        blanks = " " * (width - _cells(label))
        print_text(console, f"  {label}{blanks}  {value}", indent=width + 4)


def print_table(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = ""
) -> None:
    """Print an empty line and a table; a heading ``>Size`` aligns its column to the right."""
    print_line(console)
    if title:
        print_line(console, title, "bold")
    heads = [name.removeprefix(">") for name in columns]
    table = [[printable(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(_cells, column)) for column in zip(*table, strict=True)]
    for row in table:
        line = ""
        for cell, name, width in zip(row, columns, widths, strict=True):
            blanks = " " * (width - _cells(cell))
            line += "  " + (blanks + cell if name.startswith(">") else cell + blanks)
        print_line(console, line.rstrip())


def _cells(text: str) -> int:
    """Return how many columns of a terminal a text needs."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - few names need it

    return cell_len(text)
