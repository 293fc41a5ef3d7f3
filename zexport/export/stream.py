"""Produce files of tensors: read the sources, cast, write in place, digest.

Chunks start in file order, and several are read, cast and written at a time. What needs order
(digests, checksums, the bytes around tensors) is done by the calling thread as they complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import mmap
from queue import SimpleQueue

from blake3 import blake3
from isal import isal_zlib
from msgspec import Struct

from zexport.export.checked_reader import WeightReader
from zexport.export.plan import ExportPlan, FilePlan, TensorPlan
from zexport.ranges.ahead import announced
from zexport.ranges.cast import Statistics, cast_into, statistics_of
from zexport.ranges.coverage import Coverage
from zexport.ranges.digest import FileDigests
from zexport.ranges.source import ByteSource
from zexport.storage.storage import OutputFile

_ITEMSIZE_MAX = 8


class Piece(Struct, frozen=True):
    """Elements ``first`` to ``last`` (exclusive) of a tensor."""

    tensor: TensorPlan
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * self.tensor.dtype.itemsize

    @property
    def offset(self) -> int:
        return self.tensor.offset + self.first * self.tensor.dtype.itemsize

    @property
    def window(self) -> tuple[ByteSource, int, int]:
        size = self.tensor.stored_dtype.itemsize
        return self.tensor.source, self.first * size, self.last * size


class Chunk(Struct, frozen=True):
    """Consecutive pieces of a file that fit in one buffer."""

    file: FilePlan
    pieces: tuple[Piece, ...]
    is_last: bool

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def part(self, piece: Piece, buffer: memoryview) -> memoryview:
        start = piece.offset - self.pieces[0].offset
        return buffer[start : start + piece.nbytes]


def chunks(file: FilePlan, chunk_nbytes: int) -> Iterator[Chunk]:
    """Yield a file in full chunks, however small its tensors; at least one."""
    limit = max(chunk_nbytes, _ITEMSIZE_MAX)
    pieces: list[Piece] = []
    used = 0
    for tensor in file.tensors:
        each, first = max(tensor.dtype.itemsize, tensor.stored_dtype.itemsize), 0
        if pieces:
            used += tensor.offset - (pieces[-1].offset + pieces[-1].nbytes)
        while first < tensor.numel or first == 0:
            count = max(min((limit - used) // each, tensor.numel - first), 0)
            if count or not tensor.numel:
                pieces.append(Piece(tensor, first, first + count))
                used, first = used + count * each, first + count
            if first == tensor.numel:
                break
            if pieces:
                yield Chunk(file, tuple(pieces), is_last=False)
            pieces, used = [], 0
    yield Chunk(file, tuple(pieces), is_last=True)


class StreamedFile:
    """A file being written: its digests so far, and its frame, which is written in between."""

    def __init__(self, file: FilePlan, output: OutputFile, coverage: Coverage) -> None:
        self.file = file
        self.output = output
        self.coverage = coverage
        self.remarkable: dict[str, Statistics] = {}
        self._digests = bytearray()
        self._crc32s: list[int] = []
        self._frame = file.frame.pieces(iter(self._crc32s))
        self._frame_digest = blake3()
        self._crc32 = 0
        self._tensor, self._tensor_crc32, self._seen = blake3(), 0, Statistics()
        self._write_frame()

    def _write_frame(self) -> None:
        """Write the bytes before the next tensor, or after the last."""
        if (run := next(self._frame, None)) is not None:
            offset, data = run
            self.output.write(data, offset)
            self._frame_digest.update(data)
            self._crc32 = isal_zlib.crc32(data, self._crc32)

    def take(self, piece: Piece, data: memoryview, seen: Statistics) -> None:
        """Digest the next piece, which was written."""
        if piece.first == 0:
            self._tensor, self._tensor_crc32, self._seen = blake3(), 0, seen
        else:
            self._seen += seen
        self._tensor.update(data)
        self._tensor_crc32 = isal_zlib.crc32(data, self._tensor_crc32)
        if piece.last == piece.tensor.numel:
            self._digests += self._tensor.digest()
            self._crc32s.append(self._tensor_crc32)
            nbytes = piece.tensor.nbytes
            self._crc32 = isal_zlib.crc32_combine(self._crc32, self._tensor_crc32, nbytes)
            if self._seen.is_remarkable:
                self.remarkable[piece.tensor.name] = self._seen
            self._write_frame()

    def digests(self) -> FileDigests:
        tensors = bytes(self._digests)
        whole = self._frame_digest.copy().update(tensors).hexdigest()
        return FileDigests(tensors, whole, self._crc32)


def stream(
    plan: ExportPlan,
    files: Iterable[FilePlan],
    sources: WeightReader,
    opened: Callable[[FilePlan], OutputFile],
    on_chunk: Callable[[StreamedFile, int], None],
) -> Generator[StreamedFile, None, None]:
    """Yield each file, in order, once all its bytes are written to its output.

    Args:
        plan: number of threads and bytes per chunk.
        files: the files of the plan to write.
        sources: where they are read from.
        opened: opens the output of a file.
        on_chunk: called after each chunk with its file and nbytes.
    """
    every: Iterable[Chunk] = (c for file in files for c in chunks(file, plan.chunk_nbytes))
    if sources.are_far:
        windows = lambda chunk: (piece.window for piece in chunk.pieces)  # noqa: E731
        every = announced(every, lambda chunk: chunk.nbytes, windows, sources.expect)
    room = max(plan.chunk_nbytes, _ITEMSIZE_MAX)
    free = [memoryview(mmap(-1, room)) for _ in range(2 * plan.jobs + 1)]
    scratch: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(plan.jobs):
        scratch.put(memoryview(mmap(-1, room)))
    moving: deque[tuple[StreamedFile, Chunk, memoryview, Future[list[Statistics]]]] = deque()

    def move(one: StreamedFile, chunk: Chunk, buffer: memoryview) -> list[Statistics]:
        stored = scratch.get()
        try:
            seen = [_convert(p, chunk, stored, buffer, sources, one.coverage) for p in chunk.pieces]
        finally:
            scratch.put(stored)
        for piece in chunk.pieces:
            one.output.write(chunk.part(piece, buffer), piece.offset)
        return seen

    def land() -> StreamedFile | None:
        one, chunk, buffer, future = moving.popleft()
        for piece, seen in zip(chunk.pieces, future.result(), strict=True):
            one.take(piece, chunk.part(piece, buffer), seen)
        free.append(buffer)
        on_chunk(one, chunk.nbytes)
        return one if chunk.is_last else None

    workers = ThreadPoolExecutor(plan.jobs)
    try:
        current: StreamedFile | None = None
        for chunk in every:
            if not free and (ended := land()) is not None:
                yield ended
            if current is None:
                current = StreamedFile(chunk.file, opened(chunk.file), sources.new_coverage())
            buffer = free.pop()
            moving.append((current, chunk, buffer, workers.submit(move, current, chunk, buffer)))
            current = None if chunk.is_last else current
        while moving:
            if (ended := land()) is not None:
                yield ended
    finally:
        workers.shutdown(cancel_futures=True)


def _convert(
    piece: Piece,
    chunk: Chunk,
    scratch: memoryview,
    buffer: memoryview,
    sources: WeightReader,
    coverage: Coverage,
) -> Statistics:
    """Put a piece, cast, into the chunk's buffer; return statistics of its values."""
    tensor, out = piece.tensor, chunk.part(piece, buffer)
    size = tensor.stored_dtype.itemsize
    is_cast = tensor.dtype is not tensor.stored_dtype
    stored = scratch[: (piece.last - piece.first) * size] if is_cast else out
    sources.read_tensor(tensor, piece.first * size, stored, coverage)
    cast_into(stored, tensor.stored_dtype, tensor.dtype, out)
    return statistics_of(stored, tensor.stored_dtype, tensor.dtype, out)
