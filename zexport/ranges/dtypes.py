"""Dtypes (names in torch and safetensors, size) and shapes."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]

_FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


class DType(Enum):
    """A dtype; the value is its safetensors name.

    Source: safetensors 0.8, ``safetensors/src/tensor.rs`` (``enum Dtype``).

    Attributes:
        itemsize: bytes per element.
        torch_name: its name in torch, without ``torch.``.
        is_floating: it can be cast to other floating-point dtypes.
    """

    F64 = "F64", 8, "float64"
    F32 = "F32", 4, "float32"
    F16 = "F16", 2, "float16"
    BF16 = "BF16", 2, "bfloat16"
    I64 = "I64", 8, "int64"
    I32 = "I32", 4, "int32"
    I16 = "I16", 2, "int16"
    I8 = "I8", 1, "int8"
    U64 = "U64", 8, "uint64"
    U32 = "U32", 4, "uint32"
    U16 = "U16", 2, "uint16"
    U8 = "U8", 1, "uint8"
    BOOL = "BOOL", 1, "bool"
    F8_E4M3 = "F8_E4M3", 1, "float8_e4m3fn"
    F8_E5M2 = "F8_E5M2", 1, "float8_e5m2"
    C64 = "C64", 8, "complex64"

    itemsize: int
    torch_name: str
    is_floating: bool

    def __new__(cls, value: str, itemsize: int = 0, torch_name: str = "") -> DType:
        one = object.__new__(cls)
        one._value_ = value
        one.itemsize, one.torch_name, one.is_floating = itemsize, torch_name, value in _FLOATING
        return one
