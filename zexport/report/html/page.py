"""One HTML file with style, script, pictures and data in it.

Text from a checkpoint is never markup: the template escapes all values, the data cannot end its
element, and the content security policy permits only this style and this script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from zexport.checkpoint.resolve import is_tag_dir, list_run_checkpoints, list_tags
from zexport.errors import MissingExtraError, OutputError
from zexport.inspect.strips import Piece, Strip
from zexport.optional_deps import to_install
from zexport.report.text import plural, size
from zexport.storage.files import absolute, exists, is_file, open_input, write_durably
from zexport.storage.os_errors import writing
from zexport.text import shown

if TYPE_CHECKING:
    from jinja2 import Template

_MARK = "<!doctype html>\n<!-- a page of zexport -->"
_ROWS_MAX = 300
"""Rows in the HTML itself; the script has all of them."""

_NUMBERS = re.compile(r"\d+")
_HOLE = "\x01"
"""Stands for a number in a pattern of names; escaped text never contains it."""


_WIDTH, _HEIGHT = 1000.0, 420.0
_BOXES_MAX = 400
_STRIPS_MAX = 1024
_STRIP_WIDTH_MIN = 2.0
_LABELS_MAX = 48


class Row(Struct, frozen=True):
    """A tensor: cells of the table; color and size in the pictures, 0 if it is not drawn."""

    name: str
    color: int
    cells: tuple[str, ...]
    nbytes: int


class Page(Struct, frozen=True):
    """Content of a page.

    Attributes:
        kind: ``inspect`` or ``diff``; selects the color scheme.
        verdict: the result in one sentence, without a full stop.
        next_step: a command or instruction; may be empty.
        columns: titles; those of numbers start with ``>``, of text in one line with ``=``.
        remarks: titles, sentences and moods (``warning``, ``bad`` or ``plain``).
        colors: meaning of each color.
        bars: labels and sizes in bytes.
        row_of: table row of each tensor of the strips; -1 if it has none.
    """

    kind: str
    subject: str
    verdict: str
    mood: str
    facts: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    next_step: str = ""
    sentences: tuple[str, ...] = ()
    remarks: tuple[tuple[str, Sequence[str], str], ...] = ()
    colors: tuple[str, ...] = ()
    bars: tuple[tuple[str, int], ...] = ()
    boxes: tuple[Box, ...] = ()
    strips: Strips | None = None
    row_of: tuple[int, ...] = ()


def check_page_path(path: Path) -> None:
    """Raise unless ``path`` is free or an older page, and jinja2 is installed.

    Raises:
        MissingExtraError: jinja2 is not installed.
        OutputError: the path is another file, or in a checkpoint, whose modification time decides
            which checkpoints the Trainer deletes.
    """
    _load_template()
    with writing(path):
        if exists(path) and not _is_page(path):
            raise OutputError(
                "exists and is not a zexport page", path=path, hint="Choose a free name"
            )
    folder = absolute(path).parent
    is_trainers = is_file(folder / "trainer_state.json") and bool(list_tags(folder))
    if is_tag_dir(folder) or (is_trainers and not list_run_checkpoints(folder)):
        raise OutputError(
            "is inside a checkpoint, which zexport never changes",
            path=path,
            hint="Choose another folder",
        )


def write_page(path: Path, page: Page) -> None:
    """Write the page to ``path`` atomically; see ``check_page_path``."""
    check_page_path(path)
    template, style, script = _load_template()
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    text = _MARK + template.render(
        page=page,
        policy=policy,
        style=style,
        script=script,
        data=_data(page),
        rows=page.rows[:_ROWS_MAX],
    )
    with writing(path):
        write_durably(path, text.encode())


def _is_page(path: Path) -> bool:
    if not is_file(path):
        return False
    with open_input(path) as file:
        return file.read_at(0, len(_MARK)) == _MARK.encode()


@cache
def _load_template() -> tuple[Template, str, str]:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415
    except ImportError as cause:
        raise MissingExtraError("--html needs jinja2", hint=to_install("report")) from cause
    loader = PackageLoader("zexport.report", "html")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size, "shown": shown, "plural": plural}
    environment.globals["styles"] = {">": "number", "=": "whole"}
    style, script = (loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    return environment.get_template("page.html"), style, script


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _pattern(name: str) -> tuple[str, list[str]]:
    text = shown(name)
    return _NUMBERS.sub(_HOLE, text), _NUMBERS.findall(text)


def _data(page: Page) -> str:
    """Return the script's data as JSON without characters that could end an HTML element."""
    names = [_pattern(row.name) for row in page.rows]
    patterns = _indexed([pattern for pattern, _ in names])
    columns = range(len(page.columns))
    data: dict[str, object] = {
        "patterns": patterns["values"],
        "pattern": patterns["index"],
        "numbers": [",".join(numbers) for _, numbers in names],
        "colors": [row.color for row in page.rows],
        "columns": [_indexed([row.cells[number] for row in page.rows]) for number in columns],
        "rowOf": page.row_of,
    }
    if page.strips is not None:
        data["cuts"] = [[*sum(cut.pieces, ())] for cut in page.strips.cuts]
        data["strips"] = [(shown(name), *rest) for name, *rest in page.strips.strips]
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _indexed(cells: Sequence[str]) -> Mapping[str, object]:
    """Return the different values, and the number of the value of each cell."""
    numbers = {cell: number for number, cell in enumerate(dict.fromkeys(cells))}
    return {"values": list(numbers), "index": [numbers[cell] for cell in cells]}


# --- treemap ---


