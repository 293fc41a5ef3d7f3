"""The standard streams of a command: there always, refusals understood, results put on them."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING

import click

from zexport.errors import OutputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from zexport.report.text import Console
    from zexport.storage.json import JsonObject

_STANDARD = (0, 1, 2)


def prepare_streams() -> None:
    """Make the standard streams fit for a command that may run for hours.

    A closed one becomes the null device: left closed, its number would be that of the next file
    that is opened, and what is meant for it would be written into a shard. Streams that the caller
    has put there himself stay as they are.
    """
    _fill_closed()
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Results(1, "w", closefd=False), sys.stdout)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Notes(2, "w", closefd=False), sys.stderr)


def put_out(
    form: Callable[[], JsonObject], describe: Callable[[Console], None], *, as_json: bool
) -> None:
    """A result, once as JSON for programs or once as text for people."""
    if as_json:
        put_json(form())
    else:
        describe(_console())


def put_json(told: Mapping[str, object]) -> None:
    """An object on standard output: one line, which is spread over several on a terminal."""
    indent = 2 if sys.stdout.isatty() else None
    click.echo(json.dumps(told, indent=indent, allow_nan=False))


def _console() -> Console:
    """Standard output; ``NO_COLOR`` and ``TERM=dumb`` are honoured, and long lines are not cut."""
    from zexport.report.text import PlainConsole

    if not sys.stdout.isatty() and not {"FORCE_COLOR", "TTY_COMPATIBLE"} & os.environ.keys():
        return PlainConsole(sys.stdout)
    from rich.console import Console as StyledConsole

    return StyledConsole(soft_wrap=True, highlight=False, markup=False)


def _silence(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _fill_closed() -> None:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) in _STANDARD:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _text(file: FileIO, like: object) -> TextIOWrapper:
    """Text for a stream, in the manner of the one that Python made."""
    made = like if isinstance(like, TextIOWrapper) else None
    return TextIOWrapper(
        BufferedWriter(file),
        encoding=made.encoding if made else "utf-8",
        errors=made.errors if made and made.errors != "strict" else "backslashreplace",
        line_buffering=file.isatty() or isinstance(file, _Notes),
    )


class _Results(FileIO):
    """Standard output: a result that cannot be written is an error of the command."""

    def write(self, data: ReadableBuffer, /) -> int:
        """How many bytes were taken.

        One that takes none just now (a pipe whose other end made it so) is waited for. What is
        still to come vanishes after an error, so that Python can end in peace.
        """
        try:
            while True:
                if (taken := super().write(data)) is not None:
                    return taken
                select.select([], [self], [])
        except OSError as cause:
            _silence(self.fileno())
            if isinstance(cause, BrokenPipeError):
                raise
            raise OutputError(
                f"the result cannot be written to standard output: {cause.strerror}",
                hint="Send it elsewhere; a folder that the command made is complete",
            ) from cause


class _Notes(FileIO):
    """Standard error: what cannot be told does not end the work."""

    def write(self, data: ReadableBuffer, /) -> int:
        """The number of bytes; they are lost where the system does not take them at once."""
        with suppress(OSError):
            if (taken := super().write(data)) is not None:
                return taken
        return memoryview(data).nbytes
