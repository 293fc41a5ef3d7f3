"""The published JSON Schemas, and whether content fits them with no key that they do not name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


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


def check(name: str, content: object) -> Any:
    """The content as a program gets it, once it is known to fit."""
    received = json.loads(json.dumps(content, allow_nan=False))
    Draft202012Validator(closed(schema(name))).validate(received)
    return received
