"""Second copies of what is exported: equal to it, or the same rounded, or of another step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource

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

Span: TypeAlias = tuple[int, int]
"""Elements from, to (half-open)."""


class Reads(Protocol):
    """Something that reads bytes of a source, such as ``zexport.ranges.reader.SourceReader``."""

    def read_into(self, source: ByteSource, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``source`` from ``start`` on."""
        ...


@dataclass(frozen=True, slots=True)
class Replica:
    """A second copy of bytes that an export reads from the first, to be compared with it.

    Attributes:
        name: the tensor that both hold.
        kept: the copy that is exported.
        other: the copy that must be equal to it, byte for byte.
    """

    name: str
    kept: ByteSource
    other: ByteSource


@dataclass(frozen=True, slots=True)
class CastReplica:
    """A second copy of a tensor in another type; the narrower of the two is the other, rounded.

    Attributes:
        name: the tensor that both hold.
        path: the file, for messages.
        kept: the copy that is exported.
        kept_dtype: its element type.
        other: the copy that is not exported; both may have one type.
        other_dtype: its element type.
        names_it: whether the two are held to be one tensor because they are alike, and nothing
            else says so. Then every element is compared, whatever was asked for.
        advice: what to do where they differ, as an imperative sentence without a full stop.
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


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor whose copy is not what a cast of it gives.

    Attributes:
        replica: both copies.
        first: the first element that differs, of those compared.
        count: how many differ.
        compared: how many were compared.
        largest: by how much they differ at most, in units of the last place of the narrower type.
        path: the file that holds the first of them in the copy that is exported.
    """

    replica: CastReplica
    first: int
    count: int
    compared: int
    largest: int
    path: Path


def compare_casts(
    replicas: Sequence[CastReplica],
    reader: Reads,
    *,
    full: bool,
    batch_numel: int = _BATCH_NUMEL,
) -> tuple[Difference, ...]:
    """The tensors whose copies differ; NaN equals NaN.

    Memory is that of ``batch_numel`` elements of both copies, however large the tensors are.

    Args:
        replicas: what to compare.
        reader: reads both copies.
        full: compare every element; else samples from each file that a tensor lies in, except where
            ``names_it``.
        batch_numel: elements that are held at a time.
    """
    tallies = [_Tally(replica) for replica in replicas]
    spans = (
        (tally, part)
        for number, tally in enumerate(tallies)
        for span in _spans(tally.replica, number, len(replicas), full=full)
        for part in _parts(span, batch_numel)
    )
    for batch in _batches(spans, batch_numel):
        _compare(batch, reader)
    return tuple(tally.difference() for tally in tallies if tally.count)


def fingerprint(reader: Reads, source: ByteSource, stored: DType, seen_as: DType) -> bytes:
    """A digest of three short samples, as they are after a cast to ``seen_as``.

    Copies of one tensor have the same fingerprint; the reverse need not be so.
    """
    digest = blake2b(digest_size=16)
    numel = source.nbytes // stored.itemsize
    for start, stop in _samples(0, numel, _FINGERPRINT_NUMEL):
        elements = bytearray((stop - start) * stored.itemsize)
        reader.read_into(source, start * stored.itemsize, memoryview(elements))
        digest.update(_bits(elements, stored, seen_as).tobytes())
    return digest.digest()


class _Tally:
    """What has been seen of one tensor so far."""

    def __init__(self, replica: CastReplica) -> None:
        self.replica = replica
        self.first = -1
        self.count = 0
        self.compared = 0
        self.largest = 0

    def add(self, start: int, distances: npt.NDArray[np.int64]) -> None:
        """Take some elements into account: by how much each differs."""
        self.compared += distances.size
        if not distances.any():
            return
        if not self.count:
            self.first = start + int((distances != 0).argmax())
        self.count += int((distances != 0).sum())
        self.largest = max(self.largest, int(distances.max()))

    def difference(self) -> Difference:
        """The result, where something differs."""
        begin = self.first * self.replica.kept_dtype.itemsize
        extent = next(iter(self.replica.kept.extents(begin, begin + 1)))
        return Difference(
            self.replica, self.first, self.count, self.compared, self.largest, extent.path
        )


