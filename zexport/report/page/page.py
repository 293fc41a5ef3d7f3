"""A page: one HTML file with style, script and all data in it, for which no network is needed.

What comes from a checkpoint is text on it and never markup: the template escapes every value, the
data cannot end the element that they lie in, and the page's own policy lets nothing run or load but
the style and the script that it was made with.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from zexport.checkpoint.resolve import is_tag_dir, list_run_checkpoints, list_tags
from zexport.errors import MissingExtraError, OutputError
from zexport.optional_deps import to_install
from zexport.report.page.drawing import Drawn
from zexport.report.page.treemap import Box
from zexport.report.text import plural, size
from zexport.storage.files import absolute, exists, is_file, open_input, write_durably
from zexport.storage.os_errors import writing
from zexport.text import shown

if TYPE_CHECKING:
    from jinja2 import Template

_MARK = "<!doctype html>\n<!-- a page of zexport -->"
_ROWS_WHOLE = 300
"""Up to so many tensors, the page lists each also without its script; of more, their patterns."""

_NUMBERS = re.compile(r"\d+")
_HOLE = "\x01"
"""Where a number stood; no shown text has it."""


class Mood(Enum):
    """How a sentence is meant."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    PLAIN = "plain"


class Remarks(Struct, frozen=True):
    """Some sentences under a title."""

    title: str
    items: tuple[str, ...]
    mood: Mood

    @classmethod
    def all_of(cls, told: Iterable[tuple[str, Iterable[str], str]]) -> Iterator[Remarks]:
        """Those that have anything to say."""
        for title, items, mood in told:
            if listed := tuple(items):
                yield cls(title, listed, Mood(mood))


class Bar(Struct, frozen=True):
    """One size among others."""

    label: str
    nbytes: int


class Column(Struct, frozen=True):
    """A column of the table.

    Its style is ``number`` (set to the right, and sorted as such), ``whole`` (never broken), or
    none.
    """

    title: str
    style: str = ""


class Row(Struct, frozen=True):
    """A tensor of the table: its name, the colour that it has in the pictures, and its cells."""

    name: str
    color: int
    cells: tuple[str, ...]


class Page(Struct, frozen=True):
    """All that a page shows.

    Attributes:
        kind: ``inspect`` or ``diff``, which the colours go by.
        subject: what it is about, in a line.
        verdict: the judgement, in a sentence without a full stop.
        next_step: a command, or what to do; may be empty.
        colors: what each colour means.
        drawn: the strips; their tensors are numbers that ``row_of`` brings to rows of the table.
    """

    kind: str
    subject: str
    verdict: str
    mood: Mood
    next_step: str
    facts: tuple[tuple[str, str], ...]
    proof: tuple[str, ...]
    remarks: tuple[Remarks, ...]
    colors: tuple[str, ...]
    bars: tuple[Bar, ...]
    boxes: tuple[Box, ...]
    drawn: Drawn | None
    row_of: tuple[int, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def check_place(path: Path) -> None:
    """Nothing: a page can be made, and ``path`` is free or holds a page already.

    Raises:
        MissingExtraError: jinja2 is not installed.
        OutputError: something else lies there, or it is the folder of a checkpoint, by whose time
            a Trainer chooses what it deletes.
    """
    _parts()
    with writing(path):
        if exists(path) and not _is_page(path):
            raise OutputError(
                "exists and is no page of zexport", path=path, hint="Choose another name"
            )
    folder = absolute(path).parent
    is_trainers = is_file(folder / "trainer_state.json") and bool(list_tags(folder))
    if is_tag_dir(folder) or (is_trainers and not list_run_checkpoints(folder)):
        hint = "Choose a place outside"
        raise OutputError("lies in a checkpoint, which is never touched", path=path, hint=hint)


def write_page(path: Path, page: Page) -> None:
    """The page as the file ``path``, whole or not at all; see ``check_place``."""
    check_place(path)
    content = page_html(page).encode()
    with writing(path):
        write_durably(path, content)


def page_html(page: Page) -> str:
    """The page as text."""
    template, style, script = _parts()
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _MARK + template.render(
        page=page,
        policy=policy,
        style=style,
        script=script,
        data=_data(page),
        groups=tuple(_groups(page.rows)),
        is_whole=len(page.rows) <= _ROWS_WHOLE,
    )


def _is_page(path: Path) -> bool:
    if not is_file(path):
        return False
    with open_input(path) as file:
        return file.read_at(0, len(_MARK)) == _MARK.encode()


@cache
def _parts() -> tuple[Template, str, str]:
    """The template, the style and the script, which lie beside this module."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415
    except ImportError as cause:
        raise MissingExtraError("a page needs jinja2", hint=to_install("report")) from cause
    loader = PackageLoader("zexport.report", "page")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size, "shown": shown, "plural": plural}
    style, script = (loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    return environment.get_template("page.html"), style, script


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _groups(rows: Sequence[Row]) -> Iterator[Row]:
    """One row for all tensors whose names differ in numbers alone; and their number."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_pattern_of(row.name)[0], []).append(row)
    for members in groups.values():
        cells = (
            same[0] if len(set(same)) == 1 else "various"
            for same in zip(*(row.cells for row in members), strict=True)
        )
        color = max(row.color for row in members)
        name = _group_name([row.name for row in members])
        yield Row(name, color, (f"{len(members):,}", *cells))


def _pattern_of(name: str) -> tuple[str, tuple[str, ...]]:
    """A name without its numbers, and the numbers."""
    text = shown(name)
    return _NUMBERS.sub(_HOLE, text), tuple(_NUMBERS.findall(text))


def _group_name(names: Sequence[str]) -> str:
    """One name for many of a pattern: ``layers.{0-31}.up``."""
    if len(names) == 1:
        return shown(names[0])
    found = [_pattern_of(name) for name in names]
    parts = found[0][0].split(_HOLE)
    columns = zip(*(numbers for _, numbers in found), strict=True)
    told = (_range(column) + part for column, part in zip(columns, parts[1:], strict=True))
    return parts[0] + "".join(told)


def _range(numbers: Sequence[str]) -> str:
    different = sorted(set(numbers), key=lambda one: (len(one), one))
    return different[0] if len(different) == 1 else f"{{{different[0]}-{different[-1]}}}"


def _data(page: Page) -> str:
    """What the script works on, as JSON that no element of HTML can be ended by."""
    told: dict[str, object] = {
        **_names(page.rows),
        "colors": [row.color for row in page.rows],
        "columns": [
            _coded([row.cells[number] for row in page.rows]) for number in range(len(page.columns))
        ],
        "rowOf": page.row_of,
    }
    if page.drawn is not None:
        told["cuts"] = [[*sum(cut.pieces, ())] for cut in page.drawn.cuts]
        told["strips"] = [(shown(name), *rest) for name, *rest in page.drawn.strips]
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _names(rows: Sequence[Row]) -> Mapping[str, object]:
    """The names by their patterns: thousands of layers differ in numbers alone."""
    found = [_pattern_of(row.name) for row in rows]
    patterns = _coded([pattern for pattern, _ in found])
    numbers = [",".join(holes) for _, holes in found]
    return {"patterns": patterns["values"], "pattern": patterns["index"], "numbers": numbers}


def _coded(cells: Sequence[str]) -> Mapping[str, object]:
    """A column: its different values, and which of them each row has."""
    numbers = {cell: number for number, cell in enumerate(dict.fromkeys(cells))}
    return {"values": list(numbers), "index": [numbers[cell] for cell in cells]}
