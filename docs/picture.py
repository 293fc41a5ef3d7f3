"""The README's picture: two commands on a fixture, and what they print, drawn by rich.

What is printed is that of a real run, but for two things that no two machines share: the folder
stands under ``/data``, and the line with the time is left out.
"""

from __future__ import annotations

import html
import io
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

import zexport
from zexport.inspect.inspect import inspect_checkpoint
from zexport.report.export import print_export
from zexport.report.inspect import print_inspection

PICTURE = Path(__file__).parent / "picture.svg"
_FIXTURE = Path(__file__).parents[1] / "fixtures" / "z3_w2_bf16" / "ckpt"
_COLUMNS = 92
_BF16 = zexport.ExportOptions(dtype=zexport.ExportDType.BF16)


def picture() -> str:
    """The picture, as SVG."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    for line in _lines():
        console.print(Text.from_ansi(line), soft_wrap=True)
    return console.export_svg(title="zexport", theme=MONOKAI, unique_id="zexport")


def words(svg: str) -> list[str]:
    """The lines of a picture as they are read: another version of rich may draw them otherwise."""
    drawn = re.findall(r'<text [^>]*y="([\d.]+)"[^>]*>(.*?)</text>', svg)
    lines: dict[str, str] = {}
    for height, text in drawn:
        lines[height] = lines.get(height, "") + html.unescape(text).replace("\xa0", " ")
    return [line.rstrip() for line in lines.values()]


def _lines() -> Iterator[str]:
    """What a terminal shows, with its colours."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copytree(_FIXTURE, "run")
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, soft_wrap=True, highlight=False)
        console.print("$ zexport inspect run", style="bold cyan")
        print_inspection(console, inspect_checkpoint("run"))
        console.print("\n$ zexport consolidate run model --dtype bf16", style="bold cyan")
        print_export(console, zexport.consolidate("run", "model", _BF16))
        shown = screen.getvalue().replace(str(Path(folder).resolve()), "/data")
    yield from (line for line in shown.splitlines() if not line.startswith("  Time "))
