"""Second copies of what is exported: equal to it, or the same rounded, or of another step."""

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
"""Samples of all tensors together; each tensor has at least one, however many there are."""

_RUNS_MAX = 1024
"""Ranges of one tensor that are told apart; a tensor that is not stored densely has millions."""

_BATCH_NUMEL = 1 << 18
_LIKENED_AT_ONCE = 256
_CHUNK_NBYTES = 1 << 20

Expect: TypeAlias = Callable[[Iterable[tuple[ByteSource, int, int]]], None]
Span: TypeAlias = tuple[int, int]
"""Elements from, to (half-open)."""


class Replica(Struct, frozen=True):
    """A second copy of bytes that are exported, which must be equal to them, byte for byte."""

    name: str
    kept: ByteSource
    other: ByteSource


class CastReplica(Struct, frozen=True):
    """A second copy of a tensor in another type; the narrower of the two is the other, rounded.

    If nothing but their likeness says that they are one (``names_it``), every element is compared;
    ``advice`` is what to do where they differ.
    """

    name: str
    path: Path
    kept: ByteSource
    kept_dtype: DType
    other: ByteSource
    other_dtype: DType
    names_it: bool = True
    advice: str = "Copy all files of one save again"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.other.nbytes // self.other_dtype.itemsize


class Comparison(Struct):
    """What has been seen so far of a tensor whose copy should be what a cast of it gives.

    The first element that differs, how many do of those compared, and by how much at most, in units
    of the last place of the narrower type.
    """

    replica: CastReplica
    first: int = -1
    count: int = 0
    compared: int = 0
    largest: int = 0

    @property
    def path(self) -> Path:
        """The file that holds the first element that differs, in the copy that is exported."""
        begin = self.first * self.replica.kept_dtype.itemsize
        return next(iter(self.replica.kept.extents(begin, begin + 1))).path

    def add(self, start: int, distances: npt.NDArray[np.int64]) -> None:
        """Take some elements into account: by how much each differs."""
        self.compared += distances.size
        if not distances.any():
            return
        if not self.count:
            self.first = start + int((distances != 0).argmax())
        self.count += int((distances != 0).sum())
        self.largest = max(self.largest, int(distances.max()))


def are_equal(read: Read, one: ByteSource, other: ByteSource) -> bool:
    """Whether both have the same bytes; reading ends where they differ."""
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
    expect: Expect | None = None,
) -> tuple[Comparison, ...]:
    """The tensors whose copies differ; NaN equals NaN.

    Unless ``full``, samples are taken from each file that a tensor lies in; memory is that of a
    batch of both copies. ``expect`` is told what ``read`` will be asked for.
    """
    compared = [Comparison(replica) for replica in replicas]
    parts = (
        (one, part)
        for number, one in enumerate(compared)
        for span in _spans(one.replica, number, len(replicas), full=full)
        for part in _parts(span, _BATCH_NUMEL)
    )
    for batch in _batches(parts, _BATCH_NUMEL):
        if expect is not None:
            expect(chain.from_iterable(_windows(one.replica, span) for one, span in batch))
        _compare(batch, read)
    return tuple(one for one in compared if one.count)


