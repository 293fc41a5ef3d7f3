"""Compute windows of computed tensors, always with the same bits.

A matrix product rounds depending on its shape. So rows are computed in blocks whose bounds depend
only on the tensor's shape, never on the window, the number of workers or the memory limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from zexport.ranges.cast import cast_into
from zexport.ranges.computed import Computed, Elements, LowRankUpdate, Recast, ScaledSum, Zeros
from zexport.ranges.dtypes import DType
from zexport.ranges.source import Read

if TYPE_CHECKING:
    import numpy.typing as npt

Floats: TypeAlias = "npt.NDArray[np.float32]"

_BLOCK_NUMEL = 1 << 16
_BLOCK_ROWS = 16
"""Blocks have a multiple of these rows: with fewer, bits differ from those of the whole matrix,
because OpenBLAS computes the edges of a tile separately."""

_PRODUCT_STEPS = 1 << 18
"""Most multiplications of a call: above, OpenBLAS uses its own threads (0.3,
``interface/gemm.c``). They would compete with the workers, at a tenth of the speed, and their
number would change the rounding."""

_SLAB_NUMEL = 1 << 19
"""Elements of a factor read at a time, enough for many blocks."""

_PART_NUMEL = 1 << 18
"""Elements cast or added at a time."""

_CACHED = 6
"""Parts of factors in the cache."""


class FactorCache:
    """The most recently used parts of factors."""

    def __init__(self) -> None:
        self._parts: OrderedDict[tuple[int, str, int], tuple[LowRankUpdate, Floats]] = OrderedDict()
        self._lock = RLock()

    def get(
        self, update: LowRankUpdate, part: str, matrix: int, read: Callable[[], Floats]
    ) -> Floats:
        """Return a cached part, or what ``read`` returns."""
        key = id(update), part, matrix
        with self._lock:
            if key not in self._parts:
                self._parts[key] = update, read()  # with the update, so that its id stays
            self._parts.move_to_end(key)
            while len(self._parts) > _CACHED:
                self._parts.popitem(last=False)
            return self._parts[key][1]


class Calculator:
    """Computes windows from any number of threads.

    ``read`` fills a buffer from a source, which may be computed too.
    """

    def __init__(self, read: Read, cache: FactorCache) -> None:
        self._read = read
        self._cache = cache

    def fill(self, computed: Computed, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of ``computed`` from ``start``, in whole elements."""
        if isinstance(computed, Recast):
            self._recast(computed, start, buffer)
            return
        if isinstance(computed, Zeros):
            np.frombuffer(buffer, np.uint8)[:] = 0
            return
        out = np.frombuffer(buffer, np.float32)
        first = start // DType.F32.itemsize
        if isinstance(computed, ScaledSum):
            self._sum(computed, first, out)
        elif isinstance(computed, LowRankUpdate):
            self._low_rank(computed, first, out)

    def _recast(self, recast: Recast, start: int, buffer: memoryview) -> None:
        stored, itemsize = recast.elements, recast.dtype.itemsize
        first, count = start // itemsize, buffer.nbytes // itemsize
        for at in range(0, count, _PART_NUMEL):
            numel = min(_PART_NUMEL, count - at)
            part = buffer[at * itemsize : (at + numel) * itemsize]
            if stored.dtype is recast.dtype:
                self._read(stored.source, (first + at) * itemsize, part)
            else:
                raw = self._raw(stored, first + at, numel)
                cast_into(raw, stored.dtype, recast.dtype, part)

    def _sum(self, total: ScaledSum, first: int, out: Floats) -> None:
        scaling = np.float32(total.scaling)
        for at in range(0, out.size, _PART_NUMEL):
            numel = min(_PART_NUMEL, out.size - at)
            base = self._floats(total.base, first + at, numel)
            out[at : at + numel] = base + self._floats(total.addend, first + at, numel) * scaling

    def _low_rank(self, update: LowRankUpdate, first: int, out: Floats) -> None:
        rows, columns = update.rows, update.columns
        step = _block_rows(columns)
        done = 0
        while done < out.size:
            matrix, within = divmod(first + done, rows * columns)
            begin = within // columns // step * step
            block = self._block(update, matrix, begin, min(begin + step, rows)).reshape(-1)
            part = block[within - begin * columns :][: out.size - done]
            out[done : done + part.size] = part
            done += part.size

    def _block(self, update: LowRankUpdate, matrix: int, begin: int, end: int) -> Floats:
        """Return rows ``begin`` to ``end`` of a matrix of the result."""
        merged = self._merged(update, matrix, begin, end)
        if update.magnitude is None:
            return merged
        if update.is_transposed:
            factor = self._factor_of_columns(update, update.magnitude, matrix)
        else:
            # peft 0.21, tuners/lora/dora.py: the norm of each output's weights
            norms = np.sqrt(np.einsum("ij,ij->i", merged, merged, dtype=np.float64))
            magnitude = self._floats(update.magnitude, begin, end - begin)
            factor = (magnitude / norms.astype(np.float32))[:, np.newaxis]
        with np.errstate(all="ignore"):
            merged *= factor
        return merged

    def _merged(self, update: LowRankUpdate, matrix: int, begin: int, end: int) -> Floats:
        """Return rows of base plus update, without magnitude."""
        columns = update.columns
        first = (matrix * update.rows + begin) * columns
        base = self._floats(update.base, first, (end - begin) * columns).reshape(-1, columns)
        with np.errstate(all="ignore"):
            left, right = self._left(update, matrix, begin, end), self._right(update, matrix)
            product = _product(left, right)
            product *= np.float32(update.scaling)
            product += base
        return product

    def _left(self, update: LowRankUpdate, matrix: int, begin: int, end: int) -> Floats:
        """Return rows of the left factor, ``(end - begin, rank)``."""
        step = _block_rows(update.columns)
        rank = update.factors.rank * (1 if update.is_transposed else update.factors.matrices)
        length = max(_SLAB_NUMEL // rank // step, 1) * step
        slab, within = divmod(begin, length)

        def read() -> Floats:
            last = min((slab + 1) * length, update.rows)
            return self._factor(update, matrix, slab * length, last, of_a=update.is_transposed)

        rows = self._cache.get(update, f"left {slab}", matrix, read)
        return rows[within : within + end - begin]

    def _right(self, update: LowRankUpdate, matrix: int) -> Floats:
        """Return the right factor, ``(rank, columns)``."""

        def read() -> Floats:
            of_a = not update.is_transposed
            factor = self._factor(update, matrix, 0, update.columns, of_a=of_a)
            return np.ascontiguousarray(factor.T)

        return self._cache.get(update, "right", matrix, read)

    def _factor(
        self, update: LowRankUpdate, matrix: int, begin: int, end: int, *, of_a: bool
    ) -> Floats:
        """Return inputs ``begin`` to ``end`` of ``a``, or outputs of ``b``, by rank."""
        factors = update.factors
        rank, matrices = factors.rank, factors.matrices
        values = np.empty((end - begin, rank), np.float32)
        if of_a:
            for index in range(rank):
                first = (matrix * rank + index) * factors.inputs + begin
                values[:, index] = self._floats(factors.a, first, end - begin)
            return values
        width = rank * matrices
        step = max(_PART_NUMEL // width, 1)
        for at in range(begin, end, step):
            count = min(step, end - at)
            stored = self._floats(factors.b, at * width, count * width)
            values[at - begin :][:count] = stored.reshape(count, rank, matrices)[:, :, matrix]
        return values

    def _factor_of_columns(self, update: LowRankUpdate, magnitude: Elements, matrix: int) -> Floats:
        """Return magnitude / norm of every column; reads the whole matrix."""

        def measure() -> Floats:
            squares = np.zeros(update.columns, np.float32)
            step = _block_rows(update.columns)
            for begin in range(0, update.rows, step):
                rows = self._merged(update, matrix, begin, min(begin + step, update.rows))
                block = rows * rows  # float32 row by row, like torch
                block[0] += squares
                squares = np.add.reduce(block, axis=0)
            wanted = self._floats(magnitude, 0, update.columns)
            with np.errstate(all="ignore"):
                return np.divide(wanted, np.sqrt(squares), dtype=np.float32)

        return self._cache.get(update, "columns", matrix, measure)

    def _floats(self, elements: Elements, first: int, count: int) -> Floats:
        raw = self._raw(elements, first, count)
        if elements.dtype is DType.F32:
            return np.frombuffer(raw, np.float32)
        values = np.empty(count, np.float32)
        cast_into(raw, elements.dtype, DType.F32, values.data.cast("B"))
        return values

    def _raw(self, elements: Elements, first: int, count: int) -> memoryview:
        itemsize = elements.dtype.itemsize
        raw = memoryview(bytearray(count * itemsize))
        self._read(elements.source, first * itemsize, raw)
        return raw


def _product(left: Floats, right: Floats) -> Floats:
    """Return ``left @ right``, computed in tiles of fixed size."""
    rows, columns = left.shape[0], right.shape[1]
    product = np.empty((rows, columns), np.float32)
    width = max(_PRODUCT_STEPS // (_BLOCK_ROWS * left.shape[1]) // _BLOCK_ROWS, 1) * _BLOCK_ROWS
    for top in range(0, rows, _BLOCK_ROWS):
        some = left[top : top + _BLOCK_ROWS]
        for at in range(0, columns, width):
            tile = product[top : top + _BLOCK_ROWS, at : at + width]
            np.matmul(some, right[:, at : at + width], out=tile)
    return product


def held_nbytes(update: LowRankUpdate, jobs: int) -> int:
    """Return the memory that ``jobs`` threads need for tensors like ``update``.

    At most two large tensors are in progress: chunks are in file order.
    """
    factors = 2 * (update.factors.rank + 2) * update.columns
    blocks = 3 * jobs * _block_rows(update.columns) * update.columns
    return DType.F32.itemsize * (factors + blocks + (_CACHED - 2) * _SLAB_NUMEL)


def _block_rows(columns: int) -> int:
    """Return the rows of a block."""
    return -(-_BLOCK_NUMEL // (max(columns, 1) * _BLOCK_ROWS)) * _BLOCK_ROWS
