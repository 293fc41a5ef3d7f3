"""What the pickle reader returns instead of objects, and the closed list of globals.

Values are plain data and descriptions; no method of their classes runs code from the file. All are
cheap to hash, compare and print. Nothing is imported: a call of a listed global is computed by a
function in this module, from plain data to plain data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeAlias, TypeGuard

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsafeError, ZexportError
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


class Row(Struct, frozen=True, gc=False):
    """A small value in place of an object of which a pickle has many; see ``Rows``."""


_HASHED = frozenset({str, int, float, bool, bytes, type(None), Global})


def as_key(value: object) -> object:
    """Return ``value`` if hashing it is cheap and safe, else an ``OpaqueKey``.

    Hashing nested tuples that share their items can take exponential time.
    """
    if type(value) in _HASHED or isinstance(value, Row):
        return value
    if isinstance(value, tuple) and len(value) <= _KEY_LENGTH_MAX:
        return value if all(type(one) in _HASHED for one in value) else OpaqueKey(value)
    return OpaqueKey(value)


Args: TypeAlias = tuple[object, ...]
Call: TypeAlias = Callable[[Args], object | None]
"""Computes a call; ``None``: torch and DeepSpeed never write these arguments."""


def globals_of(module: str, *names: str) -> frozenset[Global]:
    return frozenset(Global(module, name) for name in names)


def builtins_of(*names: str) -> frozenset[Global]:
    return globals_of("__builtin__", *names) | globals_of("builtins", *names)


UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")
STORAGES: dict[Global, DType] = {
    Global("torch", f"{name}Storage"): dtype
    for name, dtype in {
        "Double": DType.F64,
        "Float": DType.F32,
        "Half": DType.F16,
        "BFloat16": DType.BF16,
        "Long": DType.I64,
        "Int": DType.I32,
        "Short": DType.I16,
        "Char": DType.I8,
        "Byte": DType.U8,
        "Bool": DType.BOOL,
        "ComplexFloat": DType.C64,
        "Untyped": DType.U8,
    }.items()
} | {UNTYPED_STORAGE: DType.U8}
_OTHER_STORAGES = {
    Global("torch", f"{name}Storage"): itemsize
    for name, itemsize in {
        "ComplexDouble": 16,
        "QInt8": 1,
        "QInt32": 4,
        "QUInt8": 1,
        "QUInt4x2": 1,
        "QUInt2x4": 1,
    }.items()
}
"""Itemsizes of storages whose dtype ``DType`` lacks."""

DTYPES: dict[Global, DType | None] = {
    Global("torch", dtype.torch_name): dtype for dtype in DType
} | dict.fromkeys(
    globals_of(
        "torch",
        *("complex32", "complex128"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
    )
)
"""All dtypes of torch; ``None`` for those that ``DType`` lacks."""


def storage_of(pid: object) -> StorageRef:
    """Return the storage that a persistent id describes.

    Source: torch 2.13, ``torch/serialization.py`` (``persistent_id``); legacy files append a view.
    """
    match pid:
        case ("storage", Global() as kind, str(key), str(device), numel, *view) if _is_size(numel):
            if view not in ([], [None]):
                raise PickleError("storage is a view of another, as torch before 0.4 wrote")
            if (dtype := STORAGES.get(kind)) is not None:
                return StorageRef(dtype, dtype.itemsize, key, device, numel)
            if (itemsize := _OTHER_STORAGES.get(kind)) is not None:
                return StorageRef(None, itemsize, key, device, numel)
    raise PickleError("persistent id does not describe a storage")


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_SIZE


def is_sizes(value: object, ndim: int | None = None) -> TypeGuard[Shape]:
    """Whether a value is a tuple of sizes that torch allows."""
    if not isinstance(value, tuple) or len(value) > MAX_NDIM:
        return False
    return ndim in (None, len(value)) and all(map(_is_size, value))


@lru_cache(maxsize=1 << 10, typed=True)
def _one(sizes: Shape) -> Shape:
    """Return one object for equal sizes, of which 100,000 tensors have few."""
    return sizes


def _view(args: Args, dtype: DType | None = None) -> TensorRef | Opaque:
    """Return the tensor that the first arguments of every rebuild function describe."""
    match args:
        case (StorageRef() as storage, offset, shape, stride, *_):
            if storage.dtype is None:
                return Opaque(REBUILD_TENSOR, args)
            if _is_size(offset) and is_sizes(shape) and is_sizes(stride, len(shape)):
                numbers = _one(shape), _one(stride), offset
                return TensorRef(dtype or storage.dtype, *numbers, storage)
    parts = [item for part in args[:4] for item in (part if isinstance(part, tuple) else (part,))]
    if any(isinstance(part, Opaque) for part in parts):
        raise PickleError("shape or place of a tensor requires running code", UnsafeError)
    raise PickleError("shape or place of a tensor is not made of whole numbers")


def _tensor_v2(args: Args) -> object:
    """Return a view of a typed storage.

    torch appends metadata only to conjugate or negative views, whose storage has other values.
    Source: torch 1.13 to 2.13, ``torch/_utils.py`` (``get_tensor_metadata``).
    """
    return Opaque(REBUILD_TENSOR, args) if any(args[6:]) else _view(args)


def _tensor_v3(args: Args) -> object:
    """Return a view of an untyped storage; the dtype is the seventh argument."""
    match args[6:]:
        case (Global() as name, *metadata) if name in DTYPES:
            dtype = DTYPES[name]
            return (
                Opaque(REBUILD_TENSOR, args)
                if dtype is None or any(metadata)
                else _view(args, dtype)
            )
        case (Opaque(), *_):
            raise PickleError("dtype of a tensor requires running code", UnsafeError)
    raise PickleError("a tensor has no dtype")


def _parameter(args: Args) -> object | None:
    return args[0] if args and isinstance(args[0], TensorRef | Opaque) else None


def _from_type(args: Args) -> object | None:
    """Return a tensor without its Python attributes: (rebuild, type, its arguments, state)."""
    match args:
        case (Global() as rebuild, Global(), tuple() as inner, _) if rebuild in _REBUILD:
            return _REBUILD[rebuild](inner)
    return None


def _container(kind: Callable[[Iterator[object]], object]) -> Call:
    """Return a call that makes a set or a torch.Size of its one argument's items."""

    def make(args: Args) -> object | None:
        match args:
            case (list() | tuple() as items,):
                return kind(map(as_key, items))
        return None

    return make


