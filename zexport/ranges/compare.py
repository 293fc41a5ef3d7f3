"""Compare replicas byte for byte, and fp32 values with their 16-bit copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from blake3 import blake3
from msgspec import Struct

from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Read

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SAMPLE_NUMEL = 256
_FINGERPRINT_NUMEL = 1024
_SPANS_MAX = 1 << 16
"""Samples of all tensors; each tensor has at least one."""

_RUNS_MAX = 1024
"""Ranges of a tensor that are sampled separately; scattered tensors have millions."""

_BATCH_NUMEL = 1 << 18
_CHUNK_NBYTES = 1 << 20

Expect: TypeAlias = Callable[[Iterable[tuple[ByteSource, int, int]]], None]
"""Announce windows (source, start, stop) that will be read."""

Span: TypeAlias = tuple[int, int]
"""Elements from, to (exclusive)."""


class Replica(Struct, frozen=True):
    """A copy that must equal the exported bytes."""

    name: str
    kept: ByteSource
    other: ByteSource


class CastReplica(Struct, frozen=True):
    """A copy in another dtype; the wider one, cast, must equal the narrower.

    If ``is_matched_by_value``, only the values show that both are the same tensor, so every element
    is compared. ``advice`` is the hint if they differ.
    """

    name: str
    path: Path
    kept: ByteSource
    kept_dtype: DType
    other: ByteSource
    other_dtype: DType
    is_matched_by_value: bool = True
    advice: str = "Copy all files of one checkpoint again"

    @property
    def numel(self) -> int:
        return self.other.nbytes // self.other_dtype.itemsize

    @property
    def copies(self) -> tuple[tuple[ByteSource, DType], ...]:
        return (self.kept, self.kept_dtype), (self.other, self.other_dtype)

    def windows(self, span: Span) -> Iterator[tuple[ByteSource, int, int]]:
        """Yield the bytes of both copies."""
        for source, dtype in self.copies:
            yield source, span[0] * dtype.itemsize, span[1] * dtype.itemsize


class Comparison(Struct):
    """Differences of a copy so far.

    ``first`` element that differs, ``count`` of ``compared`` elements, and the ``largest``
    difference in units of the last place of the narrower dtype.
    """

    replica: CastReplica
    first: int = -1
    count: int = 0
    compared: int = 0
    largest: int = 0

    @property
    def path(self) -> Path:
        """The file that contains the first element that differs, in the exported copy."""
        begin = self.first * self.replica.kept_dtype.itemsize
        return next(iter(self.replica.kept.extents(begin, begin + 1))).path

    def add(self, start: int, distances: npt.NDArray[np.int64]) -> None:
        self.compared += distances.size
        if not distances.any():
            return
        if not self.count:
            self.first = start + int((distances != 0).argmax())
        self.count += int((distances != 0).sum())
        self.largest = max(self.largest, int(distances.max()))


def are_equal(read: Read, one: ByteSource, other: ByteSource) -> bool:
    """Whether both have the same bytes; stops at the first difference."""
    if one.nbytes != other.nbytes:
        return False
    size = min(_CHUNK_NBYTES, one.nbytes)
    first, second = (memoryview(bytearray(size)) for _ in range(2))
    for start in range(0, one.nbytes, _CHUNK_NBYTES):
        count = min(size, one.nbytes - start)
        read(one, start, first[:count])
        read(other, start, second[:count])
        if first[:count] != second[:count]:
            return False
    return True


def compare_casts(
    replicas: Sequence[CastReplica],
    read: Read,
    *,
    full: bool,
    expect: Expect,
) -> tuple[Comparison, ...]:
    """Return the tensors whose copies differ; NaN equals NaN.

    Unless ``full``, samples of each file that contains part of a tensor are compared.
    """
    compared = [Comparison(replica) for replica in replicas]
    parts = (
        (one, (start, min(start + _BATCH_NUMEL, stop)))
        for number, one in enumerate(compared)
        for first, stop in _spans(one.replica, number, len(replicas), full=full)
        for start in range(first, stop, _BATCH_NUMEL)
    )
    for batch in _batches(parts):
        expect(chain.from_iterable(one.replica.windows(span) for one, span in batch))
        _compare(batch, read)
    return tuple(one for one in compared if one.count)


def fingerprint(read: Read, source: ByteSource, stored: DType, seen_as: DType) -> bytes:
    """Return a digest of three short samples, cast to ``seen_as``.

    Copies of a tensor have the same fingerprint, but other tensors may have it too.
    """
    from zexport.ranges.cast import bits_seen_as  # noqa: PLC0415 - imports numpy

    samples = _samples(0, source.nbytes // stored.itemsize, _FINGERPRINT_NUMEL)
    elements = _elements(read, [(source, span) for span in samples], stored)
    return blake3(bits_seen_as(elements, stored, seen_as).tobytes()).digest()


def cosines(replicas: Sequence[CastReplica], read: Read, expect: Expect) -> list[float]:
    """Return the cosine similarity of short samples of each tensor and its copy; 1 for zeros."""
    spans = [[*_samples(0, one.numel, _FINGERPRINT_NUMEL)] for one in replicas]
    pairs = [*zip(replicas, spans, strict=True)]
    expect(window for one, own in pairs for span in own for window in one.windows(span))
    return [_cosine(read, one, own) for one, own in pairs]


def _cosine(read: Read, replica: CastReplica, spans: Sequence[Span]) -> float:
    import numpy as np  # noqa: PLC0415 - opening most checkpoints reads no values

    from zexport.ranges.cast import NUMPY  # noqa: PLC0415

    sides = []
    for source, dtype in replica.copies:
        raw = _elements(read, [(source, span) for span in spans], dtype)
        values = np.frombuffer(raw, NUMPY[dtype]).astype(np.float64)
        sides.append(np.nan_to_num(values, posinf=0, neginf=0))
    norms = float(np.linalg.norm(sides[0]) * np.linalg.norm(sides[1]))
    return float(sides[0] @ sides[1]) / norms if norms else 1.0


_Part: TypeAlias = tuple[Comparison, Span]


def _spans(replica: CastReplica, number: int, of: int, *, full: bool) -> Iterator[Span]:
    """Yield the elements to compare of tensor ``number`` of ``of``.

    Samples cover every range of the exported copy, so every rank file is read. If there are too
    many, each tensor takes every n-th, starting at another one.
    """
    if full or replica.is_matched_by_value:
        yield 0, replica.numel
        return
    samples: list[Span] = []
    begin, end, itemsize = 0, replica.numel, replica.kept_dtype.itemsize
    for extent in islice(replica.kept.extents(0, replica.kept.nbytes), _RUNS_MAX):
        stop = begin + extent.nbytes // itemsize
        samples += _samples(begin, stop, _SAMPLE_NUMEL)
        begin = stop
    if begin < end:
        samples += _samples(begin, end, _SAMPLE_NUMEL)
    step = max(1, -(-len(samples) // max(1, _SPANS_MAX // of)))
    yield from samples[number % step :: step]


def _samples(start: int, stop: int, numel: int) -> Iterator[Span]:
    """Yield start, middle and end of a range; all of a small one."""
    if stop - start <= 3 * numel:
        yield start, stop
        return
    for begin in (start, start + (stop - start - numel) // 2, stop - numel):
        yield begin, begin + numel


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Yield parts of the same dtypes, up to ``_BATCH_NUMEL`` elements together."""
    batch: list[_Part] = []
    room = _BATCH_NUMEL
    for one, (start, stop) in parts:
        if batch and (stop - start > room or _dtypes(batch[0]) != _dtypes((one, (start, stop)))):
            yield batch
            batch, room = [], _BATCH_NUMEL
        batch.append((one, (start, stop)))
        room -= stop - start
    if batch:
        yield batch


