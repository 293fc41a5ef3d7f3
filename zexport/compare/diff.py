"""Two model folders compared tensor by tensor, streamed, in memory that does not grow with them.

Model folders hold nothing twice that could be compared: what proves one is ``zexport verify``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import local

from msgspec import Struct

from zexport.compare.folder import ModelWeights, PlacedTensor, open_weights
from zexport.compare.values import PairSums, Rounding, compare, possible_roundings
from zexport.compare.verdict import Outcome, TensorDiff, Verdict, judge
from zexport.ranges.reader import SourceReader
from zexport.run.progress import Phase, Progress

_CHUNK_NUMEL = 1 << 17
"""Elements read together."""
_PIECE_NUMEL = 1 << 22
"""Elements of one task, so that one large tensor keeps every thread busy."""
_ITEMSIZE_MAX = 8
_AHEAD = 4
"""Tasks a thread that may wait for their turn."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Every tensor of two model folders, the worst first.

    Attributes:
        a, b: the folders.
        tensors: those on one side alone, then other shapes, other values by the size of the
            difference, cast-equal and equal ones.
        nbytes_read: bytes read of both.
        verdict: what made the difference.
    """

    a: Path
    b: Path
    tensors: tuple[TensorDiff, ...]
    nbytes_read: int
    verdict: Verdict

    def count(self, outcome: Outcome) -> int:
        """How many tensors have this outcome."""
        return sum(tensor.outcome is outcome for tensor in self.tensors)


def diff_weights(
    a: Path,
    b: Path,
    *,
    jobs: int,
    progress: Callable[[Progress], None] | None = None,
) -> DiffReport:
    """How the weights of two model folders differ; see ``zexport.api.diff_models``."""
    a_weights, b_weights = open_weights(a), open_weights(b)
    pairs, alone = _paired(a_weights, b_weights)
    comparable = [pair for pair in pairs if pair.a.tensor.shape == pair.b.tensor.shape]
    sums = {pair: PairSums(frozenset(pair.roundings)) for pair in comparable}
    pieces = tuple(_pieces(comparable))
    total = sum(piece.nbytes for piece in pieces)
    done = 0
    files = {file.path: file for file in (*a_weights.files, *b_weights.files)}
    with SourceReader(files.values()) as reader:
        for piece, seen in _compared(pieces, reader, jobs):
            sums[piece.pair] += seen
            done += piece.nbytes
            if progress is not None:
                progress(Progress(done, total, Phase.VERIFY))
        reader.finish()
    found = [*alone, *(_judged(pair, sums.get(pair)) for pair in pairs)]
    tensors = tuple(sorted(found, key=_order))
    adapters = (a_weights.is_adapter, b_weights.is_adapter)
    return DiffReport(a, b, tensors, done, judge(tensors, adapters))


class _Pair(Struct, frozen=True):
    """A tensor of A and what B has of it."""

    a: PlacedTensor
    b: PlacedTensor

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        return possible_roundings(self.a.tensor.dtype, self.b.tensor.dtype)


class _Piece(Struct, frozen=True):
    """The elements ``start`` to ``stop`` of a pair."""

    pair: _Pair
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        sides = (self.pair.a.tensor, self.pair.b.tensor)
        return (self.stop - self.start) * sum(side.dtype.itemsize for side in sides)


def _paired(a: ModelWeights, b: ModelWeights) -> tuple[list[_Pair], list[TensorDiff]]:
    """What there is on both sides, ties taken into account, and what is on one side alone."""
    shared = a.tensors.keys() & b.tensors.keys()
    pairs = [_Pair(a.tensors[name], b.tensors[name]) for name in a.tensors if name in shared]
    a_alone, b_alone = a.tensors.keys() - shared, b.tensors.keys() - shared
    ties = {**a.learn_ties(), **b.learn_ties()} if a_alone or b_alone else {}
    alone = []
    for name in sorted(a_alone):
        if partner := _partner(name, b, ties):
            pairs.append(_Pair(a.tensors[name], partner))
        else:
            alone.append(_alone(Outcome.ONLY_IN_A, a.tensors[name]))
    for name in sorted(b_alone):
        if partner := _partner(name, a, ties):
            pairs.append(_Pair(partner, b.tensors[name]))
        else:
            alone.append(_alone(Outcome.ONLY_IN_B, b.tensors[name]))
    return list(dict.fromkeys(pairs)), alone


def _partner(name: str, other: ModelWeights, ties: Mapping[str, str]) -> PlacedTensor | None:
    """The tensor of the other side that is tied to this name, if there is one."""
    source = ties.get(name, name)
    members = (source, *(alias for alias, root in ties.items() if root == source))
    return next((other.tensors[m] for m in members if m in other.tensors), None)


def _alone(outcome: Outcome, placed: PlacedTensor) -> TensorDiff:
    tensor = placed.tensor
    if outcome is Outcome.ONLY_IN_A:
        return TensorDiff(outcome, tensor.name, None, tensor.dtype, None, tensor.shape, None)
    return TensorDiff(outcome, None, tensor.name, None, tensor.dtype, None, tensor.shape)


def _compared(
    pieces: Iterable[_Piece], reader: SourceReader, jobs: int
) -> Iterator[tuple[_Piece, PairSums]]:
    """What is seen of every piece, in order; few are under way at a time."""
    buffers = _Buffers()
    workers = ThreadPoolExecutor(jobs)
    running: deque[tuple[_Piece, Future[PairSums]]] = deque()
    try:
        for piece in pieces:
            running.append((piece, workers.submit(_seen, piece, reader, buffers)))
            if len(running) > jobs * _AHEAD:
                first, future = running.popleft()
                yield first, future.result()
        for first, future in running:
            yield first, future.result()
    finally:
        workers.shutdown(cancel_futures=True)


def _pieces(pairs: Iterable[_Pair]) -> Iterator[_Piece]:
    for pair in pairs:
        numel = prod(pair.a.tensor.shape)
        for start in range(0, numel, _PIECE_NUMEL):
            yield _Piece(pair, start, min(start + _PIECE_NUMEL, numel))


class _Buffers(local):
    """Room for a chunk of either side, in each thread its own."""

    def __init__(self) -> None:
        self.a = memoryview(bytearray(_CHUNK_NUMEL * _ITEMSIZE_MAX))
        self.b = memoryview(bytearray(_CHUNK_NUMEL * _ITEMSIZE_MAX))


def _seen(piece: _Piece, reader: SourceReader, buffers: _Buffers) -> PairSums:
    a, b = piece.pair.a, piece.pair.b
    sums = PairSums(frozenset(piece.pair.roundings))
    for start in range(piece.start, piece.stop, _CHUNK_NUMEL):
        numel = min(_CHUNK_NUMEL, piece.stop - start)
        a_part = buffers.a[: numel * a.tensor.dtype.itemsize]
        b_part = buffers.b[: numel * b.tensor.dtype.itemsize]
        reader.read_into(a.source, start * a.tensor.dtype.itemsize, a_part)
        reader.read_into(b.source, start * b.tensor.dtype.itemsize, b_part)
        sums += compare(
            a_part, a.tensor.dtype, b_part, b.tensor.dtype, start=start, tried=sums.roundings
        )
    return sums


def _judged(pair: _Pair, sums: PairSums | None) -> TensorDiff:
    a, b = pair.a.tensor, pair.b.tensor
    rounding = None
    if sums is None:
        outcome = Outcome.SHAPE
    elif not sums.unequal and a.dtype is b.dtype:
        outcome = Outcome.EQUAL
    else:
        rounding = next((r for r in pair.roundings if r in sums.roundings), None)
        outcome = Outcome.DIFFERENT if rounding is None else Outcome.CAST_EQUAL
    return TensorDiff(outcome, a.name, b.name, a.dtype, b.dtype, a.shape, b.shape, sums, rounding)


_WORST_FIRST = (
    Outcome.ONLY_IN_A,
    Outcome.ONLY_IN_B,
    Outcome.SHAPE,
    Outcome.DIFFERENT,
    Outcome.CAST_EQUAL,
    Outcome.EQUAL,
)


def _order(diff: TensorDiff) -> tuple[int, int, float, str]:
    """Worst first: values by NaN and infinities in one alone, then by the relative difference."""
    sums, rank = diff.sums, _WORST_FIRST.index(diff.outcome)
    if sums is None:
        return rank, 0, 0.0, diff.name
    relative = math.inf if sums.relative_norm is None else sums.relative_norm
    return rank, -(sums.nan_in_one + sums.inf_in_one), -relative, diff.name
