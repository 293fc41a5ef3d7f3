"""An error as facts that a program acts on, beside the sentence for its log."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from zexport.errors import ZexportError
from zexport.storage.json import Natural


class Told(Struct, frozen=True):
    """One error, or one problem among others.

    Attributes:
        code: exit code of the command.
        kind: a stable word for programs; docs/errors.md has all of them.
        path: the file or folder at fault.
        message: the sentence for people: path, what is wrong, what was found and expected, what to
            do.
        hint: what to do; empty where there is nothing to advise.
    """

    code: Natural
    kind: str
    path: Path | None
    message: str
    hint: str

    @classmethod
    def of(cls, error: ZexportError) -> Told:
        """What is told of an error."""
        return cls(error.exit_code, error.kind, error.path, error.sentence(), error.hint)


class Failure(Struct, frozen=True):
    """Why a command failed.

    Attributes:
        error: what is wrong.
    """

    error: Told
