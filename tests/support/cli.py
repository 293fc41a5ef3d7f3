"""The command line in this process."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from unittest.mock import patch

import click

from tests.support.published import check_printed
from zexport import ZexportError
from zexport.cli import main as entry

_ROOT = click.Context(entry.cli)
COMMANDS = {name: entry.cli.get_command(_ROOT, name) for name in entry.cli.list_commands(_ROOT)}


@dataclass(frozen=True)
class Result:
    """Exit code, output, and the error that ended the command."""

    exit_code: int
    stdout: str
    stderr: str
    error: ZexportError | None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def or_raise(self) -> Result:
        """Raise the command's error, if there is one."""
        if self.error is not None:
            raise self.error
        return self


def run(*words: object) -> Result:
    """Run ``zexport WORDS`` to its end."""
    out, err, errors = StringIO(), StringIO(), list[ZexportError]()
    show = entry.print_error

    def print_error(error: ZexportError, *, as_json: bool) -> int:
        errors.append(error)
        return show(error, as_json=as_json)

    with (
        patch.object(entry, "print_error", print_error),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = entry.run([*map(str, words)])
    check_printed(words, out.getvalue())
    return Result(code, out.getvalue(), err.getvalue(), errors[0] if errors else None)
