"""The tensors within a tree of inert values, those that are to be written and those of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from math import prod
from typing import TypeVar

from msgspec import Struct

from zexport.formats.inert import Opaque, OpaqueKey, Ordered
from zexport.printable import printable
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import ByteSource

_PATH_LENGTH_MAX = 400
"""Characters of a path beyond which it is not made longer: a value may be nested to any depth."""


class TensorLeaf(Struct, frozen=True):
    """A tensor that is to be written: elements of ``source``, row-major, cast where types differ.

    One object at several places of a tree is one tensor there, as tied weights are; equal ones
    are tensors of their own.

    Attributes:
        shape: its shape.
        dtype: the element type it is written in.
        source: where its elements come from.
        stored_dtype: the element type that ``source`` has them in.
    """

    shape: Shape
    dtype: DType
    source: ByteSource
    stored_dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.numel * self.dtype.itemsize


T = TypeVar("T")


def tensors_in(value: object, kind: type[T]) -> Iterator[tuple[str, T]]:
    """The objects of ``kind`` in a tree, each once, and the path of the first place of each.

    A path is made of keys and indices with ``/`` between them, and is nobody else's. The same tree
    gives the same paths, whether its tensors are to be written or were read.
    """
    seen: set[int] = set()
    names = _Names()
    waiting: list[tuple[str, Iterator[tuple[object, object]]]] = [("", iter([("", value)]))]
    while waiting:
        above, parts = waiting[-1]
        if (part := next(parts, None)) is None:
            waiting.pop()
            continue
        key, one = part
        if id(one) in seen:
            continue
        if isinstance(one, kind):
            seen.add(id(one))
            yield names.free(_joined(above, key) or "tensor"), one
        elif isinstance(one, dict | list | tuple | Opaque):
            seen.add(id(one))
            waiting.append((_joined(above, key), iter(_parts(one))))


def _parts(value: object) -> Iterable[tuple[object, object]]:
    """What a value consists of that may be or hold tensors, by key, index or attribute."""
    if isinstance(value, Ordered) and value.attributes is not None:
        return chain(value.items(), (("attributes", value.attributes),))
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, Opaque):
        names = "args", "items", "pairs", "state"
        return ((name, getattr(value, name)) for name in names)
    return ()


def _joined(path: str, key: object) -> str:
    if len(path) > _PATH_LENGTH_MAX:
        return path
    text = key if isinstance(key, str) else "*" if isinstance(key, OpaqueKey) else str(key)
    return f"{path}/{printable(text[:_PATH_LENGTH_MAX])}".lstrip("/")


class _Names:
    """Names that were given, and how often each was asked for."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._asked: Counter[str] = Counter()

    def free(self, name: str) -> str:
        """The name, numbered where it was given before."""
        free = name
        while free in self._taken:
            self._asked[name] += 1
            free = f"{name} ({self._asked[name] + 1})"
        self._taken.add(free)
        return free