def _dtypes(part: _Part) -> tuple[DType, DType]:
    return part[0].replica.kept_dtype, part[0].replica.other_dtype


def _compare(batch: Sequence[_Part], read: Read) -> None:
    """Read a batch, cast the wider copies, and add the differences."""
    from zexport.ranges.cast import bits_seen_as, distances  # noqa: PLC0415 - imports numpy

    kept_dtype, other_dtype = _dtypes(batch[0])
    kept = _elements(read, [(one.replica.kept, span) for one, span in batch], kept_dtype)
    other = _elements(read, [(one.replica.other, span) for one, span in batch], other_dtype)
    narrower = min(other_dtype, kept_dtype, key=lambda dtype: dtype.itemsize)
    bits = bits_seen_as(kept, kept_dtype, narrower)
    found = distances(bits, bits_seen_as(other, other_dtype, narrower), narrower)
    at = 0
    for one, (start, stop) in batch:
        one.add(start, found[at : at + stop - start])
        at += stop - start


def _elements(read: Read, spans: Sequence[tuple[ByteSource, Span]], dtype: DType) -> bytearray:
    """Return the bytes of spans of sources, one after another."""
    elements = bytearray(sum(stop - start for _, (start, stop) in spans) * dtype.itemsize)
    room = memoryview(elements)
    for source, (start, stop) in spans:
        nbytes = (stop - start) * dtype.itemsize
        read(source, start * dtype.itemsize, room[:nbytes])
        room = room[nbytes:]
    return elements
