"""JSON files beside the weights, read within a bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from zexport.errors import DamagedCheckpointError
from zexport.jsontypes import Json, JsonObject
from zexport.regular_files import read_regular

_NBYTES_MAX = 64 << 20


def read_json_object(path: Path) -> JsonObject:
    """The JSON object in a file.

    Raises:
        DamagedCheckpointError: it is too large, not JSON, or no object.
    """
    value = _read(path, "object")
    if not isinstance(value, dict):
        raise _is_not(path, "object", f"a {type(value).__name__}")
    return value


def read_json_list(path: Path) -> list[Json]:
    """The JSON list in a file.

    Raises:
        DamagedCheckpointError: it is too large, not JSON, or no list.
    """
    value = _read(path, "list")
    if not isinstance(value, list):
        raise _is_not(path, "list", f"a {type(value).__name__}")
    return value


def _read(path: Path, kind: str) -> Json:
    try:
        content = read_regular(path, _NBYTES_MAX)
        value = None if content is None else json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise _is_not(path, kind, error) from error
    return cast("Json", value)


def _is_not(path: Path, kind: str, found: object) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"is not a JSON {kind}", path=path, found=found, hint="Mend or remove the file"
    )
