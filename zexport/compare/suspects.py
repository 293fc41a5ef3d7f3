"""A second look at tensors of which the sums do not tell: are their values elsewhere?

Few elements are read again, or, of the few tensors that are suspects, all; one explanation is
better than another where it leaves less than half of the difference.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from zexport.checkpoint.state import StoredTensor
from zexport.compare.roundings import Side
from zexport.compare.streaming import CHUNK_NUMEL, Pair, numbers, sums_of
from zexport.compare.tensor import Kind, TensorDiff
from zexport.compare.values import ROW_NUMEL_MIN, Doubles, PairSums, row_width, whole_rows
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.reader import SourceReader

_BETTER = 0.25
"""Of squares: half of the distance."""
_SAMPLES = 64
_WINDOW_NUMEL = 2048
_SKETCH_NUMEL = 256
_GROUP_NUMEL = 64
"""Weights that 4-bit formats scale together (bitsandbytes; others take 32 or 128)."""
_LEVELS = ((32, 16, 1.5), (_GROUP_NUMEL, 16, 2.0), (_WINDOW_NUMEL, 256, 2.0))
"""Among so many elements that were quantized there are at most so many numbers, and among others so
many times as many."""
_INT8_MAX = 127
_NEAR_STEP = 0.1
_STEPS_KNOWN = 24
"""Below so many steps, numbers of 16 bits are nearer than that to whole ones."""
_AT_LIMIT_MIN = 0.01
"""Of the elements; that so many are the largest is no chance."""
_ROWS_LOOKED_AT = 8
_WIDTH_MAX = 1 << 17
_TOGETHER = 256
_MISSES_MAX = 16
"""So many tensors without a row elsewhere, and the models are two, or trained far apart."""

Found = dict[Pair, TensorDiff]


class SecondLook(Struct):
    """What reads suspects again.

    ``sums`` are what was seen of each pair at first, ``misses`` the tensors read again whose rows
    were nowhere else.
    """

    sums: Mapping[Pair, PairSums]
    reader: SourceReader
    jobs: int
    misses: int = 0

    def at(self, pair: Pair, tensor: TensorDiff) -> tuple[Kind, Side | None]:
        """The kind of a pair's difference, seen from nearby."""
        if not tensor.is_matrix or DType.C64 in (tensor.a_dtype, tensor.b_dtype):
            return tensor.kind, tensor.side
        if tensor.kind in (Kind.UNRELATED, Kind.RESHAPED) and self._is_transposed(pair):
            return Kind.TRANSPOSED, None
        if tensor.kind not in (Kind.UNRELATED, Kind.MOVED, Kind.PRUNED, Kind.ZEROED):
            return tensor.kind, tensor.side
        if self.misses < _MISSES_MAX and self.sums[pair].rows_apart > 1:
            if self._is_reordered(pair):
                return Kind.REORDERED, None
            self.misses += 1
        is_zeroed = tensor.kind is Kind.ZEROED
        looks = (  # of few numbers many are zero
            (Kind.COARSE, self._coarse, tensor.kind in (Kind.MOVED, Kind.PRUNED)),
            (Kind.LIMITED, self._limited, not is_zeroed),
        )
        found = ((kind, side) for kind, look, is_due in looks if is_due and (side := look(pair)))
        return next(found, (tensor.kind, tensor.side))

    def exchanged(self, found: Found) -> Iterator[tuple[Pair, str]]:
        """Pairs of which A has the values of another tensor of B, and that one's name."""
        by_shape: dict[Shape, list[Pair]] = defaultdict(list)
        for pair in found:
            by_shape[pair.a.shape].append(pair)
        crossed: dict[Pair, Pair] = {}
        for pairs in by_shape.values():
            suspects = [p for p in pairs if p.is_of_one_name and _may_be_another(found[p])]
            if suspects and len(pairs) > 1:
                own = {pair.a: pair for pair in suspects}
                sketches = [self._sketch(pair.b) for pair in suspects]
                for a, b in self._nearest(list(own), sketches, [pair.b for pair in pairs]):
                    crossed[Pair(a, b)] = own[a]
        for cross, sums in sums_of(crossed, self.reader, self.jobs).items():
            before = self.sums[crossed[cross]]
            nearest = min(before.difference_squares, sums.a_squares)
            is_nearer = sums.difference_squares < _BETTER * nearest
            if is_nearer and sums.shift_rest <= math.sqrt(_BETTER) * before.shift_rest:
                yield crossed[cross], cross.b.name

    def renamed(
        self, a_alone: Sequence[StoredTensor], b_alone: Sequence[StoredTensor]
    ) -> Iterator[tuple[str, str]]:
        """Names in A and B of what each has alone by that name, and both have."""
        crossed = []
        for shape in {placed.shape for placed in a_alone}:
            mine, theirs = (
                [placed for placed in side if placed.shape == shape] for side in (a_alone, b_alone)
            )
            nothing = [np.zeros(_sketch_numel(placed)) for placed in mine]
            crossed += [Pair(*found) for found in self._nearest(mine, nothing, theirs)]
        taken: set[str] = set()
        for cross, sums in sums_of(crossed, self.reader, self.jobs).items():
            name = cross.b.name
            is_near = sums.difference_squares <= _BETTER * sums.a_squares
            is_known = sums.finite >= ROW_NUMEL_MIN and not sums.is_constant(Side.A)
            if is_near and is_known and name not in taken:
                taken.add(name)
                yield cross.a.name, name

    def _nearest(
        self, suspects: Sequence[StoredTensor], owns: Sequence[Doubles], others: list[StoredTensor]
    ) -> Iterator[tuple[StoredTensor, StoredTensor]]:
        """Suspects with the one of the others that is nearer than their own, by few elements."""
        sketches = [self._sketch(suspect) for suspect in suspects]
        best = [_BETTER * float(_squares(s - o)) for s, o in zip(sketches, owns, strict=True)]
        nearest: list[StoredTensor | None] = [None] * len(suspects)
        for begin in range(0, len(others) if any(best) else 0, _TOGETHER):
            group = others[begin : begin + _TOGETHER]
            there = np.array([self._sketch(other) for other in group])
            for index, sketch in enumerate(sketches):
                squares = _squares(there - sketch)
                if squares.size and squares.min() < best[index]:
                    best[index] = float(squares.min())
                    nearest[index] = group[int(squares.argmin())]
        for suspect, other in zip(suspects, nearest, strict=True):
            if other is not None:
                yield suspect, other

    def _sketch(self, placed: StoredTensor) -> Doubles:
        return self._window(placed, _sketch_numel(placed))

    def _window(self, placed: StoredTensor, numel: int) -> Doubles:
        """Elements in the middle of a tensor, from the beginning of a group on."""
        start = max(0, prod(placed.shape) - numel) // 2 // _GROUP_NUMEL * _GROUP_NUMEL
        return numbers(placed, start, numel, self.reader)

    def _coarse(self, pair: Pair) -> Side | None:
        """The side that alone has few different numbers, or whole steps of a row's largest."""
        windows = self._windows(pair)
        for numel, levels, times in _LEVELS:
            a, b = (np.unique(window[:numel]).size for window in windows)
            if min(a, b) <= levels and max(a, b) >= times * levels:
                return Side.A if a < b else Side.B
        a, b = (self._in_steps(placed) for placed in (pair.a, pair.b))
        return None if a == b else Side.A if a else Side.B

    def _windows(self, pair: Pair) -> list[Doubles]:
        numel = min(prod(pair.a.shape), _WINDOW_NUMEL)
        return [self._window(placed, numel) for placed in (pair.a, pair.b)]

    def _in_steps(self, placed: StoredTensor) -> bool:
        """Whether the rows in the middle are whole steps of 127 to their largest, as int8 is."""
        width, count = placed.shape[-1], prod(placed.shape[:-1])
        if not ROW_NUMEL_MIN < width <= _WIDTH_MAX:
            return False
        found = known = 0
        for row in range(count // 2, min(count, count // 2 + _ROWS_LOOKED_AT)):
            values = numbers(placed, row * width, width, self.reader)
            if largest := float(np.abs(values).max()):
                steps = np.abs(values) * (_INT8_MAX / largest)
                small = steps[(steps > _NEAR_STEP) & (steps < _STEPS_KNOWN)]
                known += small.size
                found += int(np.count_nonzero(np.abs(small - small.round()) <= _NEAR_STEP))
        return known >= _STEPS_KNOWN and found >= 0.95 * known

    def _limited(self, pair: Pair) -> Side | None:
        """The side of which alone many elements are as large as its largest."""
        a, b = (
            np.count_nonzero(np.abs(window) == np.abs(window).max(initial=0)) / max(window.size, 1)
            for window in self._windows(pair)
        )
        few, many = sorted((a, b))
        if many < _AT_LIMIT_MIN or few > _AT_LIMIT_MIN / 2:
            return None
        return Side.A if a > b else Side.B

    def _is_transposed(self, pair: Pair) -> bool:
        """Whether B has at [j, i] what A has at [i, j]; told from a few places."""
        a, b = pair.a.shape, pair.b.shape
        if len(a) < 2 or b != (*a[:-2], a[-1], a[-2]) or prod(a) < _SAMPLES:
            return False
        places = np.random.default_rng(0).integers(0, a, (_SAMPLES, len(a)))
        turned = places[:, [*range(len(a) - 2), -1, -2]]
        here = self._at(pair.a, places, a)
        apart = np.square(here - self._at(pair.b, turned, b)).sum()
        own = np.square(here - (self._at(pair.b, places, a) if a == b else 0)).sum()
        return bool(apart < _BETTER * own)

    def _at(self, placed: StoredTensor, places: npt.NDArray[np.int64], shape: Shape) -> Doubles:
        flat = np.ravel_multi_index(tuple(places.T), shape)
        return np.array([numbers(placed, int(at), 1, self.reader)[0] for at in flat])

    def _is_reordered(self, pair: Pair) -> bool:
        """Whether rows of A that are not where they were are other such rows of B."""
        width = row_width(pair.a.shape)
        if self.sums[pair].rows_apart < 2 or width < ROW_NUMEL_MIN:
            return False
        every = -(-self.sums[pair].rows_apart // _SAMPLES)
        apart, samples, own = self._rows_apart(pair, width, every)
        if len(samples) < 2:
            return False
        best = np.full(len(samples), np.inf)
        squares = np.square(samples).sum(axis=1)
        for first, every_row in self._rows(pair.b, width):
            rows = every_row[apart[first : first + len(every_row)]]
            if len(rows):
                products = samples @ rows.T
                distance = squares[:, None] + np.square(rows).sum(axis=1) - 2 * products
                best = np.minimum(best, distance.min(axis=1))
        found = int(np.count_nonzero((best < _BETTER * own) & (best < _BETTER * squares)))
        return found >= max(2, len(samples) / 4)

    def _rows_apart(
        self, pair: Pair, width: int, every: int
    ) -> tuple[npt.NDArray[np.bool_], Doubles, Doubles]:
        """Which rows are not where they were, some of those of A, and their distance to B's."""
        marks, samples, own = [], [], []
        count = 0
        for (_, a), (_, b) in zip(
            self._rows(pair.a, width), self._rows(pair.b, width), strict=True
        ):
            distance = np.square(a - b).sum(axis=1)
            mark = distance > _BETTER * np.maximum(np.square(a).sum(1), np.square(b).sum(1))
            marks.append(mark)
            at = np.flatnonzero(mark)
            taken = at[(np.arange(count, count + at.size) % every) == 0]
            count += at.size
            samples.append(a[taken])
            own.append(distance[taken])
        return np.concatenate(marks), np.concatenate(samples), np.concatenate(own)

    def _rows(self, placed: StoredTensor, width: int) -> Iterator[tuple[int, Doubles]]:
        """The whole rows of a tensor, some at a time, with the number of the first."""
        total = prod(placed.shape) // width * width
        step = whole_rows(CHUNK_NUMEL, width)
        for start in range(0, total, step):
            values = numbers(placed, start, min(step, total - start), self.reader)
            yield start // width, values.reshape(-1, width)


def _squares(differences: Doubles) -> Doubles:
    """The sum of squares of each row; infinite where it is beyond what a double holds."""
    with np.errstate(over="ignore"):
        total: Doubles = np.square(differences).sum(axis=-1)
    return total


def _sketch_numel(placed: StoredTensor) -> int:
    return min(prod(placed.shape), _SKETCH_NUMEL)


def _may_be_another(tensor: TensorDiff) -> bool:
    """Whether its values may be those of a tensor of another name."""
    if prod(tensor.shape) < ROW_NUMEL_MIN or tensor.kind is Kind.RESHAPED:
        return False
    if tensor.is_matrix:
        return tensor.kind is Kind.UNRELATED
    return tensor.kind in (Kind.MOVED, Kind.SCALED, Kind.SHIFTED, Kind.UNRELATED)
