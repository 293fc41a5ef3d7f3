"""Exports through the command line: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zexport
from tests.support.cli import run

EXIT_CODES = {
    **dict.fromkeys(("usage", "memory_limit", "missing_extra"), 2),
    **dict.fromkeys(("incomplete", "not_a_checkpoint", "damaged", "frozen_left_out"), 3),
    **dict.fromkeys(("unsupported", "names_mismatch"), 4),
    "unsafe": 5,
}


def invoke(command: str, *words: object, code: int = 0) -> dict[str, Any]:
    """Return the JSON that a command prints; it must end with ``code``."""
    done = run(command, *words, "--json").or_raise()
    assert done.exit_code == code, done.output
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def export(checkpoint: Path, out: Path, *options: object) -> dict[str, Any]:
    """Export with ``zexport consolidate`` and return its report."""
    return invoke("consolidate", checkpoint, out, *options, "--quiet")


def verify(out: Path, *options: object, code: int = 0) -> dict[str, Any]:
    """Check an export with ``zexport verify`` and return its report."""
    return invoke("verify", out, *options, code=code)


def refused(
    checkpoint: Path,
    out: Path,
    *options: object,
    kind: str,
    word: str = "",
    finding: str | None = None,
) -> zexport.ZexportError:
    """Return the error that ends an export: of this kind, naming ``word``, with nothing left."""
    with pytest.raises(zexport.ZexportError) as caught:
        export(checkpoint, out, *options)
    error = caught.value
    assert (error.kind, error.finding) == (kind, finding), error
    assert error.exit_code == EXIT_CODES[kind]
    message = str(error).replace(str(out.parent), "")
    assert word in message, message
    assert not out.exists()
    return error


def mentions(report: dict[str, Any], *words: str) -> bool:
    """Whether one warning or note contains all these words."""
    messages = (*report["warnings"], *report["notes"])
    return any(all(word in one for word in words) for one in messages)


def warns(report: dict[str, Any], *words: str) -> bool:
    """Whether one warning contains all these words."""
    return any(all(word in one for word in words) for one in report["warnings"])


def manifest_of(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "zexport_manifest.json").read_text())
    return content


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content
