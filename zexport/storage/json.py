"""JSON: objects in files, read within a memory bound, and results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar, cast

import msgspec

from zexport.errors import DamagedCheckpointError
from zexport.storage.files import read_regular
from zexport.storage.os_errors import reading
from zexport.text import brief

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
JsonTable: TypeAlias = Mapping[str, Json]
SCHEMA = 2
"""Version of the printed results; increased when a key changes or is removed."""

_NBYTES_MAX = 64 << 20
_MEMORY_NBYTES_MAX = 128 << 20
"""Limit of ``_parse``'s estimate. An index of 100,000 weights takes a third; 60 MB of empty lists
would take more than a gigabyte."""

_REPAIR = "Repair or remove the file"

_DICT_NBYTES, _LIST_NBYTES, _ITEM_NBYTES = 240, 96, 180  # CPython 3.11 to 3.14, upwards
_CHARACTER_NBYTES = 4  # of a text with a character beyond U+FFFF

Natural = Annotated[int, msgspec.Meta(ge=0)]
_T = TypeVar("_T")


class JsonReport:
    """A record that prints briefly and converts to JSON."""

    __slots__ = ()
    __repr__ = brief

    def to_json(self) -> JsonObject:
        """Return the report as JSON values, with a ``schema`` number."""
        return form_of(self)


def as_table(value: object) -> JsonObject:
    """Return a JSON object; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def several(value: Json) -> list[Json]:
    """Return a list as it is, any other value as a list of one."""
    return value if isinstance(value, list) else [value]


def as_list(value: object) -> list[Json]:
    """Return a JSON list; an empty one for any other value."""
    return value if isinstance(value, list) else []


def tables_in(value: object) -> list[JsonObject]:
    """Return the objects in a list; none for any other value."""
    return [one for one in as_list(value) if isinstance(one, dict)]


def values_of(value: object) -> JsonObject:
    """Return a result as JSON: structs as objects, enums as values, paths as text, keys sorted."""
    return cast("JsonObject", json.loads(json.dumps(plain_of(value))))


def plain_of(value: object) -> object:
    """Return the same with tuples instead of lists, for ``json.dumps``."""
    return msgspec.to_builtins(value, enc_hook=str, order="deterministic")


def form_of(*results: object) -> JsonObject:
    """Return the printed form of results: all fields; of equal keys, the first counts."""
    form: JsonObject = {"schema": SCHEMA}
    for result in results:
        values = dict(result) if isinstance(result, Mapping) else values_of(result)
        form |= {key: value for key, value in values.items() if key not in form}
    return form


def decoded(text: str, kind: type[_T]) -> _T:
    """Return the value whose JSON ``form_of`` or ``values_of`` returned."""
    return msgspec.convert(json.loads(text), kind, dec_hook=lambda cls, value: cls(value))


def read_json_object(path: Path) -> JsonObject:
    """Return the JSON object in a file."""
    with reading(path, DamagedCheckpointError, _REPAIR):
        content = read_regular(path, _NBYTES_MAX)
    try:
        value = None if content is None else _parse(content)
    except (ValueError, RecursionError) as error:
        raise _not_an_object(path, error) from error
    if not isinstance(value, dict):
        raise _not_an_object(path, f"a {type(value).__name__}")
    return value


def _parse(content: bytes) -> object:
    """Return the value; estimate its memory first, by its brackets and commas."""
    nbytes = len(content) * (1 if content.isascii() else _CHARACTER_NBYTES)
    nbytes += content.count(b"{") * _DICT_NBYTES + content.count(b"[") * _LIST_NBYTES
    nbytes += content.count(b",") * _ITEM_NBYTES
    if nbytes > _MEMORY_NBYTES_MAX:
        raise ValueError(f"its values may take {nbytes >> 20} MiB of memory")
    return json.loads(content)


def _not_an_object(path: Path, found: object) -> DamagedCheckpointError:
    return DamagedCheckpointError("is not a JSON object", path=path, found=found, hint=_REPAIR)
