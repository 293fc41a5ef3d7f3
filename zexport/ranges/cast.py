"""Casts between floating-point dtypes, bit-exact with torch, and statistics of the values."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
from msgspec import Struct

from zexport.ranges.dtypes import DType

if TYPE_CHECKING:
    import numpy.typing as npt


_FLOAT = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
}
NUMPY = {
    **_FLOAT,
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U64: np.dtype(np.uint64),
    DType.U32: np.dtype(np.uint32),
    DType.U16: np.dtype(np.uint16),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.uint8),
    DType.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.C64: np.dtype(np.float32),
}
"""NumPy dtypes; a complex element is two floats."""

_BLOCK_NUMEL = 32768
"""Elements cast at a time in several passes, so that they stay in the L2 cache."""


class Statistics(Struct, frozen=True):
    """Counts of unusual values among floating-point elements.

    ``overflow`` counts finite values that become infinite in the cast, ``underflow`` those that
    become zero as float16; other dtypes represent values as small as weights. ``all_zero`` is true
    without elements.
    """

    nan: int = 0
    inf: int = 0
    overflow: int = 0
    all_zero: bool = True
    underflow: int = 0

    @property
    def is_remarkable(self) -> bool:
        return bool(self.nan or self.inf or self.overflow or self.all_zero or self.underflow)

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.nan + other.nan,
            self.inf + other.inf,
            self.overflow + other.overflow,
            self.all_zero and other.all_zero,
            self.underflow + other.underflow,
        )


_ALL_ZERO = Statistics()
_ORDINARY = Statistics(all_zero=False)
"""One object for nearly all tensors of a large model."""


def cast_into(source: memoryview, stored: DType, target: DType, out: memoryview) -> None:
    """Write the elements of ``source`` into ``out`` as ``target``; nothing for equal dtypes.

    Rounds to nearest, ties to even, like torch on a CPU: large values become infinite, NaN and
    subnormals stay. float64 becomes float32 before a 16-bit dtype (torch 2.13,
    ``c10/util/BFloat16.h`` and ``Half.h``).
    """
    if stored is target:
        return
    if not (stored.is_floating and target.is_floating):
        raise ValueError(f"no cast from {stored.value} to {target.value}")
    values = np.frombuffer(source, _FLOAT[stored])
    result = np.frombuffer(out, _FLOAT[target])
    single = np.float32 if target.itemsize < DType.F32.itemsize else result.dtype
    for begin in range(0, values.size, _BLOCK_NUMEL):
        block = slice(begin, begin + _BLOCK_NUMEL)
        with np.errstate(all="ignore"):
            part = values[block].astype(single, copy=False)
            result[block] = part
        if target is DType.F16:
            bits, is_nan = result[block].view(np.uint16), np.isnan(part)
            bits[is_nan] = bits[is_nan] & 0x8000 | 0x7E00  # NumPy keeps other bits of NaN


def statistics_of(source: memoryview, stored: DType, target: DType, out: memoryview) -> Statistics:
    """Return statistics of elements; ``out`` contains them cast, or is ``source``.

    Two maxima of the bits (signed, unsigned) give the largest positive and negative magnitude.
    Values are only counted if one of them exceeds ``target``.
    """
    if not stored.is_floating or not source.nbytes:
        return _ORDINARY if source.nbytes else _ALL_ZERO
    width = stored.itemsize * 8
    signed = np.frombuffer(source, np.dtype(f"i{stored.itemsize}"))
    sign_bit = 1 << (width - 1)
    positive = max(int(signed.max()), 0)
    unsigned = int(signed.view(np.dtype(f"u{stored.itemsize}")).max())
    negative = unsigned - sign_bit if unsigned >= sign_bit else 0
    largest = max(positive, negative)
    if largest == 0:
        return _ALL_ZERO
    underflow = _count_underflow(source, stored, out) if target is DType.F16 is not stored else 0
    if largest <= _largest_safe(stored, target):
        return Statistics(all_zero=False, underflow=underflow) if underflow else _ORDINARY
    values = np.frombuffer(source, _FLOAT[stored])
    result = np.frombuffer(out, _FLOAT[target])
    with np.errstate(all="ignore"):
        nan, inf = np.count_nonzero(np.isnan(values)), np.count_nonzero(np.isinf(values))
        overflow = np.count_nonzero(np.isinf(result)) - inf
    return Statistics(int(nan), int(inf), int(overflow), all_zero=False, underflow=underflow)


def _count_underflow(source: memoryview, stored: DType, out: memoryview) -> int:
    """Return how many elements became zero as float16; doubling the bits drops the sign."""
    before = np.frombuffer(source, np.dtype(f"u{stored.itemsize}"))
    now = np.frombuffer(out, np.uint16)
    return int(np.count_nonzero(before + before)) - int(np.count_nonzero(now + now))


@cache
def _largest_safe(stored: DType, target: DType) -> int:
    """Return the bits, in ``stored``, of the largest magnitude that is finite in both dtypes."""
    limit = min(float(ml_dtypes.finfo(_FLOAT[dtype]).max) for dtype in (stored, target))
    with np.errstate(all="ignore"):
        value = np.asarray(limit).astype(_FLOAT[stored])
    bits = int(value.view(np.dtype(f"u{stored.itemsize}")))
    return bits if float(value) <= limit else bits - 1


_INFINITY = {
    DType.F64: 0x7FF << 52,
    DType.F32: 0xFF << 23,
    DType.BF16: 0xFF << 7,
    DType.F16: 0x1F << 10,
}
_SIGN = {dtype: 1 << (8 * dtype.itemsize - 1) for dtype in _INFINITY}
_Bits: TypeAlias = "npt.NDArray[np.unsignedinteger[Any]]"


def bits_seen_as(elements: bytearray, stored: DType, seen_as: DType) -> _Bits:
    """Return the bits of elements after a cast, equal for every NaN.

    NaN bits differ between casts on a GPU and on a CPU.
    """
    result = elements
    if seen_as is not stored:
        result = bytearray(len(elements) // stored.itemsize * seen_as.itemsize)
        cast_into(memoryview(elements), stored, seen_as, memoryview(result))
    bits = np.frombuffer(result, np.dtype(f"u{seen_as.itemsize}"))
    infinity = _INFINITY[seen_as]
    bits[(bits & (_SIGN[seen_as] - 1)) > infinity] = infinity + 1
    return bits


def distances(one: _Bits, two: _Bits, dtype: DType) -> npt.NDArray[np.int64]:
    """Return by how many representable values elements differ; 0 only for equal bits."""
    if np.array_equal(one, two):
        return np.zeros(one.size, np.int64)
    apart: npt.NDArray[np.int64] = np.abs(_ordinal(one, dtype) - _ordinal(two, dtype))
    apart[(apart == 0) & (one != two)] = 1  # zeros of both signs
    return apart


def _ordinal(bits: _Bits, dtype: DType) -> npt.NDArray[np.int64]:
    """Return the index of each value in its dtype, sorted; 0 for both zeros."""
    magnitude: npt.NDArray[np.int64] = (bits & (_SIGN[dtype] - 1)).astype(np.int64)
    magnitude[(bits & _SIGN[dtype]) != 0] *= -1
    return magnitude
