"""Element types (their names in torch and in safetensors, their size in bytes), and shapes."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
"""How many elements a tensor has in each dimension."""

_FACTS = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U64": (8, "uint64"),
    "U32": (4, "uint32"),
    "U16": (2, "uint16"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "C64": (8, "complex64"),
}
"""Size and name in torch, by the name in safetensors."""
_FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


class DType(Enum):
    """An element type; the value is its safetensors name.

    Source of the names: safetensors 0.8 (``safetensors/src/tensor.rs``, ``enum Dtype``).

    Attributes:
        itemsize: bytes per element.
        torch_name: the name without its ``torch.`` prefix, as ``config.json`` writes it.
        is_floating: whether a cast between floating-point types may apply to it.
    """

    F64 = "F64"
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    I64 = "I64"
    I32 = "I32"
    I16 = "I16"
    I8 = "I8"
    U64 = "U64"
    U32 = "U32"
    U16 = "U16"
    U8 = "U8"
    BOOL = "BOOL"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    C64 = "C64"

    def __init__(self, _: object) -> None:
        self.itemsize, self.torch_name = _FACTS[self.value]
        self.is_floating = self.value in _FLOATING
