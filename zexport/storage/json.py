"""JSON values, and results as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, TypeAlias, TypeVar, cast

import msgspec

from zexport.text import brief

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
SCHEMA = 2
"""Version of the printed results; increased when a key changes or is removed."""

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
