"""The closed list of globals that may be written again, and the calls that may."""

from __future__ import annotations

import re

from zexport.formats.inert import Global, Made, Opaque
from zexport.formats.known_globals import DTYPES

FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
"""DeepSpeed's place of a parameter in a partition: two numbers."""

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_BUILTINS = ("__builtin__", "builtins")
_ENCODE = Global("_codecs", "encode")
_NUMPY_DTYPE = Global("numpy", "dtype")
_NUMBERS = re.compile("[<>|=]?(?:[?bBhHiIlLqQefdgFD]|[biufcSU][0-9]{1,4})")
"""What NumPy calls an element type that holds no objects."""

_CALLED = frozenset(
    {
        Global("torch", "device"),
        Global("collections", "OrderedDict"),
        Global("collections", "defaultdict"),
        Global("collections", "deque"),
        Global("collections", "Counter"),
        Global("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        Global("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum"),
        Global("numpy", "ndarray"),
        _ENCODE,
        _NUMPY_DTYPE,
    }
    | {Global(module, name) for module in _NUMPY for name in ("scalar", "_reconstruct")}
    | {Global(module, "bytearray") for module in _BUILTINS}
)
_NEW = frozenset(
    {
        Global("argparse", "Namespace"),
        Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        FRAGMENT,
    }
)
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