ZERO_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


def _zero_stage(args: Args) -> object | None:
    match args:
        case (int(stage),) if stage in _ZERO_STAGES.values():
            return int(stage)
    return None


def _getattr(args: Args) -> object | None:
    """Return a ZeRO stage, which Python 3.11.0 to 3.11.3 pickles as an attribute of its enum."""
    match args:
        case (Global() as owner, str(name)) if owner == ZERO_STAGE:
            return _ZERO_STAGES.get(name)
    return None


REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_TENSOR_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_REBUILD: dict[Global, Call] = {
    Global("torch._utils", "_rebuild_tensor"): _view,
    REBUILD_TENSOR: _tensor_v2,
    REBUILD_TENSOR_V3: _tensor_v3,
    Global("torch._utils", "_rebuild_parameter"): _parameter,
    Global("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}

CALLS: dict[Global, Call] = _REBUILD | {
    Global("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    Global("torch", "Size"): _container(Size),
    Global("collections", "OrderedDict"): lambda args: None if args else Ordered(),
    ZERO_STAGE: _zero_stage,
    **dict.fromkeys(builtins_of("getattr"), _getattr),
    **dict.fromkeys(builtins_of("set"), _container(set)),
    **dict.fromkeys(builtins_of("frozenset"), _container(frozenset)),
    **dict.fromkeys(builtins_of("bytes"), lambda args: None if args else b""),
}
"""What calls (``REDUCE``) return."""

FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
"""Start and numel of a rank's part of a parameter, as state of an ``Opaque``."""

LOSS_SCALERS = globals_of("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler")
HARMLESS = (
    CALLS.keys()
    | STORAGES.keys()
    | _OTHER_STORAGES.keys()
    | DTYPES.keys()
    | globals_of("torch", "Tensor", "device")
    | globals_of("torch.nn.parameter", "Parameter")
    | LOSS_SCALERS
    | {FRAGMENT}
    | builtins_of("list", "dict", "tuple", "int", "float", "bool")
    | builtins_of("bytearray", "complex", "slice", "range")
)
"""Globals that need no mention: loading them with torch runs nothing of the file's choice."""
