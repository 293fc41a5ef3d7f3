"""The closed lists of globals: those that a checkpoint's pickle may use, and be written with again.

Nothing is looked up, imported or called on behalf of the input: a call of a listed global is
computed by a function of this module, from inert values to an inert value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeAlias, TypeGuard

from zexport.formats.pickle_values import (
    MAX_NDIM,
    ForeignStorage,
    FragmentAddress,
    Global,
    HiddenError,
    Made,
    MalformedError,
    Opaque,
    Ordered,
    Size,
    StorageRef,
    TensorRef,
    as_key,
    is_size,
)
from zexport.ranges.dtypes import DType

Args: TypeAlias = tuple[object, ...]
Call: TypeAlias = Callable[[Args], object | None]


def _is_sizes(value: object, ndim: int | None = None) -> TypeGuard[tuple[int, ...]]:
    if not isinstance(value, tuple) or len(value) > MAX_NDIM:
        return False
    return ndim in (None, len(value)) and all(map(is_size, value))


def storage_of(pid: object) -> StorageRef | ForeignStorage:
    """The storage that a persistent id stands for.

    Source of the form: torch 2.13, ``torch/serialization.py``, ``persistent_id``; the zip container
    leaves the last item out, the older one writes the view of a storage there.
    """
    match pid:
        case ("storage", Global() as kind, str(key), str(device), numel, *view):
            pass
        case _:
            raise MalformedError("a persistent id does not describe a storage")
    if view not in ([], [None]):
        raise MalformedError("a storage is a view of another, as only torch before 0.4 wrote it")
    if is_size(numel) and kind in STORAGES:
        return StorageRef(STORAGES[kind], key, device, numel)
    if is_size(numel) and kind in _FOREIGN_STORAGES:
        return ForeignStorage(_FOREIGN_STORAGES[kind], key, device, numel)
    raise MalformedError("a persistent id does not describe a storage")


@lru_cache(maxsize=1 << 10, typed=True)
def _one(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The same sizes; those of a hundred thousand tensors are few objects."""
    return sizes


def _view(args: Args, dtype: DType | None = None) -> object:
    """The view that the first four arguments of every rebuild function describe."""
    match args:
        case (StorageRef() as storage, offset, shape, stride, *_):
            if is_size(offset) and _is_sizes(shape) and _is_sizes(stride, len(shape)):
                numbers = _one(shape), _one(stride), offset
                return TensorRef(dtype or storage.dtype, *numbers, storage)
        case (ForeignStorage(), _, _, _, *_):
            return Opaque(REBUILD_TENSOR, args)
    parts = [item for part in args[:4] for item in (part if isinstance(part, tuple) else (part,))]
    if any(isinstance(part, Opaque) for part in parts):
        raise HiddenError("a tensor's place or shape hides behind code that would have to run")
    raise MalformedError("a tensor's place or shape is not made of whole numbers")


def _tensor_v2(args: Args) -> object:
    """A view of a typed storage; the seventh argument tells how its elements are meant."""
    return Opaque(REBUILD_TENSOR, args) if _is_turned(args[6:]) else _view(args)


def _is_turned(more: Args) -> bool:
    """Whether a tensor has the conjugate or the negative of what its storage holds.

    So ``torch.save`` writes ``x.conj()``, and ``x.conj().imag``, whose elements are real.
    Source: torch 1.13 to 2.13, ``torch/_utils.py`` (``set_tensor_metadata``).
    """
    said = more[0] if more else None
    if isinstance(said, dict):
        return any(said[key] is not False for key in _TURNS & said.keys())
    return isinstance(said, Opaque)


def _tensor_v3(args: Args) -> object:
    """A view of an untyped storage; the element type is the seventh argument."""
    match args[6:]:
        case (_, *more) if _is_turned(tuple(more)):
            return Opaque(REBUILD_TENSOR, args)
        case (Global() as name, *_) if name in DTYPES:
            dtype = DTYPES[name]
            return _view(args, dtype) if dtype else Opaque(REBUILD_TENSOR, args)
        case (Opaque(), *_):
            raise HiddenError("a tensor's element type hides behind code that would have to run")
        case _:
            raise MalformedError("a tensor names no element type")


def _parameter(args: Args) -> object | None:
    return args[0] if args and isinstance(args[0], TensorRef | Opaque) else None


def _from_type(args: Args) -> object | None:
    """A tensor with Python attributes, less these: (rebuild, type, its arguments, state)."""
    match args:
        case (Global() as rebuild, Global(), tuple() as inner, _) if rebuild in _REBUILD:
            return _REBUILD[rebuild](inner)
        case _:
            return None


def _ordered_dict(args: Args) -> object | None:
    result = Ordered()
    if not args:
        return result
    if len(args) > 1 or not isinstance(args[0], list):
        return None
    for pair in args[0]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return None
        result[as_key(pair[0])] = pair[1]
    return result


def _items(args: Args) -> tuple[object, ...] | None:
    match args:
        case (list() | tuple() as items,):
            return tuple(items)
        case _:
            return None


def _size(args: Args) -> object | None:
    items = _items(args)
    return None if items is None else Size(items)


def _collected(kind: Callable[[Iterator[object]], object]) -> Call:
    """A call that makes a set of its one argument's items."""

    def collect(args: Args) -> object | None:
        items = _items(args)
        return None if items is None else kind(map(as_key, items))

    return collect


def _complex(args: Args) -> object | None:
    match args:
        case (float(real), float(imag)):
            return complex(real, imag)
        case _:
            return None


