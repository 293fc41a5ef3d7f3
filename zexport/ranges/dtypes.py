"""Element types (their names in torch and in safetensors, their size in bytes), and shapes."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
"""How many elements a tensor has in each dimension."""


class DType(Enum):
    """An element type; the value is its safetensors name.

    Source of the names: safetensors 0.8 (``safetensors/src/tensor.rs``, ``enum Dtype``).
    """

    F64 = "F64"
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    I64 = "I64"
    I32 = "I32"
    I16 = "I16"
    I8 = "I8"
    U8 = "U8"
    BOOL = "BOOL"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    C64 = "C64"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """Whether a cast between floating-point types may apply to it."""
        return self in _FLOATING

    @property
    def torch_name(self) -> str:
        """The name without its ``torch.`` prefix, as ``config.json`` writes it."""
        return _TORCH_NAME[self]


_TORCH_NAME = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.U8: "uint8",
    DType.BOOL: "bool",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E5M2: "float8_e5m2",
    DType.C64: "complex64",
}
_ITEMSIZE = {
    DType.F64: 8,
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.I64: 8,
    DType.I32: 4,
    DType.I16: 2,
    DType.I8: 1,
    DType.U8: 1,
    DType.BOOL: 1,
    DType.F8_E4M3: 1,
    DType.F8_E5M2: 1,
    DType.C64: 8,
}
_FLOATING = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
