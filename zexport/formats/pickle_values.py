"""Values that the pickle reader returns instead of objects: plain data and descriptions.

No method of these classes runs code from the file. All are cheap to hash, compare and print.
"""

from __future__ import annotations

import math

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, ZexportError
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import ByteSource

MAX_NDIM = 64  # torch's limit
MAX_SIZE = 2**63 - 1  # sizes, strides and offsets are int64 in torch
_KEY_LENGTH_MAX = 16

REDUCE, NEWOBJ, NEWOBJ_EX = b"R", b"\x81", b"\x92"
"""Opcodes that construct an object; the arguments of ``NEWOBJ_EX`` are a tuple and a dict."""


class PickleError(ValueError):
    """A pickle that cannot be read; the reader adds the file and the position."""

    def __init__(self, problem: str, kind: type[ZexportError] = DamagedCheckpointError) -> None:
        super().__init__(problem)
        self.kind = kind


class Global(Struct, frozen=True, order=True):
    """The name of a class or function; never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Ordered(dict[object, object]):
    """A ``collections.OrderedDict``.

    ``attributes`` are those of the instance, such as the ``_metadata`` of a state dict, which
    ``load_state_dict`` uses to convert old formats.
    """

    attributes: object = None


class Size(tuple[object, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


class Opaque(Struct, eq=False):
    """An object that only running code from the file could create; equal only to itself.

    The pickle calls ``callee`` with ``args`` (how: ``opcode``), appends ``items``, sets ``pairs``
    of key and value, and passes ``state`` to ``__setstate__``.
    """

    callee: object
    args: tuple[object, ...]
    state: object = None
    items: list[object] = []
    pairs: list[tuple[object, object]] = []
    opcode: bytes = REDUCE

    def __repr__(self) -> str:
        # Arguments may be nested to any depth, or contain this object.
        return f"Opaque({self.callee if isinstance(self.callee, Global) else '...'})"


class OpaqueKey(Struct, frozen=True, eq=False):
    """A dict key or set item that may be slow to hash; equal only to itself."""

    value: object

    def __repr__(self) -> str:
        return "OpaqueKey(...)"


class StorageRef(Struct, frozen=True, gc=False):
    """``numel`` elements that the file stores under ``key``.

    ``dtype`` is ``None`` for torch dtypes that ``DType`` lacks; their tensors are ``Opaque``.
    """

    dtype: DType | None
    itemsize: int
    key: str
    device: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class TensorRef(Struct, frozen=True, gc=False):
    """A tensor as a view of a storage; ``stride`` and ``offset`` count elements of ``dtype``.

    Numbers are not negative. Whether the view fits in the storage is checked by the file.
    """

    dtype: DType
    shape: Shape
    stride: Shape
    offset: int
    storage: StorageRef

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous copy."""
        return self.numel * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether it is contiguous; dimensions of size 1 may have any stride."""
        dense = 1
        for count, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if count != 1 and step != dense:
                return False
            dense *= count
        return True


class TensorLeaf(Struct, frozen=True):
    """A contiguous tensor to write: ``source`` in ``stored_dtype``, cast to ``dtype``.

    The same object at several places is one tensor, like tied weights; equal objects are
    separate tensors.
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


_HASHED = frozenset({str, int, float, bool, bytes, type(None), Global})


def as_key(value: object) -> object:
    """Return ``value`` if hashing it is cheap and safe, else an ``OpaqueKey``.

    Hashing nested tuples that share their items can take exponential time.
    """
    if type(value) in _HASHED:
        return value
    if isinstance(value, tuple) and len(value) <= _KEY_LENGTH_MAX:
        return value if all(type(one) in _HASHED for one in value) else OpaqueKey(value)
    return OpaqueKey(value)
