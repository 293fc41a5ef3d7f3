"""An error as JSON: the facts that a program acts on, beside the sentence for its log."""

from __future__ import annotations

from zexport.errors import ZexportError
from zexport.store.json import JsonObject

_SCHEMA = 1


def error_json(error: ZexportError) -> JsonObject:
    """What ``--json`` prints for a failure: ``{"schema", "error": {...}}``."""
    return {"schema": _SCHEMA, "error": problem_json(error)}


def problem_json(error: ZexportError) -> JsonObject:
    """One problem: its exit code, its kind, where it is, what it is, and what to do."""
    return {
        "code": error.exit_code,
        "kind": error.kind,
        "path": None if error.path is None else str(error.path),
        "message": error.sentence(),
        "hint": error.hint,
    }
