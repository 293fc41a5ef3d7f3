"""The published JSON Schemas, and whether content fits them with no key that they do not name."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
_COMMANDS = {"consolidate", *(path.stem for path in SCHEMAS.glob("*.json"))}


def schema(name: str) -> Any:
    """A schema as it is published."""
    return json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))


def closed(node: Any) -> Any:
    """The same schema without leave to have keys that it does not name.

    Programs must put up with keys of later versions; the tests must not, or a key could come
    without a word about it.
    """
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    inner = {key: closed(value) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and "type" in node:
        inner.setdefault("additionalProperties", False)
    return inner


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(closed(schema(name)))


def check(name: str, content: object) -> Any:
    """The content as a program gets it, once it is known to fit."""
    received = json.loads(json.dumps(content, allow_nan=False))
    _validator(name).validate(received)
    return received


def check_printed(words: Sequence[object], stdout: str | bytes | None) -> None:
    """Validate what a command printed against its schema, if it is JSON."""
    try:
        printed = json.loads(stdout or "")
    except ValueError:
        return
    command = next((word for word in map(str, words) if word in _COMMANDS), "")
    if not command or not isinstance(printed, dict):
        return
    if "error" in printed:
        check("error", printed)
    elif "missing" in printed:
        check("part", printed)
    elif command == "consolidate":
        check("plan" if "--dry-run" in words else "export", printed)
    elif command == "reshard":
        check("reshard_plan" if "--dry-run" in words else "reshard", printed)
    else:
        check(command, printed)


def check_all_printed() -> None:
    """From now on, check what ``zexport`` processes print against its schema."""
    run = subprocess.run

    def run_and_check(words: Any, *rest: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
        done = run(words, *rest, **options)
        if not isinstance(words, str) and "zexport" in words:
            check_printed(words, done.stdout)
        return done

    subprocess.run = run_and_check
