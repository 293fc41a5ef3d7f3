"""How the elements of one side may be those of the other: rounded, and by which way.

Pure arithmetic on bytes.
"""

from __future__ import annotations

from enum import Enum

import ml_dtypes
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zexport.ranges.cast import NUMPY, cast_into
from zexport.ranges.dtypes import DType

Elements = npt.NDArray[np.generic]

_FLOAT8 = frozenset({DType.F8_E4M3, DType.F8_E5M2})
_NARROWER = {
    DType.F64: (DType.F32, DType.BF16, DType.F16),
    DType.F32: (DType.BF16, DType.F16),
    DType.BF16: (DType.F16,),
    DType.F16: (DType.BF16,),
}
"""What values may have been rounded to on their way though they are stored wide again."""
_DETOURS = {DType.BF16: DType.F16, DType.F16: DType.BF16}
"""The 16-bit type that values may have taken before they were rounded to the other one."""
_WIDE = frozenset({DType.F64, DType.F32})


class Side(Enum):
    """One of the two."""

    A = "a"
    B = "b"


class Rounding(Struct, frozen=True):
    """An explanation: the values of one side, rounded once, are those of the other.

    Attributes:
        side: whose values were rounded.
        dtype: to which element type.
        via: the element type that they were rounded to before, if any.
        truncated: whether bits were cut off, where rounding is to the nearest number.
    """

    side: Side
    dtype: DType
    via: DType | None = None
    truncated: bool = False

    def __str__(self) -> str:
        """As in "B is A in bfloat16"."""
        way = f"B is A in {self.dtype.torch_name}"
        if self.side is Side.B:
            way = f"A is B in {self.dtype.torch_name}"
        if self.via is not None:
            return f"{way}, by way of {self.via.torch_name}"
        return f"{way}, cut off instead of rounded" if self.truncated else way


class Run(Struct, frozen=True):
    """Some elements of one side."""

    stored: Elements
    dtype: DType


def possible_roundings(a: DType, b: DType) -> tuple[Rounding, ...]:
    """The explanations to try for two element types, the likeliest first.

    Types that differ: one is the other, rounded to its type (or, of integers, the same numbers).
    The same type twice: one went through a narrower type on its way.
    """
    if a is b:
        ways = [(side, a, to) for to in _NARROWER.get(a, ()) for side in Side]
    else:
        ways = [(Side.A, a, b), (Side.B, b, a)]
        ways.sort(key=lambda way: way[2].itemsize)
    nearest = [Rounding(side, to) for side, _, to in ways]
    wide = [(side, to) for side, stored, to in ways if stored in _WIDE]
    cut = [Rounding(side, to, truncated=True) for side, to in wide if to is DType.BF16]
    twice = [Rounding(side, to, via=_DETOURS[to]) for side, to in wide if to in _DETOURS]
    return (*nearest, *cut, *twice)


def explains(rounding: Rounding, a: Run, b: Run) -> bool:
    """Whether the one side, rounded, is the other to the last bit; NaN is NaN."""
    run, other = (a, b) if rounding.side is Side.A else (b, a)
    if DType.C64 in (run.dtype, other.dtype):
        return False
    if not (_is_real(run.dtype) and _is_real(other.dtype)):
        there, back = _cast(run, other.dtype).stored, _cast(other, run.dtype).stored
        return bool(np.all((there == other.stored) & (back == run.stored)))
    if rounding.via is not None:
        run = _cast(run, rounding.via)
    if rounding.truncated:
        run = _cut(run)
    rounded = _cast(_cast(run, rounding.dtype), other.dtype).stored
    is_alike = bits(rounded) == bits(other.stored)
    return bool(is_alike.all() or (is_alike | (_is_nan(rounded) & _is_nan(other.stored))).all())


def bits(values: Elements) -> Elements:
    """The elements as whole numbers of the same bits."""
    return values.view(np.dtype(f"u{values.itemsize}"))


def _cut(run: Run) -> Run:
    """Floats without the bits that bfloat16 has no room for."""
    kept = _cast(run, DType.F32).stored.view(np.uint32) & np.uint32(0xFFFF0000)
    return Run(kept.view(np.float32), DType.F32)


def _is_real(dtype: DType) -> bool:
    return dtype.is_floating or dtype in _FLOAT8


def _is_nan(values: Elements) -> npt.NDArray[np.bool_]:
    return np.isnan(values.astype(np.float32))


def _cast(run: Run, to: DType) -> Run:
    """The elements as another type, rounded as torch rounds them.

    To and from 8-bit floats it goes by way of float, as in torch (torch 2.13,
    ``c10/util/Float8_e4m3fn.h`` and ``Float8_e5m2.h`` convert from float alone), and what is beyond
    E4M3, which has no infinity, becomes its largest number.
    """
    if run.dtype is to:
        return run
    if run.dtype.is_floating and to.is_floating:
        out = np.empty(run.stored.size * to.itemsize, np.uint8)
        cast_into(run.stored.view(np.uint8).data, run.dtype, to, out.data)
        return Run(out.view(NUMPY[to]), to)
    if _is_real(run.dtype) and _is_real(to) and DType.F32 not in (run.dtype, to):
        return _cast(_cast(run, DType.F32), to)
    if to is DType.F8_E4M3 and run.dtype is DType.F32:
        largest = np.float32(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
        return Run(np.clip(run.stored, -largest, largest).astype(NUMPY[to]), to)
    return Run(run.stored.astype(NUMPY[to]), to)
