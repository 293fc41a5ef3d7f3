"""How numbers are written, and how lines and tables are put on a console.

All text goes through ``printable``: names in a checkpoint may hold what a terminal would obey.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from msgspec import Struct

from zexport.storage.location import working_folder
from zexport.text import printable

if TYPE_CHECKING:
    from rich.console import Console as StyledConsole

    from zexport.findings import Finding

_FINDINGS_SHOWN = 20
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_STEP = 1000
_COMMAND = r"(?:(?<=: )|(?<=type ))zexport [a-z]+ .*"
"""What follows "as in:" or "type"."""
_UP = r"(?:^|=)((?:\.\./)+)"
"""How far a word of a command line goes up, or the value of an option."""


class PlainConsole(Struct, frozen=True):
    """A stream that shows no styles: rich takes longer to begin than a small export."""

    stream: IO[str]

    def print(self, text: str) -> None:
        """Put out one line."""
        self.stream.write(f"{text}\n")


Console: TypeAlias = "PlainConsole | StyledConsole"


def size(nbytes: int) -> str:
    """Bytes as people write them, decimal as on the hub: ``512 B``, ``1.6 GB``."""
    value, unit = float(nbytes), 0
    while round(value, 1) >= _STEP and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Seconds as people write them: ``0.4 s``, ``42 s``, ``3 min 20 s``, ``1 h 5 min``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60} s"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def plural(count: int, noun: str) -> str:
    """``1 file``, ``1,024 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_line(console: Console, text: str = "", style: str = "") -> None:
    """One line, neither wrapped nor cut."""
    if isinstance(console, PlainConsole):
        console.print(printable(text))
        return
    from rich.text import Text  # noqa: PLC0415 - without a terminal, nothing needs rich

    console.print(Text(printable(text), style=style), soft_wrap=True)


def near(path: Path | str) -> str:
    """A path as it is typed from here, where it lies below the working folder or what ``..`` is."""
    for folder, typed in _starts():
        if Path(path).is_relative_to(folder):
            return str(Path(typed, Path(path).relative_to(folder)))
    return str(path)  # an address, too, which a path would have one slash of