class Rect(Struct, frozen=True):
    """Position in the picture."""

    x: float
    y: float
    width: float
    height: float


class Box(Struct, frozen=True):
    """A module or tensor, and its position."""

    name: str
    tensors: int
    nbytes: int
    color: int
    rect: Rect


_Parts = tuple[str, ...]
_Named = list[tuple[_Parts, Row]]
_ColorOf = Callable[[Sequence[int]], int]
"""Returns a color for several tensors, by their colors."""


def treemap(rows: Sequence[Row], color_of: _ColorOf) -> tuple[Box, ...]:
    """Return boxes of modules, as deep as a picture can show."""
    named = [(tuple(shown(row.name).split(".")), row) for row in rows if row.nbytes]
    depth = 1
    while depth < max((len(parts) for parts, _ in named), default=1):
        if len({parts[: depth + 1] for parts, _ in named}) > _BOXES_MAX:
            break
        depth += 1
    found = _boxes(named, 1, depth, Rect(0, 0, _WIDTH, _HEIGHT), color_of) if named else ()
    return tuple(found)


def _boxes(named: _Named, level: int, depth: int, rect: Rect, color_of: _ColorOf) -> Iterator[Box]:
    groups: dict[_Parts, _Named] = {}
    for parts, row in named:
        groups.setdefault(parts[:level], []).append((parts, row))
    sizes = {module: sum(row.nbytes for _, row in group) for module, group in groups.items()}
    modules = sorted(groups, key=lambda module: -sizes[module])
    places = _split(rect, [sizes[module] for module in modules])
    for module, place in zip(modules, places, strict=True):
        group = groups[module]
        if level < depth and len(group) > 1:
            yield from _boxes(group, level + 1, depth, place, color_of)
        else:
            name = ".".join(group[0][0] if len(group) == 1 else module)
            color = color_of([row.color for _, row in group])
            yield Box(name, len(group), sizes[module], color, place)


def _split(rect: Rect, sizes: Sequence[int]) -> Iterator[Rect]:
    """Yield rectangles in proportion to sizes: halve the list, and the longer side accordingly."""
    if len(sizes) == 1:
        yield rect
        return
    count, first, total = 1, sizes[0], sum(sizes)
    while count < len(sizes) - 1 and first + sizes[count] / 2 < total / 2:
        first += sizes[count]
        count += 1
    right, down = rect.width * first / total, 0.0
    if rect.width < rect.height:
        right, down = 0.0, rect.height * first / total
    yield from _split(Rect(rect.x, rect.y, right or rect.width, down or rect.height), sizes[:count])
    rest = Rect(rect.x + right, rect.y + down, rect.width - right, rect.height - down)
    yield from _split(rest, sizes[count:])


# --- strips ---


class Cut(Struct, frozen=True):
    """Pieces of a strip, or of several equal strips.

    Attributes:
        pieces: color, first tensor, last tensor and bytes of each piece.
        paths: color, and SVG path of all pieces of this color.
    """

    pieces: tuple[tuple[int, int, int, int], ...]
    paths: tuple[tuple[int, str], ...]
    nbytes: int


class Strips(Struct, frozen=True):
    """Strips of rank files, one below the other.

    Attributes:
        cuts: the different strips.
        strips: file, offset, and number of the cut of each strip.
        step: distance between strips.
        are_labelled: whether file names fit.
        hidden: number of strips that are not drawn.
    """

    cuts: tuple[Cut, ...]
    strips: tuple[tuple[str, int | None, int], ...]
    step: int
    are_labelled: bool
    hidden: int


def draw_strips(
    strips: Sequence[Strip], colors: Sequence[int], color_of: Callable[[Piece, Sequence[int]], int]
) -> Strips:
    """Return the strips, all to one scale.

    ``colors`` are those of the checkpoint's tensors; ``color_of`` gets those in a piece.
    """

    def paint(piece: Piece) -> int:
        return color_of(piece, colors[piece.first : piece.last + 1])  # of padding, none

    drawn = strips[:_STRIPS_MAX]
    are_labelled = len(drawn) <= _LABELS_MAX
    step = 14 if are_labelled else 5
    longest = max((strip.nbytes for strip in drawn), default=0)
    numbers: dict[tuple[Piece, ...], int] = {}
    for strip in drawn:
        numbers.setdefault(strip.pieces, len(numbers))
    cuts = tuple(_cut(pieces, paint, longest, step - 1) for pieces in numbers)
    listed = tuple((strip.file, strip.offset, numbers[strip.pieces]) for strip in drawn)
    return Strips(cuts, listed, step, are_labelled, len(strips) - len(drawn))


def _cut(
    pieces: Sequence[Piece], color_of: Callable[[Piece], int], longest: int, height: int
) -> Cut:
    nbytes = sum(piece.nbytes for piece in pieces)
    width = max(_STRIP_WIDTH_MIN, _WIDTH * nbytes / longest) if longest else 0.0
    colored, paths, at = [], dict[int, str](), 0
    for piece in pieces:
        color = color_of(piece)
        colored.append((color, piece.first, piece.last, piece.nbytes))
        left, right = (round(width * edge / nbytes, 1) for edge in (at, at + piece.nbytes))
        gap = 0.2 if right - left > 1 else 0.0  # a line between wide neighbors
        outline = f"M{left:g} 0h{right - left - gap:.4g}v{height}H{left:g}z"
        paths[color] = paths.get(color, "") + outline
        at += piece.nbytes
    return Cut(tuple(colored), tuple(paths.items()), nbytes)