def fingerprint(read: Read, source: ByteSource, stored: DType, seen_as: DType) -> bytes:
    """A digest of three short samples, as they are after a cast to ``seen_as``.

    Copies of one tensor have the same fingerprint; the reverse need not be so.
    """
    from zexport.ranges.cast import bits_seen_as  # noqa: PLC0415 - as most are opened without

    samples = _samples(0, source.nbytes // stored.itemsize, _FINGERPRINT_NUMEL)
    elements = _elements(read, [(source, span) for span in samples], stored)
    return blake3(bits_seen_as(elements, stored, seen_as).tobytes()).digest()


def cosines(
    replicas: Sequence[CastReplica], read: Read, *, expect: Expect | None = None
) -> list[float]:
    """Of each tensor and its copy the cosine of the angle between short samples; 1 where one is 0.

    ``expect`` is told what ``read`` will be asked for.
    """
    found = []
    for begin in range(0, len(replicas), _LIKENED_AT_ONCE):
        batch = replicas[begin : begin + _LIKENED_AT_ONCE]
        if expect is not None:
            expect(
                window
                for one in batch
                for span in _samples(0, one.numel, _FINGERPRINT_NUMEL)
                for window in _windows(one, span)
            )
        found += [_cosine(read, one) for one in batch]
    return found


def _cosine(read: Read, replica: CastReplica) -> float:
    import numpy as np  # noqa: PLC0415 - opening most checkpoints reads no values

    from zexport.ranges.cast import NUMPY  # noqa: PLC0415

    spans = list(_samples(0, replica.numel, _FINGERPRINT_NUMEL))
    sides = (replica.kept, replica.kept_dtype), (replica.other, replica.other_dtype)
    one, other = (
        np.frombuffer(_elements(read, [(source, s) for s in spans], dtype), NUMPY[dtype])
        for source, dtype in sides
    )
    one, other = (
        np.nan_to_num(side.astype(np.float64), posinf=0, neginf=0) for side in (one, other)
    )
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / norms if norms else 1.0


_Part: TypeAlias = tuple[Comparison, Span]


def _windows(replica: CastReplica, span: Span) -> Iterator[tuple[ByteSource, int, int]]:
    """The bytes of both copies, from the first to behind the last."""
    copies = (replica.kept, replica.kept_dtype), (replica.other, replica.other_dtype)
    for source, dtype in copies:
        yield source, span[0] * dtype.itemsize, span[1] * dtype.itemsize


def _spans(replica: CastReplica, number: int, of: int, *, full: bool) -> Iterator[Span]:
    """What to compare of the tensor that is ``number`` among ``of``.

    Samples are taken from every range of the exported copy, so that each rank file that holds part
    of a tensor is looked into. Where there are too many, every n-th is taken, another one for each
    tensor.
    """
    if full or replica.names_it:
        yield 0, replica.numel
        return
    samples = [
        span
        for start, stop in _runs(replica.kept, replica.kept_dtype.itemsize)
        for span in _samples(start, stop, _SAMPLE_NUMEL)
    ]
    step = -(-len(samples) // max(1, _SPANS_MAX // of))
    yield from samples[number % step :: step] if step > 1 else samples


def _runs(source: ByteSource, itemsize: int) -> Iterator[Span]:
    """The ranges of files that a source lies in, in elements of it; the last may be several."""
    begin, end = 0, source.nbytes // itemsize
    for extent in islice(source.extents(0, source.nbytes), _RUNS_MAX):
        yield begin, begin + extent.nbytes // itemsize
        begin += extent.nbytes // itemsize
    if begin < end:
        yield begin, end


def _samples(start: int, stop: int, numel: int) -> Iterator[Span]:
    """The beginning, the middle and the end of a range; all of a small one."""
    if stop - start <= 3 * numel:
        yield start, stop
        return
    for begin in (start, start + (stop - start - numel) // 2, stop - numel):
        yield begin, begin + numel


def _parts(span: Span, numel: int) -> Iterator[Span]:
    for start in range(*span, numel):
        yield start, min(start + numel, span[1])


def _batches(parts: Iterable[_Part], numel: int) -> Iterator[list[_Part]]:
    """Parts of the same types, as many as fit."""
    batch: list[_Part] = []
    room = numel
    for one, (start, stop) in parts:
        if batch and (stop - start > room or _types(batch[0][0]) != _types(one)):
            yield batch
            batch, room = [], numel
        batch.append((one, (start, stop)))
        room -= stop - start
    if batch:
        yield batch


def _types(one: Comparison) -> tuple[DType, DType]:
    return one.replica.kept_dtype, one.replica.other_dtype


def _compare(batch: Sequence[_Part], read: Read) -> None:
    """Read a batch, cast it, and note what is seen."""
    from zexport.ranges.cast import bits_seen_as, distances  # noqa: PLC0415

    kept_dtype, other_dtype = _types(batch[0][0])
    kept = _elements(read, [(one.replica.kept, span) for one, span in batch], kept_dtype)
    other = _elements(read, [(one.replica.other, span) for one, span in batch], other_dtype)
    narrower = min(other_dtype, kept_dtype, key=lambda dtype: dtype.itemsize)
    one_bits = bits_seen_as(kept, kept_dtype, narrower)
    found = distances(one_bits, bits_seen_as(other, other_dtype, narrower), narrower)
    at = 0
    for one, (start, stop) in batch:
        one.add(start, found[at : at + stop - start])
        at += stop - start


def _elements(read: Read, spans: Sequence[tuple[ByteSource, Span]], dtype: DType) -> bytearray:
    """The bytes of spans of sources, one after another."""
    elements = bytearray(sum(stop - start for _, (start, stop) in spans) * dtype.itemsize)
    room = memoryview(elements)
    for source, (start, stop) in spans:
        nbytes = (stop - start) * dtype.itemsize
        read(source, start * dtype.itemsize, room[:nbytes])
        room = room[nbytes:]
    return elements