def _no_bytes(args: Args) -> object | None:
    """Bytes, of which protocol 2 writes none by this call, and others by another."""
    return None if args else b""


def _zero_stage(args: Args) -> object | None:
    match args:
        case (int(stage),) if stage in _ZERO_STAGES.values():
            return int(stage)
        case _:
            return None


def _getattr(args: Args) -> object | None:
    """The stage that Python 3.11.0 to 3.11.3 pickled as an attribute of its enum; nothing else."""
    match args:
        case (Global() as owner, str(name)) if owner == _ZERO_STAGE_ENUM:
            return _ZERO_STAGES.get(name)
        case _:
            return None


def _fragment_address(args: Args) -> object | None:
    return FragmentAddress() if not args else None


def _globals(module: str, *names: str) -> frozenset[Global]:
    return frozenset(Global(module, name) for name in names)


FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
"""DeepSpeed's place of a parameter in a partition: two numbers."""

_LOSS_SCALERS = _globals("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler")
_ZERO_STAGE_ENUM = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_ZERO_STAGES = {
    "disabled": 0,
    "optimizer_states": 1,
    "gradients": 2,
    "weights": 3,
    "max_stage": 3,
}

STORAGES = {
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
} | {Global("torch.storage", "UntypedStorage"): DType.U8}
_FOREIGN_STORAGES = {
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

# None: an element type of torch that ``DType`` does not name; an error only where it is needed.
DTYPES: dict[Global, DType | None] = {
    Global("torch", dtype.torch_name): dtype for dtype in DType
} | dict.fromkeys(
    _globals(
        "torch",
        *("complex32", "complex128"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
    )
)

REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
_TURNS = {"conj", "neg"}
REBUILD_TENSOR_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_REBUILD: dict[Global, Call] = {
    Global("torch._utils", "_rebuild_tensor"): _view,
    REBUILD_TENSOR: _tensor_v2,
    REBUILD_TENSOR_V3: _tensor_v3,
    Global("torch._utils", "_rebuild_parameter"): _parameter,
    Global("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}

# What REDUCE of a listed global gives; None: not a call that it is known for.
CALLS: dict[Global, Call] = _REBUILD | {
    Global("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    Global("torch", "Size"): _size,
    Global("collections", "OrderedDict"): _ordered_dict,
    _ZERO_STAGE_ENUM: _zero_stage,
}
_BUILTINS = ("__builtin__", "builtins")
for _builtins in _BUILTINS:
    CALLS |= {
        Global(_builtins, "getattr"): _getattr,
        Global(_builtins, "set"): _collected(set),
        Global(_builtins, "frozenset"): _collected(frozenset),
        Global(_builtins, "complex"): _complex,
        Global(_builtins, "bytes"): _no_bytes,
    }

# What NEWOBJ of a listed global gives; None as above.
CONSTRUCTORS: dict[Global, Call] = {FRAGMENT: _fragment_address}

HARMLESS = (
    CALLS.keys()
    | CONSTRUCTORS.keys()
    | STORAGES.keys()
    | _FOREIGN_STORAGES.keys()
    | DTYPES.keys()
    | _globals("torch", "Tensor", "device")
    | _globals("torch.nn.parameter", "Parameter")
    | _LOSS_SCALERS
    | {
        Global(module, name)
        for module in _BUILTINS
        for name in ("list", "dict", "tuple", "int", "float", "bool", "bytearray", "slice", "range")
    }
)

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_ENCODE = Global("_codecs", "encode")
_NUMPY_DTYPE = Global("numpy", "dtype")
_NUMBERS = re.compile("[<>|=]?(?:[?bBhHiIlLqQefdgFD]|[biufcSU][0-9]{1,4})")
"""What NumPy calls an element type that holds no objects."""

_CALLED = (
    _globals("collections", "OrderedDict", "defaultdict", "deque", "Counter")
    | _globals("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum")
    | {_ZERO_STAGE_ENUM, _ENCODE, _NUMPY_DTYPE}
    | {Global("torch", "device"), Global("numpy", "ndarray")}
    | {Global(module, name) for module in _NUMPY for name in ("scalar", "_reconstruct")}
    | {Global(module, "bytearray") for module in _BUILTINS}
)
_NEW = _LOSS_SCALERS | {Global("argparse", "Namespace"), FRAGMENT}
_NAMED = (
    DTYPES.keys()
    | {Global("torch", "Size"), Global("numpy", "ndarray")}
    | {
        Global(module, name)
        for module in _BUILTINS
        for name in ("bool", "dict", "float", "int", "list", "set", "str", "tuple")
    }
)


def is_carried(name: Global) -> bool:
    """Whether a global may be written by its name: an element type, or a class of plain values."""
    return name in _NAMED


def is_carried_call(value: Opaque) -> bool:
    """Whether the call that an object stands for may be written again.

    None of these runs what it is given. Whether its arguments and its state may be written is for
    each of them to say.
    """
    if not isinstance(value.callee, Global):
        return False
    if value.made is Made.BY_NEW:
        return value.callee in _NEW and not value.args
    if value.made is not Made.BY_CALL or value.callee not in _CALLED:
        return False
    if value.callee == _NUMPY_DTYPE:
        return _is_of_numbers(value)
    return value.callee != _ENCODE or value.args[1:] in (("latin1",), ("latin-1",))


def _is_of_numbers(dtype: Opaque) -> bool:
    match dtype.args:
        case (str(name), *rest):
            return bool(_NUMBERS.fullmatch(name)) and all(isinstance(one, int) for one in rest)
        case _:
            return False
