"""stdout and stderr of a command: closed and full ones, JSON or text, terminals."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zexport.errors import OutputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from zexport.report.html.page import Page
    from zexport.report.text import Console
    from zexport.storage.json import JsonObject


def prepare_streams() -> None:
    """Open closed standard streams on the null device, and handle failing ones.

    The next file that is opened would get the number of a closed stream, and a message could be
    written into a shard. Streams that the caller replaced stay.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stdout(1, "w", closefd=False), sys.stdout)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.stderr)


def _text(file: FileIO, like: object) -> TextIOWrapper:
    """Return a text stream with the encoding of the one that Python made."""
    made = like if isinstance(like, TextIOWrapper) else None
    return TextIOWrapper(
        BufferedWriter(file),
        encoding=made.encoding if made else "utf-8",
        errors=made.errors if made and made.errors != "strict" else "backslashreplace",
        line_buffering=file.isatty() or isinstance(file, _Stderr),
    )


class _Stdout(FileIO):
    """A result that cannot be written is an error of the command."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)  # Python flushes again when it ends
            os.dup2(null, self.fileno())
            os.close(null)
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(
                f"cannot write the result to stdout: {error.strerror}",
                hint="Redirect it elsewhere; a written folder is complete",
            ) from error


class _Stderr(FileIO):
    """A message that cannot be written does not end the work."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes


def print_result(
    to_json: Callable[[], JsonObject], print_text: Callable[[Console], None], *, as_json: bool
) -> None:
    """Print a result as JSON or as text."""
    if as_json:
        print_json(to_json())
        return
    from zexport.report.text import Console

    is_terminal = sys.stdout.isatty()
    has_color = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if is_terminal else None
    print_text(Console(sys.stdout, width, has_color or "FORCE_COLOR" in os.environ))


def write_html(path: Path, page: Page) -> None:
    from zexport.report.html.page import write_page

    write_page(path, page)
    click.echo(f"Page: {path}", err=True)


def print_json(content: Mapping[str, object]) -> None:
    """Print an object on one line; indented on a terminal."""
    indent = 2 if sys.stdout.isatty() else None
    click.echo(json.dumps(content, indent=indent, allow_nan=False))
