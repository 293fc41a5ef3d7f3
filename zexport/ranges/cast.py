"""Element casts, equal to torch's bit for bit, and what can be seen of the values as they pass."""

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
"""What NumPy calls the numbers that an element consists of: a complex one is two floats."""

_BLOCK_NUMEL = 32768
"""Elements worked on at a time by the casts that take several passes: they stay in the L2 cache."""

_U32: TypeAlias = "npt.NDArray[np.uint32]"


class Statistics(Struct, frozen=True):
    """What was seen among some floating-point elements.

    ``overflow`` counts those that are finite in the source and infinite after the cast,
    ``underflow`` those that are not zero in the source and zero as float16: no other type lacks
    numbers as small as weights have. ``all_zero`` is true of no elements at all.
    """

    nan: int = 0
    inf: int = 0
    overflow: int = 0
    all_zero: bool = True
    underflow: int = 0

    @property
    def is_remarkable(self) -> bool:
        """Whether there is anything to tell."""
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
"""Nothing to report; one object for nearly all of the tensors of a large model."""


def cast_into(source: memoryview, stored: DType, target: DType, out: memoryview) -> None:
    """Write the elements of ``source`` into ``out`` as ``target``; equal types write nothing.

    Rounds to nearest, ties to even, as torch does on a CPU: what is too large becomes infinite, NaN
    stays NaN, subnormals are kept. A double goes to a 16-bit type by way of float, as in torch
    (torch 2.13, ``c10/util/BFloat16.h`` and ``Half.h`` convert from float alone).
    """
    if stored is target:
        return
    if not (stored.is_floating and target.is_floating):
        raise ValueError(f"no cast from {stored.value} to {target.value}")
    values = np.frombuffer(source, _FLOAT[stored])
    result = np.frombuffer(out, _FLOAT[target])
    with np.errstate(all="ignore"):
        if target is DType.F16:
            _to_half(values, result.view(np.uint16))
        elif stored is DType.F64 and target is DType.BF16:
            for begin in range(0, values.size, _BLOCK_NUMEL):
                block = slice(begin, begin + _BLOCK_NUMEL)
                result[block] = values[block].astype(np.float32)
        else:
            np.copyto(result, values, casting="unsafe")


def _to_half(values: npt.NDArray[np.floating], out: npt.NDArray[np.uint16]) -> None:
    """Float16 bits by integer arithmetic, at the same speed whatever the values.

    NumPy's own cast (2.4) is 25 times slower where many values overflow or underflow.
    """
    for begin in range(0, values.size, _BLOCK_NUMEL):
        block = values[begin : begin + _BLOCK_NUMEL].astype(np.float32)
        bits = block.view(np.uint32)
        out[begin : begin + _BLOCK_NUMEL] = _half_bits(bits)


def _half_bits(bits: _U32) -> _U32:
    """The float16 bits of float32 bits, rounded by one float addition.

    Adding 2**(e + 13) to a value of exponent e leaves 10 bits after the leading one, rounded to
    nearest even by the processor; what the sum exceeds 2**(e + 13) by is the rounded mantissa,
    leading one included. With e held at float16's least exponent (-14), subnormals come out of the
    same sum.
    """
    magnitude = bits & np.uint32(0x7FFFFFFF)
    is_nan = magnitude > np.uint32(0x7F800000)
    # 2**16 is beyond every float16, so that a larger value changes nothing but the room it needs.
    np.minimum(magnitude, np.uint32(0x47800000), out=magnitude)
    exponent = magnitude & np.uint32(0x7F800000)
    np.maximum(exponent, np.uint32(0x38800000), out=exponent)
    exponent += np.uint32(13 << 23)
    as_float = magnitude.view(np.float32)
    as_float += exponent.view(np.float32)
    magnitude -= exponent
    exponent -= np.uint32(0x38800000 + (13 << 23))
    exponent >>= np.uint32(13)
    magnitude += exponent
    magnitude[is_nan] = 0x7E00
    sign = bits >> np.uint32(16)
    sign &= np.uint32(0x8000)
    magnitude |= sign
    return magnitude


