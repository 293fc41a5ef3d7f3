"""Elements that are computed from others: any window of them, and always the same bits.

A matrix product rounds by the shape it is given. So rows are worked out in blocks whose bounds
follow from the tensor's shape alone, never from the window that was asked for: whatever the number
of workers and the memory they may take, the same elements are the same bits.
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
"""Fewest rows of a block, and what their number is a multiple of: with fewer, a product would come
out in other bits than that of the whole matrix (OpenBLAS computes the edges of a tile apart)."""

_PRODUCT_STEPS = 1 << 18
"""Most multiplications of one call of the matrix library: up to here OpenBLAS uses no threads of
its own (0.3, ``interface/gemm.c``). They would take turns with the workers', at a tenth of the
speed, and their number would decide how a product is cut and so how it is rounded."""

_SLAB_NUMEL = 1 << 19
"""Elements of a factor's rows that are read at a time: many blocks' worth."""

_PART_NUMEL = 1 << 18
"""Elements that are cast, or added, at a time."""

_KEPT = 6
"""Parts of factors that are kept for the next block: those of the tensors being worked on."""


class Kept:
    """Parts of factors, kept while they are among those that were asked for last."""

    def __init__(self) -> None:
        self._parts: OrderedDict[tuple[int, str, int], tuple[LowRankUpdate, Floats]] = OrderedDict()
        self._lock = RLock()

    def get(
        self, update: LowRankUpdate, part: str, matrix: int, make: Callable[[], Floats]
    ) -> Floats:
        """What ``make`` gives, or gave; the update is kept too, so that no other gets its id."""
        key = id(update), part, matrix
        with self._lock:
            if key not in self._parts:
                made = make()
                self._parts[key] = update, made
            self._parts.move_to_end(key)
            while len(self._parts) > _KEPT:
                self._parts.popitem(last=False)
            return self._parts[key][1]


class Calculator:
    """Windows of computed tensors, from any number of threads.

    ``read`` fills a buffer with the bytes of a source, which may be computed in turn; ``kept`` is
    shared by all that read the same files.
    """

    def __init__(self, read: Read, kept: Kept) -> None:
        self._read = read
        self._kept = kept

    def fill(self, computed: Computed, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``computed`` from ``start`` on, a whole element."""
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
        """Rows ``begin`` to ``end`` of a matrix of the result."""
        merged = self._merged(update, matrix, begin, end)
        if update.magnitude is None:
            return merged
        if update.is_transposed:
            factor = self._factor_of_columns(update, matrix)
        else:
            # peft 0.21, tuners/lora/dora.py: the norm of each output's weights.
            norms = np.sqrt(np.einsum("ij,ij->i", merged, merged, dtype=np.float64))
            magnitude = self._floats(update.magnitude, begin, end - begin)
            factor = (magnitude / norms.astype(np.float32))[:, np.newaxis]
        with np.errstate(all="ignore"):
            merged *= factor
        return merged

    def _merged(self, update: LowRankUpdate, matrix: int, begin: int, end: int) -> Floats:
        """Rows of base and update together, before any magnitude."""
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
        """The factor along the rows, ``(end - begin, rank)``, out of the slab that has them."""
        step = _block_rows(update.columns)
        rank = update.factors.rank * (1 if update.is_transposed else update.factors.matrices)
        length = max(_SLAB_NUMEL // rank // step, 1) * step
        slab, within = divmod(begin, length)

        def read() -> Floats:
            last = min((slab + 1) * length, update.rows)
            return self._factor(update, matrix, slab * length, last, of_a=update.is_transposed)

        rows = self._kept.get(update, f"left {slab}", matrix, read)
        return rows[within : within + end - begin]

    def _right(self, update: LowRankUpdate, matrix: int) -> Floats:
        """The factor along the columns, ``(rank, columns)``."""

        def read() -> Floats:
            of_a = not update.is_transposed
            factor = self._factor(update, matrix, 0, update.columns, of_a=of_a)
            return np.ascontiguousarray(factor.T)

        return self._kept.get(update, "right", matrix, read)

    def _factor(
        self, update: LowRankUpdate, matrix: int, begin: int, end: int, *, of_a: bool
    ) -> Floats:
        """Inputs ``begin`` to ``end`` of ``a``, or outputs of ``b``, as ``(end - begin, rank)``."""
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

    def _factor_of_columns(self, update: LowRankUpdate, matrix: int) -> Floats:
        """Magnitude over norm of every column, for which the whole matrix is gone through."""
        magnitude = update.magnitude
        if magnitude is None:
            raise AssertionError("asked for the magnitude of an update that has none")

        def measure() -> Floats:
            squares = np.zeros(update.columns, np.float32)
            step = _block_rows(update.columns)
            for begin in range(0, update.rows, step):
                rows = self._merged(update, matrix, begin, min(begin + step, update.rows))
                block = rows * rows  # summed row by row in float32, as torch sums columns
                block[0] += squares
                squares = np.add.reduce(block, axis=0)
            wanted = self._floats(magnitude, 0, update.columns)
            norms: Floats = np.sqrt(squares)
            with np.errstate(all="ignore"):
                return np.divide(wanted, norms, dtype=np.float32)

        return self._kept.get(update, "columns", matrix, measure)

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
    """``left @ right``, in tiles that are computed alike on every machine of one kind."""
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
    """Bytes held while ``jobs`` threads work out ``update`` and tensors like it.

    Two tensors are worked on at a time at most, where they are large: chunks come in file order.
    """
    factors = 2 * (update.factors.rank + 2) * update.columns
    blocks = 3 * jobs * _block_rows(update.columns) * update.columns
    return DType.F32.itemsize * (factors + blocks + (_KEPT - 2) * _SLAB_NUMEL)


def _block_rows(columns: int) -> int:
    """Rows that are worked out at a time; it follows from the shape alone."""
    return -(-_BLOCK_NUMEL // (max(columns, 1) * _BLOCK_ROWS)) * _BLOCK_ROWS
