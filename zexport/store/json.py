"""JSON: the type of its values, and results as such values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
SCHEMA = 2
"""Number of the forms in which results are printed; it grows when a key changes or goes."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number that is not negative."""

_T = TypeVar("_T")


def as_table(value: object) -> JsonObject:
    """A table of a file that may say anything; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Json]:
    """A list of such a file; an empty one in place of anything else."""
    return value if isinstance(value, list) else []


def several(value: Json) -> list[Json]:
    """The values of what may be one alone, or a list of them."""
    return value if isinstance(value, list) else [value]


def tables_in(value: object) -> list[JsonObject]:
    """The tables of a list."""
    return [one for one in as_list(value) if isinstance(one, dict)]


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


def _made(kind: type[Any], value: object) -> object:
    return kind(value)