def statistics_of(source: memoryview, stored: DType, target: DType, out: memoryview) -> Statistics:
    """What can be seen of the elements; ``out`` holds them cast, or is ``source`` itself.

    Two maxima of the bits (as signed, then as unsigned integers) bound the largest positive and the
    largest negative magnitude. Only where one of them is beyond what ``target`` can hold is
    anything counted. Types that are not floating-point give nothing to report.
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
    underflow = _vanished(source, stored, out) if target is DType.F16 is not stored else 0
    if largest <= _largest_safe(stored, target):
        return Statistics(all_zero=False, underflow=underflow) if underflow else _ORDINARY
    values = np.frombuffer(source, _FLOAT[stored])
    result = np.frombuffer(out, _FLOAT[target])
    with np.errstate(all="ignore"):
        nan, inf = np.count_nonzero(np.isnan(values)), np.count_nonzero(np.isinf(values))
        overflow = np.count_nonzero(np.isinf(result)) - inf
    return Statistics(int(nan), int(inf), int(overflow), all_zero=False, underflow=underflow)


def _vanished(source: memoryview, stored: DType, out: memoryview) -> int:
    """How many elements are zero as float16 and were not; bits added to themselves lose the sign.

    The least of a block is found faster than its zeros are counted, and few blocks have any.
    """
    before = np.frombuffer(source, np.dtype(f"u{stored.itemsize}"))
    now = np.frombuffer(out, np.uint16)
    count = 0
    for begin in range(0, now.size, _BLOCK_NUMEL):
        part, was = (bits[begin : begin + _BLOCK_NUMEL] for bits in (now, before))
        doubled = part + part
        if not doubled.min():
            count += int(np.count_nonzero(was + was)) - int(np.count_nonzero(doubled))
    return count


@cache
def _largest_safe(stored: DType, target: DType) -> int:
    """Bits, in ``stored``, of a magnitude up to which every value is finite in ``target`` too.

    Rounded towards zero, which errs towards counting.
    """
    narrower = min((stored, target), key=lambda dtype: float(ml_dtypes.finfo(_FLOAT[dtype]).max))
    limit = np.asarray(ml_dtypes.finfo(_FLOAT[narrower]).max).astype(np.float64)
    with np.errstate(all="ignore"):
        bits = limit.astype(_FLOAT[stored])
    as_integer = int(bits.view(np.dtype(f"u{stored.itemsize}")))
    return as_integer if float(bits) <= float(limit) else as_integer - 1


_INFINITY = {
    DType.F64: 0x7FF << 52,
    DType.F32: 0xFF << 23,
    DType.BF16: 0xFF << 7,
    DType.F16: 0x1F << 10,
}
_SIGN = {dtype: 1 << (8 * dtype.itemsize - 1) for dtype in _INFINITY}
_Bits: TypeAlias = "npt.NDArray[np.unsignedinteger[Any]]"


def bits_seen_as(elements: bytearray, stored: DType, seen_as: DType) -> _Bits:
    """The bits of the elements after a cast, with one pattern for every NaN.

    A NaN's other bits differ between a cast on a GPU and one on a CPU.
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
    """By how many representable numbers elements lie apart; 0 for equal bits alone."""
    if np.array_equal(one, two):
        return np.zeros(one.size, np.int64)
    apart: npt.NDArray[np.int64] = np.abs(_ordinal(one, dtype) - _ordinal(two, dtype))
    apart[(apart == 0) & (one != two)] = 1  # zeros of both signs
    return apart


def _ordinal(bits: _Bits, dtype: DType) -> npt.NDArray[np.int64]:
    """The number of a value in the order of its type; zeros of both signs have one number."""
    magnitude: npt.NDArray[np.int64] = (bits & (_SIGN[dtype] - 1)).astype(np.int64)
    magnitude[(bits & _SIGN[dtype]) != 0] *= -1
    return magnitude
