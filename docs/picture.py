"""The picture of the README: two commands and their output on a terminal, drawn by rich."""

from __future__ import annotations

import html
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parent / "picture.svg"
_ROOT = Path(__file__).parents[1]
_COMMANDS = ("zexport inspect run", "zexport consolidate run model --dtype bf16")
_COLUMNS = 92


def picture() -> str:
    """Return the SVG. The line with the elapsed time is left out, and the folder is ``/data``."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_ROOT / "fixtures" / "z3_w2_bf16" / "ckpt", Path(folder) / "run")
        for command in _COMMANDS:
            console.print(f"$ {command}", style="bold cyan", highlight=False)
            output = _terminal_output(command, folder).replace(str(Path(folder).resolve()), "/data")
            lines = [line for line in output.splitlines() if not line.startswith("  Time ")]
            console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
            console.print()
    return console.export_svg(title="zexport", theme=MONOKAI, unique_id="zexport")


def _terminal_output(command: str, folder: str) -> str:
    """Return what a command prints on stdout if that is a terminal."""
    ours, theirs = pty.openpty()
    environment = {"PYTHONPATH": str(_ROOT), "TERM": "xterm-256color", "COLUMNS": str(_COLUMNS)}
    unwanted = ("NO_COLOR", "FORCE_COLOR", "COLORTERM")
    inherited = {key: value for key, value in os.environ.items() if key not in unwanted}
    with subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        cwd=folder,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(theirs)
        chunks = []
        while chunk := _read(ours):
            chunks.append(chunk)
        _, errors = process.communicate()
    os.close(ours)
    if process.returncode:
        sys.exit(f"{command}: {errors.decode()}")
    return b"".join(chunks).decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux: the other end is closed
        return b""


def words(svg: str) -> list[str]:
    """Return the lines of text in a picture: another rich version may draw them differently."""
    lines: dict[str, str] = {}
    for height, text in re.findall(r'<text [^>]*y="([\d.]+)"[^>]*>(.*?)</text>', svg):
        lines[height] = lines.get(height, "") + html.unescape(text).replace("\xa0", " ")
    return [line.rstrip() for line in lines.values()]