def _starts() -> Iterator[tuple[Path, str]]:
    """The folder that paths are typed from, and those above that this command line goes up to."""
    here = working_folder()
    if here is not None:
        yield here, ""
        ups = [len(up[1]) // len("../") for word in sys.argv[1:] if (up := re.search(_UP, word))]
        above = [folder for folder in here.parents if folder != folder.parent]
        for level, folder in enumerate(above[: max(ups, default=0)], start=1):
            yield folder, "../" * level


def print_text(console: Console, text: str, style: str = "", *, indent: int = 0) -> None:
    """Words, on a terminal folded to its width; ``indent`` blanks begin all lines but the first.

    In a pipe or a file they stay on one line, where programs find them.
    """
    if isinstance(console, PlainConsole) or not console.is_terminal:
        print_line(console, text, style)
        return
    for line in folded(printable(text), console.width, indent):
        print_line(console, line, style)


def folded(text: str, width: int, indent: int = 0) -> list[str]:
    """A text as lines of a width, the first of which alone begins without blanks.

    No word is broken, and a command at its end, which may be copied, stands on a line of its own.
    """
    blanks = " " * indent
    command = re.search(_COMMAND, text) if len(text) > width else None
    words, rest = (text, "") if command is None else (text[: command.start()], command[0])
    lines = wrapped(words, width, "", blanks)
    return [*lines, f"{blanks}{rest}"] if rest else lines or [""]


def wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """A text as lines of a width that begin with blanks; no word is broken."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def near_text(text: str) -> str:
    """A text whose paths are as they are typed from here, as ``near`` has one."""
    for folder, typed in _starts():
        if folder != folder.parent:
            begin = rf"(?<![\w.~/-]){re.escape(str(folder))}/(?=[^\s/~-])(?!\w+:/)"
            text = re.sub(begin, typed, text)
    return text


def print_list(
    console: Console, title: str, items: Iterable[str], style: str = "", *, is_first: bool = False
) -> None:
    """A title and its items, one a line, after an empty one; nothing at all for no items."""
    items = tuple(items)
    if items and not is_first:
        print_line(console)
    if items:
        print_line(console, title, style or "bold")
    for item in items:
        print_text(console, f"  - {item}", indent=4)


def print_rest(console: Console, hidden: int, option: str, what: str = "more") -> None:
    """That there is more than what is shown, if there is, and which option lists all of it."""
    if hidden > 0:
        print_line(console, f"  and {hidden:,} {what}; {option} lists all of them")


def print_findings(
    console: Console, title: str, findings: Sequence[Finding], *, is_first: bool = False
) -> None:
    """A line for each finding; after twenty, how many more there are."""
    lines = []
    for found in findings[:_FINDINGS_SHOWN]:
        where = f"{found.tensor}: " if found.tensor else ""
        count = f" ({plural(found.count, 'element')})" if found.count else ""
        detail = f": {found.detail}" if found.detail else ""
        lines.append(f"{where}{found.kind}{count}{detail}{', allowed' if found.accepted else ''}")
    if len(findings) > _FINDINGS_SHOWN:
        lines.append(f"and {len(findings) - _FINDINGS_SHOWN:,} more; --json lists all of them")
    print_list(console, title, lines, "bold yellow", is_first=is_first)


def print_facts(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Labels and values in two columns; rows without a value are left out."""
    told = [(printable(label), value) for label, value in rows if value]
    width = max((_width(label) for label, _ in told), default=0)
    for label, value in told:
        print_text(console, f"  {label}{' ' * (width - _width(label))}  {value}", indent=width + 4)


def print_table(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = ""
) -> None:
    """A table after an empty line, in which a name is never cut.

    Where it is too wide for a terminal, the first cell of a row stands above the others. A heading
    that begins with ``>`` is that of a column of numbers, set to the right.
    """
    print_line(console)
    if title:
        print_line(console, title, "bold")
    heads = [name.removeprefix(">") for name in columns]
    sides = "".join(">" if name.startswith(">") else "<" for name in columns)
    width = None
    if not isinstance(console, PlainConsole) and console.is_terminal:
        width = console.width
    shown = [[printable(cell) for cell in row] for row in (heads, *rows)]
    style = "dim"
    for lines in _laid_out(shown, sides, width):
        for line in lines:
            print_line(console, line, style)
        style = ""


def _laid_out(
    rows: Sequence[Sequence[str]], sides: str, width: int | None, indent: int = 2
) -> list[list[str]]:
    """The lines of each row, columns under one another; rich's own table would cut long cells.

    It is one line where all of them fit into the width, if there is one.
    """
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    blanks = " " * indent
    if width is None or len(sides) == 1 or indent + sum(widths) + 2 * len(widths) - 2 <= width:
        return [[blanks + _aligned(row, sides, widths)] for row in rows]
    below = _laid_out([row[1:] for row in rows], sides[1:], width, indent + 2)
    before = ["", *(row[0] for row in rows)]
    return [
        ([blanks + (row[0] or "-")] if row[0] != last else [])
        + [line for line in rest if line.strip()]
        for last, row, rest in zip(before, rows, below, strict=False)
    ]


def _aligned(row: Sequence[str], sides: str, widths: Sequence[int]) -> str:
    cells = []
    for cell, side, width in zip(row, sides, widths, strict=True):
        blanks = " " * (width - _width(cell))
        cells.append(blanks + cell if side == ">" else cell + blanks)
    return "  ".join(cells).rstrip()


def _width(cell: str) -> int:
    """Columns of a terminal that a text takes."""
    if cell.isascii():
        return len(cell)
    from rich.cells import cell_len  # noqa: PLC0415 - few names need it

    return cell_len(cell)
