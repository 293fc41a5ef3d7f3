"""JSON: the type of its values, and files beside the weights, read within a bound."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec

from zexport.errors import DamagedCheckpointError
from zexport.store.files import read_regular, reading

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
SCHEMA = 1
"""Number of the forms in which results are printed; it grows when a key changes or goes."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number that is not negative."""

_T = TypeVar("_T")

_NBYTES_MAX = 64 << 20
_MEMORY_NBYTES_MAX = 128 << 20
"""What the values of one file may take, as ``_parsed`` estimates it; an index of 100,000
weights takes a third. Sixty million bytes of empty lists would take more than a gigabyte."""

_REPEATED_NBYTES_MAX = 1 << 20
"""What people write or mend by hand is shorter."""

_MEND = "Mend or remove the file"

_DICT_NBYTES, _LIST_NBYTES, _ITEM_NBYTES = 240, 96, 180  # CPython 3.11 to 3.14, upwards
_CHARACTER_NBYTES = 4  # in a text with a character beyond the 65,536 first ones


def values_of(value: object) -> JsonObject:
    """A result in JSON: fields by name, enums by value, paths as text; tables and sets sorted."""
    return cast("JsonObject", json.loads(json.dumps(plain_of(value))))


def plain_of(value: object) -> object:
    """The same as what ``json.dumps`` takes: with tuples where there are lists."""
    return msgspec.to_builtins(value, enc_hook=str, order="deterministic")


def form_of(*results: object) -> JsonObject:
    """What a command prints of results: the form's number, and their fields beside each other.

    Of a key that several have, the first one's value counts.
    """
    form: JsonObject = {"schema": SCHEMA}
    for result in results:
        values = dict(result) if isinstance(result, Mapping) else values_of(result)
        form |= {key: value for key, value in values.items() if key not in form}
    return form


def decoded(text: str, kind: type[_T]) -> _T:
    """The value of a type whose JSON ``form_of`` and ``values_of`` give."""
    return msgspec.convert(json.loads(text), kind, dec_hook=_made)


def read_json_object(path: Path) -> JsonObject:
    """The JSON object in a file."""
    value = _read(path, "object")
    if not isinstance(value, dict):
        raise _is_not(path, "object", f"a {type(value).__name__}")
    return value


def read_json_list(path: Path) -> list[Json]:
    """The JSON list in a file."""
    value = _read(path, "list")
    if not isinstance(value, list):
        raise _is_not(path, "list", f"a {type(value).__name__}")
    return value


def repeated_keys(path: Path) -> dict[str, list[Json]]:
    """Keys that a JSON object has twice, at any depth, with all values; readers keep the last."""
    repeated: dict[str, list[Json]] = {}

    def note(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        values: dict[str, list[Json]] = {}
        for key, value in pairs:
            values.setdefault(key, []).append(value)
        repeated.update((key, told) for key, told in values.items() if len(told) > 1)
        return dict(pairs)

    with suppress(OSError, ValueError, RecursionError):
        json.loads(read_regular(path, _REPEATED_NBYTES_MAX) or b"{}", object_pairs_hook=note)
    return repeated


def _read(path: Path, kind: str) -> Json:
    with reading(path, DamagedCheckpointError, _MEND):
        content = read_regular(path, _NBYTES_MAX)
    try:
        value = None if content is None else _parsed(content)
    except (ValueError, RecursionError) as error:
        raise _is_not(path, kind, error) from error
    return cast("Json", value)


def _parsed(content: bytes) -> object:
    """The value, whose memory is estimated first, by what separates and opens values."""
    nbytes = len(content) * (1 if content.isascii() else _CHARACTER_NBYTES)
    nbytes += content.count(b"{") * _DICT_NBYTES + content.count(b"[") * _LIST_NBYTES
    nbytes += content.count(b",") * _ITEM_NBYTES
    if nbytes > _MEMORY_NBYTES_MAX:
        raise ValueError(f"its values may take {nbytes >> 20} MiB of memory")
    return json.loads(content)


def _made(kind: type[Any], value: object) -> object:
    return kind(value)


def _is_not(path: Path, kind: str, found: object) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"is not a JSON {kind}", path=path, found=found, hint=_MEND)
