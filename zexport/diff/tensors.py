"""Compare pairs of tensors as they are read: equal, equal after rounding, or changed by how much.

Memory does not grow with the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from threading import local
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zexport.checkpoint.state import StoredTensor, source_of
from zexport.export.plan import SourceFile
from zexport.export.report import Meter, Progress
from zexport.ranges.ahead import announced, in_order
from zexport.ranges.cast import NUMPY, cast_into
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.reader import SourceReader
from zexport.ranges.source import ByteSource
from zexport.storage.json import Natural
from zexport.text import brief

_PIECE_NUMEL = 1 << 22
"""Elements of one task: one large tensor keeps every thread busy."""
_CHUNK_NUMEL = 1 << 17
"""Elements that a thread reads at a time."""
_BLOCK_NUMEL = 1 << 13
"""Elements compared at a time: their doubles fit the cache, and glibc reuses buffers below 128 KiB
(``M_MMAP_THRESHOLD``)."""
_ITEMSIZE_MAX = 8
_TASKS_AHEAD = 4

_FLOAT8 = frozenset({DType.F8_E4M3, DType.F8_E5M2})
_NARROWER = {DType.F64: (DType.F32, DType.BF16, DType.F16), DType.F32: (DType.BF16, DType.F16)}
"""Dtypes that values may have been rounded to before they were stored wide again."""

Array = npt.NDArray[np.generic]


class Outcome(StrEnum):
    """Result for one tensor."""

    EQUAL = "equal"
    """Same shape, dtype and bytes."""
    CAST_EQUAL = "cast_equal"
    """Equal after rounding one side to a dtype."""
    DIFFERENT = "different"
    """Values changed."""
    SHAPE = "shape"
    """Shapes differ; common rows are compared."""
    ONLY_IN_A = "only_in_a"
    ONLY_IN_B = "only_in_b"


class Rounding(Struct, frozen=True):
    """Rounding one side gives the other side.

    Attributes:
        side: the side to round.
        dtype: the dtype to round to.
    """

    side: Literal["a", "b"]
    dtype: DType


class PairValues(Struct, frozen=True):
    """Comparison of the values of two tensors; a complex element counts as two.

    Differences and norms include only pairs of finite numbers; they are ``None`` if there are no
    such pairs or a float64 overflows.

    Attributes:
        unequal: number of pairs that differ, in bits or, if the dtypes differ, in value.
        max_abs: largest absolute difference.
        norm: norm of A.
        relative_norm: norm of the difference divided by the norm of A.
        worst_at: index of the largest difference; ``None`` if there is no difference.
        a_nan: number of NaN in A.
        b_nan: number of NaN in B.
        nan_in_one: number of pairs with NaN on one side only.
        inf_in_one: number of pairs without NaN in which an infinity differs from the other side.
        a_is_zero: whether A is all zero.
        b_is_zero: whether B is all zero.
    """

    unequal: Natural
    max_abs: float | None
    norm: float | None
    relative_norm: float | None
    worst_at: tuple[Natural, ...] | None
    a_nan: Natural
    b_nan: Natural
    nan_in_one: Natural
    inf_in_one: Natural
    a_is_zero: bool
    b_is_zero: bool


class TensorDiff(Struct, frozen=True):
    """Comparison of one tensor.

    Attributes:
        outcome: the result.
        a_name: name in A; ``None`` if missing. Names differ if the sides store different names of
            tied weights.
        b_name: name in B.
        a_dtype: dtype in A, as safetensors writes it.
        b_dtype: dtype in B.
        a_shape: shape in A.
        b_shape: shape in B.
        rounding: the rounding that makes a cast-equal tensor equal.
        values: comparison of the values; ``None`` if they were not compared.
    """

    outcome: Outcome
    a_name: str | None = None
    b_name: str | None = None
    a_dtype: DType | None = None
    b_dtype: DType | None = None
    a_shape: tuple[Natural, ...] | None = None
    b_shape: tuple[Natural, ...] | None = None
    rounding: Rounding | None = None
    values: PairValues | None = None

    __repr__ = brief

    @property
    def name(self) -> str:
        """Name in A, or in B if A does not have it."""
        return self.a_name or self.b_name or ""

    @property
    def shape(self) -> Shape:
        """Shape in A, or in B if A does not have it."""
        return (self.b_shape if self.a_shape is None else self.a_shape) or ()


class Pair(Struct, frozen=True):
    """A tensor of A and its counterpart in B."""

    a: StoredTensor
    b: StoredTensor

    @property
    def dtypes(self) -> tuple[DType, DType]:
        """Dtypes of the numbers; a complex element is two float32."""
        a, b = (DType.F32 if side.dtype is DType.C64 else side.dtype for side in (self.a, self.b))
        return a, b

    @property
    def numel(self) -> int:
        """How many numbers can be compared: all, or those of the common rows."""
        a, b = self.a, self.b
        if (a.dtype is DType.C64) is not (b.dtype is DType.C64):
            return 0
        are_rows = a.shape and b.shape and a.shape[1:] == b.shape[1:]
        numel = min(a.numel, b.numel) if a.shape == b.shape or are_rows else 0
        return 2 * numel if a.dtype is DType.C64 else numel

    @property
    def nbytes(self) -> int:
        return self.numel * sum(dtype.itemsize for dtype in self.dtypes)

    @property
    def roundings(self) -> list[Rounding]:
        """Roundings that may make both sides equal, narrow dtypes first."""
        a, b = self.dtypes
        if a is b:
            narrower = _NARROWER.get(a, ())
            return [found for to in narrower for found in (Rounding("a", to), Rounding("b", to))]
        return sorted((Rounding("a", b), Rounding("b", a)), key=lambda one: one.dtype.itemsize)


def compare_tensors(
    pairs: Sequence[Pair],
    files: Iterable[SourceFile],
    *,
    jobs: int,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[list[TensorDiff], int]:
    """Return the comparison of every pair, and the number of bytes read."""
    meter = Meter(progress, to_verify=sum(pair.nbytes for pair in pairs))
    sums = [_Sums(roundings=frozenset(pair.roundings)) for pair in pairs]
    pieces = (
        _Piece(pair, number, start, min(start + _PIECE_NUMEL, pair.numel))
        for number, pair in enumerate(pairs)
        for start in range(0, pair.numel, _PIECE_NUMEL)
    )
    workers, buffers = ThreadPoolExecutor(jobs), _Buffers()
    with SourceReader(files) as reader:

        def compare(piece: _Piece) -> _Sums:
            return _compare_piece(piece, reader, buffers)

        ahead = announced(pieces, lambda one: one.nbytes, lambda one: one.windows(), reader.expect)
        try:
            for piece, part in in_order(workers, compare, ahead, ahead=jobs * _TASKS_AHEAD):
                sums[piece.number] += part
                meter.verified(piece.nbytes)
        finally:
            workers.shutdown(cancel_futures=True)
        reader.finish()
        found = [_tensor_diff(pair, one) for pair, one in zip(pairs, sums, strict=True)]
        return found, reader.nbytes_read


def _tensor_diff(pair: Pair, sums: _Sums) -> TensorDiff:
    a, b = pair.a, pair.b
    is_compared = bool(pair.numel) or (a.shape == b.shape and not a.numel)
    rounding = None
    if a.shape != b.shape:
        outcome = Outcome.SHAPE
    elif is_compared and a.dtype is b.dtype and not sums.unequal:
        outcome = Outcome.EQUAL
    else:
        # Overflow to infinity and underflow of a whole tensor to zero lose it: that is a change.
        is_kept = not sums.nan_in_one + sums.inf_in_one and sums.a_is_zero is sums.b_is_zero
        if is_compared and is_kept:
            rounding = next((one for one in pair.roundings if one in sums.roundings), None)
        outcome = Outcome.DIFFERENT if rounding is None else Outcome.CAST_EQUAL
    values = _pair_values(pair, sums) if is_compared else None
    return TensorDiff(outcome, a.name, b.name, a.dtype, b.dtype, a.shape, b.shape, rounding, values)


def _pair_values(pair: Pair, sums: _Sums) -> PairValues:
    norm, difference = math.sqrt(sums.a_squares), math.sqrt(sums.difference_squares)
    relative = difference / norm if norm else math.inf if difference else 0.0
    worst_at = None
    if sums.worst is not None:
        element = sums.worst // (2 if pair.a.dtype is DType.C64 else 1)
        worst_at = tuple(map(int, np.unravel_index(element, pair.a.shape)))
    return PairValues(
        unequal=sums.unequal,
        max_abs=_finite(sums.max_abs) if sums.finite else None,
        norm=_finite(norm) if sums.finite else None,
        relative_norm=_finite(relative),
        worst_at=worst_at,
        a_nan=sums.a_nan,
        b_nan=sums.b_nan,
        nan_in_one=sums.nan_in_one,
        inf_in_one=sums.inf_in_one,
        a_is_zero=bool(pair.numel) and sums.a_is_zero,
        b_is_zero=bool(pair.numel) and sums.b_is_zero,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- reading ---


class _Piece(Struct, frozen=True):
    """Elements ``start`` to ``stop`` of pair ``number``."""

    pair: Pair
    number: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * sum(dtype.itemsize for dtype in self.pair.dtypes)

    def windows(self) -> Iterator[tuple[ByteSource, int, int]]:
        for side, dtype in zip((self.pair.a, self.pair.b), self.pair.dtypes, strict=True):
            yield source_of(side), self.start * dtype.itemsize, self.stop * dtype.itemsize


class _Buffers(local):
    """Buffers for one chunk of each side, per thread."""

    def __init__(self) -> None:
        self.sides = [memoryview(bytearray(_CHUNK_NUMEL * _ITEMSIZE_MAX)) for _ in "ab"]


def _compare_piece(piece: _Piece, reader: SourceReader, buffers: _Buffers) -> _Sums:
    a_dtype, b_dtype = piece.pair.dtypes
    sums = _Sums(roundings=frozenset(piece.pair.roundings))
    for start in range(piece.start, piece.stop, _CHUNK_NUMEL):
        stop = min(start + _CHUNK_NUMEL, piece.stop)
        chunk = _Piece(piece.pair, piece.number, start, stop)
        sides = []
        for (source, begin, end), dtype, buffer in zip(
            chunk.windows(), (a_dtype, b_dtype), buffers.sides, strict=True
        ):
            part = buffer[: end - begin]
            reader.read_into(source, begin, part)
            sides.append(np.frombuffer(part, NUMPY[dtype]))
        with np.errstate(all="ignore"):
            for at in range(0, stop - start, _BLOCK_NUMEL):
                a, b = (side[at : at + _BLOCK_NUMEL] for side in sides)
                sums += _compare_block(a, a_dtype, b, b_dtype, start + at, sums.roundings)
    return sums


# --- arithmetic ---


class _Sums(Struct, frozen=True):
    """Sums over pairs of numbers; ``+`` appends the pairs that follow.

    Attributes:
        roundings: roundings that make every pair equal.
        finite: number of pairs of finite numbers; norms and differences are of these.
        worst: index of the first pair with the largest difference.
    """

    roundings: frozenset[Rounding] = frozenset()
    unequal: int = 0
    finite: int = 0
    max_abs: float = 0.0
    worst: int | None = None
    difference_squares: float = 0.0
    a_squares: float = 0.0
    a_nan: int = 0
    b_nan: int = 0
    nan_in_one: int = 0
    inf_in_one: int = 0
    a_is_zero: bool = True
    b_is_zero: bool = True

    def __add__(self, other: _Sums) -> _Sums:
        larger = other if other.max_abs > self.max_abs else self
        return _Sums(
            roundings=self.roundings & other.roundings,
            unequal=self.unequal + other.unequal,
            finite=self.finite + other.finite,
            max_abs=larger.max_abs,
            worst=larger.worst,
            difference_squares=self.difference_squares + other.difference_squares,
            a_squares=self.a_squares + other.a_squares,
            a_nan=self.a_nan + other.a_nan,
            b_nan=self.b_nan + other.b_nan,
            nan_in_one=self.nan_in_one + other.nan_in_one,
            inf_in_one=self.inf_in_one + other.inf_in_one,
            a_is_zero=self.a_is_zero and other.a_is_zero,
            b_is_zero=self.b_is_zero and other.b_is_zero,
        )


def _compare_block(
    a: Array, a_dtype: DType, b: Array, b_dtype: DType, start: int, tried: frozenset[Rounding]
) -> _Sums:
    """Return the sums of pairs from index ``start``, all in float64."""
    x = a.astype(np.float64)
    roundings = frozenset(one for one in tried if _is_rounded(one, a, a_dtype, b, b_dtype))
    unequal = int(np.count_nonzero(_bits(a) != _bits(b))) if a_dtype is b_dtype else 0
    a_squares = float(np.square(x).sum())
    if a_dtype is b_dtype and not unequal and math.isfinite(a_squares):
        is_zero = not x.any()
        return _Sums(
            roundings, finite=x.size, a_squares=a_squares, a_is_zero=is_zero, b_is_zero=is_zero
        )
    y = b.astype(np.float64)
    a_nan, b_nan = np.isnan(x), np.isnan(y)
    if a_dtype is not b_dtype:
        unequal = int(np.count_nonzero((x != y) & ~(a_nan & b_nan)))
    is_finite = np.isfinite(x) & np.isfinite(y)
    difference = np.where(is_finite, np.abs(x - y), 0.0)
    worst = int(difference.argmax())
    largest = float(difference[worst])
    return _Sums(
        roundings,
        unequal=unequal,
        finite=int(np.count_nonzero(is_finite)),
        max_abs=largest,
        worst=start + worst if largest else None,
        difference_squares=float(np.square(difference).sum()),
        a_squares=float(np.square(x, where=is_finite, out=np.zeros_like(x)).sum()),
        a_nan=int(np.count_nonzero(a_nan)),
        b_nan=int(np.count_nonzero(b_nan)),
        nan_in_one=int(np.count_nonzero(a_nan != b_nan)),
        inf_in_one=int(np.count_nonzero((x != y) & ~is_finite & ~a_nan & ~b_nan)),
        a_is_zero=not x.any(),
        b_is_zero=not y.any(),
    )


def _is_rounded(rounding: Rounding, a: Array, a_dtype: DType, b: Array, b_dtype: DType) -> bool:
    """Return whether one side, rounded, has the bits of the other; any NaN equals any NaN."""
    if rounding.side == "b":
        a, a_dtype, b, b_dtype = b, b_dtype, a, a_dtype
    if not (_is_float(a_dtype) and _is_float(b_dtype)):
        there, back = _cast(a, a_dtype, b_dtype), _cast(b, b_dtype, a_dtype)
        return bool(np.array_equal(there, b) and np.array_equal(back, a))
    rounded = _cast(_cast(a, a_dtype, rounding.dtype), rounding.dtype, b_dtype)
    is_same = _bits(rounded) == _bits(b)
    if is_same.all():
        return True
    are_nan = np.isnan(rounded.astype(np.float32)) & np.isnan(b.astype(np.float32))
    return bool((is_same | are_nan).all())


def _is_float(dtype: DType) -> bool:
    return dtype.is_floating or dtype in _FLOAT8


def _bits(values: Array) -> Array:
    return values.view(np.dtype(f"u{values.itemsize}"))


def _cast(values: Array, stored: DType, to: DType) -> Array:
    """Return the values as another dtype, rounded as torch rounds.

    8-bit floats are cast through float32, and float32 beyond E4M3, which has no infinity, becomes
    its largest number (torch 2.13, ``c10/util/Float8_e4m3fn.h``, ``Float8_e5m2.h``).
    """
    if stored is to:
        return values
    if stored.is_floating and to.is_floating:
        out = np.empty(values.size, NUMPY[to])
        cast_into(values.view(np.uint8).data, stored, to, out.view(np.uint8).data)
        return out
    if _is_float(stored) and _is_float(to) and DType.F32 not in (stored, to):
        return _cast(_cast(values, stored, DType.F32), DType.F32, to)
    if stored is DType.F32 and to is DType.F8_E4M3:
        largest = np.float32(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
        values = np.clip(values, -largest, largest)
    return values.astype(NUMPY[to])
