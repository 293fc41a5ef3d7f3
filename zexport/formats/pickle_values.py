"""The values that reading a pickle gives in place of objects: plain facts, and stand-ins.

None of them runs anything, and none is expensive to hash, compare or print.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeGuard

from msgspec import Struct
from msgspec.structs import force_setattr

from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import ByteSource

MAX_NDIM = 64  # torch's own bound on dimensions
MAX_SIZE = 2**63 - 1  # torch's sizes, strides and offsets are int64
MAX_KEY_LENGTH = 16  # items of a tuple that is hashed each time it serves as a key


class MalformedError(ValueError):
    """The input contradicts the format; the reader adds the file and the position."""


class ExcessError(ValueError):
    """Nothing need be wrong with the input, but there is more of it than is read."""


class HiddenError(ValueError):
    """A value is needed that only running foreign code could make."""


class Global(Struct, frozen=True, order=True):
    """A name that the pickle mentions, as two strings; never resolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Ordered(dict[object, object]):
    """A ``collections.OrderedDict`` of the pickle: a ``dict`` to all but who writes it again.

    ``attributes`` are what it has beside its items, such as the ``_metadata`` of a state dict, by
    which modules tell in which version of theirs it was saved (``load_state_dict``).
    """

    attributes: object = None


class Size(tuple[object, ...]):
    """A ``torch.Size`` of the pickle: a ``tuple`` to all but who writes it again."""

    __slots__ = ()


class Made(Enum):
    """How the object that an ``Opaque`` stands for would have been made of its callee."""

    BY_CALL = "call"
    BY_NEW = "new"
    """By the class's ``__new__`` alone."""
    BY_NEW_WITH_NAMES = "new with names"
    """The same; the arguments are two, a tuple and a dict."""


@dataclass(eq=False, slots=True, repr=False)
class Opaque:
    """Stands for an object that only running foreign code could make; equal to itself alone.

    ``callee`` would have been called with ``args``, ``items`` appended, ``pairs`` of key and value
    set, and ``state`` handed to ``__setstate__``. Harmless where nothing depends on its value.
    """

    callee: object
    args: tuple[object, ...]
    state: object = None
    items: list[object] = field(default_factory=list)
    pairs: list[tuple[object, object]] = field(default_factory=list)
    made: Made = Made.BY_CALL

    def __repr__(self) -> str:
        # Arguments may be nested without end or contain this very object.
        return f"Opaque({self.callee if isinstance(self.callee, Global) else '...'})"


@dataclass(eq=False, slots=True, repr=False)
class OpaqueKey:
    """A dict key or set member of a kind that is not safe to hash, made equal to itself alone."""

    value: object


class StorageRef(Struct, frozen=True, gc=False):
    """A run of ``numel`` elements that the file stores under ``key``."""

    dtype: DType
    key: str
    device: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class ForeignStorage(Struct, frozen=True):
    """A storage of an element type that ``DType`` does not name; its tensors are ``Opaque``."""

    itemsize: int
    key: str
    device: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class TensorRef(Struct, frozen=True, gc=False):
    """A tensor as a view of a storage; ``stride`` and ``offset`` count elements of ``dtype``.

    The numbers are whole and not negative, one stride for each dimension; whether they stay within
    the storage is not known before the file is looked at.
    """

    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: StorageRef

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when laid out densely."""
        return self.numel * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie one after another; dimensions of size 1 may have any stride."""
        dense = 1
        for count, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if count != 1 and step != dense:
                return False
            dense *= count
        return True


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
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class FragmentAddress(Struct, frozen=True):
    """Where one rank's part of a parameter lies in its partition; both count elements.

    Source: DeepSpeed 0.10.3 to 0.19.8, ``deepspeed/utils/tensor_fragment.py``. A pickle makes the
    object first and fills it later, when others may refer to it already: so does the reader, and
    ``numel`` is -1 in between.
    """

    start: int = -1
    numel: int = -1

    def fill(self, state: object) -> None:
        """Take the fields from a pickled ``__dict__``; any other state is a ``MalformedError``."""
        fields = state if isinstance(state, dict) else {}
        start, numel = fields.get("start"), fields.get("numel")
        filled = self.numel >= 0
        if filled or fields.keys() != {"start", "numel"} or not (is_size(start) and is_size(numel)):
            raise MalformedError("a fragment_address does not consist of a start and a numel")
        force_setattr(self, "start", start)
        force_setattr(self, "numel", numel)


_HASHED = frozenset({str, int, float, bool, bytes, complex, type(None), Global})


def as_key(value: object) -> object:
    """``value`` where hashing it is cheap and harmless, else a stand-in equal to itself alone.

    Tuples that share their items through the memo can take exponential time to hash, so only
    short ones whose items are plain are used as they are.
    """
    if type(value) in _HASHED:
        return value
    if (
        isinstance(value, tuple)
        and len(value) <= MAX_KEY_LENGTH
        and _HASHED.issuperset(map(type, value))
    ):
        return value
    return OpaqueKey(value)


def is_size(value: object) -> TypeGuard[int]:
    """Whether torch could have meant it as a size, stride or offset."""
    return type(value) is int and 0 <= value <= MAX_SIZE