_Part: TypeAlias = tuple[_Tally, Span]


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
    for tally, (start, stop) in parts:
        if batch and (stop - start > room or _types(batch[0][0]) != _types(tally)):
            yield batch
            batch, room = [], numel
        batch.append((tally, (start, stop)))
        room -= stop - start
    if batch:
        yield batch


def _types(tally: _Tally) -> tuple[DType, DType]:
    return tally.replica.kept_dtype, tally.replica.other_dtype


def _compare(batch: Sequence[_Part], reader: Reads) -> None:
    """Read a batch, cast it, and add what is seen to the tallies."""
    kept_dtype, other_dtype = _types(batch[0][0])
    sizes = [stop - start for _, (start, stop) in batch]
    kept, other = (bytearray(sum(sizes) * d.itemsize) for d in (kept_dtype, other_dtype))
    at = 0
    for (tally, (start, _)), numel in zip(batch, sizes, strict=True):
        for source, dtype, buffer in (
            (tally.replica.kept, kept_dtype, kept),
            (tally.replica.other, other_dtype, other),
        ):
            part = memoryview(buffer)[at * dtype.itemsize : (at + numel) * dtype.itemsize]
            reader.read_into(source, start * dtype.itemsize, part)
        at += numel
    narrower = min(other_dtype, kept_dtype, key=lambda dtype: dtype.itemsize)
    one, two = _bits(kept, kept_dtype, narrower), _bits(other, other_dtype, narrower)
    distances = _distances(one, two, narrower)
    at = 0
    for (tally, (start, _)), numel in zip(batch, sizes, strict=True):
        tally.add(start, distances[at : at + numel])
        at += numel


def _distances(
    one: npt.NDArray[np.unsignedinteger[Any]],
    two: npt.NDArray[np.unsignedinteger[Any]],
    dtype: DType,
) -> npt.NDArray[np.int64]:
    """By how many representable numbers elements lie apart; 0 for equal bits alone."""
    import numpy as np  # noqa: PLC0415 - opening most checkpoints reads no values

    if np.array_equal(one, two):
        return np.zeros(one.size, np.int64)
    apart: npt.NDArray[np.int64] = np.abs(_ordinal(one, dtype) - _ordinal(two, dtype))
    apart[(apart == 0) & (one != two)] = 1  # zeros of both signs
    return apart


def _ordinal(bits: npt.NDArray[np.unsignedinteger[Any]], dtype: DType) -> npt.NDArray[np.int64]:
    """The number of a value in the order of its type; zeros of both signs have one number."""
    import numpy as np  # noqa: PLC0415 - opening most checkpoints reads no values

    magnitude: npt.NDArray[np.int64] = (bits & (_SIGN[dtype] - 1)).astype(np.int64)
    magnitude[(bits & _SIGN[dtype]) != 0] *= -1
    return magnitude


def _bits(
    elements: bytearray, stored: DType, seen_as: DType
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The bits of the elements after a cast, with one pattern for every NaN.

    A NaN's other bits differ between a cast on a GPU and one on a CPU.
    """
    import numpy as np  # noqa: PLC0415 - opening most checkpoints reads no values

    from zexport.ranges.casts import cast_into  # noqa: PLC0415

    result = elements
    if seen_as is not stored:
        result = bytearray(len(elements) // stored.itemsize * seen_as.itemsize)
        cast_into(memoryview(elements), stored, seen_as, memoryview(result))
    bits = np.frombuffer(result, np.dtype(f"u{seen_as.itemsize}"))
    infinity = _INFINITY[seen_as]
    bits[(bits & (_SIGN[seen_as] - 1)) > infinity] = infinity + 1
    return bits


_INFINITY = {
    DType.F64: 0x7FF << 52,
    DType.F32: 0xFF << 23,
    DType.BF16: 0xFF << 7,
    DType.F16: 0x1F << 10,
}
_SIGN = {dtype: 1 << (8 * dtype.itemsize - 1) for dtype in _INFINITY}
