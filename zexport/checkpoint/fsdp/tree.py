"""Nested state dicts, whatever form they were saved in: tensors by the path of keys to each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from zexport.checkpoint.boxes import Piece
from zexport.checkpoint.state import MASTER, Copy, Parameter, Role, Stored
from zexport.checkpoint.zero.ranks import FROM_NODES
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, UnsafeError
from zexport.formats.pickle_values import MAX_SIZE, Global, Opaque
from zexport.formats.pickle_view import PickleView
from zexport.ranges.dtypes import Shape

if TYPE_CHECKING:
    from zexport.ranges.reader import ReadableFile

Keys = tuple[str, ...]
"""Dict keys and list indices from the top of a state dict to a value, as text."""

Joined = tuple[Parameter, Sequence[Copy]]
"""A tensor and its replicas."""

_DEPTH_MAX = 16
_VALUES_MAX = 1 << 21


class Tree(Struct, frozen=True):
    """A state dict joined from all ranks.

    Attributes:
        tensors: every tensor with its replicas, by path.
        others: every other value by path.
        files: the files of the tensors.
        form: the layout in words.
        aliases: path of a tied tensor to the path of the first one.
        is_sharded: whether ranks store parts of tensors, not plain tensors.
        world_size: number of ranks, if the files record it.
        notes: facts for the user.
    """

    tensors: Mapping[Keys, Joined]
    others: Mapping[Keys, object]
    files: tuple[ReadableFile, ...]
    form: str = ""
    aliases: Mapping[Keys, Keys] = {}
    is_sharded: bool = True
    world_size: int | None = None
    notes: tuple[str, ...] = ()


NO_TREE = Tree({}, {}, ())


def leaves(value: PickleView) -> dict[Keys, object]:
    """Return all values in nested dicts and lists by their path.

    What is nested too deep to be a state dict is a leaf (it may contain itself).
    """
    walk = _walk((), value.value)
    found = dict(islice(walk, _VALUES_MAX))
    if next(walk, None) is not None:
        value.fail("has too many values for a state dict", f"more than {_VALUES_MAX:,}")
    return found


def _walk(keys: Keys, one: Any) -> Iterator[tuple[Keys, object]]:
    if isinstance(one, dict | list) and one and len(keys) < _DEPTH_MAX:
        for key, below in one.items() if isinstance(one, dict) else enumerate(one):
            yield from _walk((*keys, str(key)), below)
    else:
        yield keys, one


def fields(value: PickleView, *classes: str) -> PickleView:
    """Return the pickled fields of an object of one of torch's ``classes``.

    A dataclass with slots pickles a pair of states, of which the second has its fields.
    """
    one: Any = value.value
    callee = one.callee if isinstance(one, Opaque) else None
    if not isinstance(callee, Global) or callee.name not in classes:
        value.fail(f"is not a {classes[0]}")
    state = one.state[1] if isinstance(one.state, tuple) and len(one.state) == 2 else one.state
    return PickleView(value.path, f"{value.where}.{callee.name}", {} if state is None else state)


def item(value: PickleView, index: int) -> PickleView:
    """Return one item of a list that must have it."""
    items = value.items()
    return items[index] if index < len(items) else value.fail("is too short", f"{len(items)} items")


def count(value: PickleView) -> int:
    """Return a whole number that torch could have meant as a size, an offset or a rank."""
    number = value.number()
    return number if 0 <= number <= MAX_SIZE else value.fail("is out of range")


def piece(name: str, start: Shape, shape: Shape, stored: Stored) -> Piece:
    """Return a stored tensor as the box of a whole one that begins at index ``start``."""
    part = Parameter(name, shape, Role.TRAINABLE, {MASTER: stored})
    return Piece(part, start, (0,) * len(shape), shape)


def missing(problem: str, path: Path, found: object, expected: object) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        problem, path=path, found=found, expected=expected, hint=FROM_NODES
    )


def damaged(
    problem: str, path: Path, found: object = None, expected: object = None
) -> DamagedCheckpointError:
    """Return the error for files that do not fit together."""
    return DamagedCheckpointError(
        problem,
        path=path,
        found=found,
        expected=expected,
        hint="Copy all files of one checkpoint again",
    )


def unsafe(problem: str, path: Path, found: str) -> UnsafeError:
    """Return the error for a pickle that zexport reads safely, but torch would not."""
    return UnsafeError(
        problem, path=path, found=found, hint="Do not load it with torch; ask who made it"
    )


def refuse_unknown(path: Path, unknown: tuple[Global, ...], known: tuple[str, ...]) -> None:
    """Raise if a pickle names a global that torch does not write into these files."""
    if foreign := [str(one) for one in unknown if not str(one).startswith(known)]:
        raise unsafe(
            "pickle names code that a checkpoint does not need", path, ", ".join(foreign[:4])
        )
