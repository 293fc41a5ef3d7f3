"""Moving a plan's bytes: read, cast, looked at, digested and written, in small buffers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import TracebackType

from blake3 import blake3

from zexport.export.chunks import Chunk, Piece, chunks
from zexport.export.commit import writing
from zexport.export.convert import Buffers, TensorReader, convert
from zexport.export.plan import ExportPlan, ShardPlan
from zexport.streams.casts import Statistics
from zexport.streams.digests import digest_shard

_FLUSH_NBYTES = 32 << 20
"""Bytes between two requests to put them on the disk: few enough that the last is short."""


@dataclass(frozen=True, slots=True)
class TensorResult:
    """What was written of one tensor."""

    blake3: str
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What was written of one shard."""

    filename: str
    nbytes: int
    blake3: str
    tensors: dict[str, TensorResult]


def write_shards(
    plan: ExportPlan,
    folder: Path,
    reader: TensorReader,
    *,
    on_bytes: Callable[[int], None],
    on_shard: Callable[[ShardResult], None],
) -> None:
    """Write every shard of a plan into ``folder``; on return, all of it is on the disk.

    Strategy: ``plan.jobs`` workers each hold one chunk; chunks begin in file order and are digested
        in
    file order (each waits for the one before), but are read, cast and written whenever they are
    ready. One more thread asks the disk to take what was written, all the while.

    Args:
        plan: what to write.
        folder: an empty folder.
        reader: where the stored bytes come from.
        on_bytes: told of bytes written, in the calling thread.
        on_shard: told of each shard when all of it is written, if not yet on the disk; in the
            calling thread.

    Raises:
        OutputError: a file cannot be written.
        ZexportError: whatever ``reader`` raises.
    """
    with ExitStack() as stack:
        files = stack.enter_context(ExitStack())  # closed last, when no thread uses them any more
        flusher = _Flusher(stack.enter_context(ThreadPoolExecutor(1)))
        workers = ThreadPoolExecutor(plan.jobs)
        stack.callback(workers.shutdown, cancel_futures=True)
        buffers: SimpleQueue[Buffers] = SimpleQueue()
        for _ in range(plan.jobs):
            buffers.put(Buffers(plan.chunk_nbytes))
        in_flight: deque[_Job] = deque()

        def land() -> None:
            job = in_flight.popleft()
            job.future.result()
            on_bytes(job.chunk.nbytes)
            if job.is_last:
                flusher.finish(job.writer)
                on_shard(job.writer.result())
            else:
                flusher.written(job.writer, job.chunk.nbytes)

        for writer, chunk, is_last, turn in _schedule(plan, folder, files):
            if len(in_flight) == 2 * plan.jobs:
                land()
            future = workers.submit(writer.move, chunk, turn, reader, buffers)
            in_flight.append(_Job(future, writer, chunk, is_last))
        while in_flight:
            land()
        flusher.wait()


class _Turn:
    """One chunk's place in a row: it may go when the one before it has gone, failed or not."""

    def __init__(self, before: _Turn | None = None) -> None:
        self._gone = Event()
        self._before = before._gone if before is not None else None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.wait()
        self._gone.set()

    def wait(self) -> None:
        if self._before is not None:
            self._before.wait()


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[None]
    writer: _ShardWriter
    chunk: Chunk
    is_last: bool


def _schedule(
    plan: ExportPlan, folder: Path, files: ExitStack
) -> Iterator[tuple[_ShardWriter, Chunk, bool, _Turn]]:
    """Every chunk of every shard in order: its writer, whether it is the shard's last, its turn."""
    for shard in plan.shards:
        writer = _ShardWriter(folder / shard.filename, shard)
        files.callback(writer.close)
        writer.begin()
        turn = _Turn()
        for chunk in chunks(shard, plan.chunk_nbytes):
            is_last = chunk.offset + chunk.nbytes == writer.nbytes
            yield writer, chunk, is_last, turn
            turn = _Turn(turn)


class _ShardWriter:
    """One shard on its way to the disk."""

    def __init__(self, path: Path, shard: ShardPlan) -> None:
        self._path = path
        self._shard = shard
        self.nbytes = shard.nbytes  # a sum over all tensors, made once
        self._tensors: dict[str, TensorResult] = {}
        self._split_digest = blake3()
        self._split_statistics = Statistics()
        with writing(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o666)
        self._is_open = True

    def begin(self) -> None:
        """Take the file's room on the disk, and write its header."""
        with writing(self._path):
            _reserve(self._descriptor, self.nbytes)
        self._write(self._shard.header, 0)

    def move(
        self, chunk: Chunk, turn: _Turn, reader: TensorReader, pool: SimpleQueue[Buffers]
    ) -> None:
        """Everything that happens to one chunk."""
        with turn:
            buffers = pool.get()
            try:
                seen = self._convert(chunk, reader, buffers)
                self._write(buffers.out[: chunk.nbytes], chunk.offset)
                turn.wait()
                self._take_split(seen)
            finally:
                pool.put(buffers)

    def _convert(
        self, chunk: Chunk, reader: TensorReader, buffers: Buffers
    ) -> list[tuple[Piece, memoryview, Statistics]]:
        """Fill the chunk; whole tensors are done with, the pieces of others are returned."""
        position = 0
        split = []
        for piece in chunk.pieces:
            out = buffers.out[position : position + piece.nbytes]
            statistics = convert(piece, reader, buffers.stored, out)
            if piece.is_whole:
                result = TensorResult(blake3(out).hexdigest(), statistics)
                self._tensors[piece.tensor.name] = result
            else:
                split.append((piece, out, statistics))
            position += piece.nbytes
        return split

    def _take_split(self, split: list[tuple[Piece, memoryview, Statistics]]) -> None:
        """Add pieces to the digest of the tensor that goes on from chunk to chunk."""
        for piece, out, statistics in split:
            if piece.first == 0:
                self._split_digest = blake3()
                self._split_statistics = Statistics()
            self._split_digest.update(out)
            self._split_statistics += statistics
            if piece.last == piece.tensor.numel:
                self._tensors[piece.tensor.name] = TensorResult(
                    self._split_digest.hexdigest(), self._split_statistics
                )

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view.nbytes:
            with writing(self._path):
                count = os.pwrite(self._descriptor, view, offset)
            view = view[count:]
            offset += count

    def result(self) -> ShardResult:
        digests = (self._tensors[tensor.name].blake3 for tensor in self._shard.tensors)
        return ShardResult(
            self._shard.filename,
            self.nbytes,
            digest_shard(self._shard.header, digests),
            self._tensors,
        )

    def flush(self) -> None:
        """Put what is written on the disk."""
        if self._is_open:
            with writing(self._path):
                _flush(self._descriptor)

    def finish(self) -> None:
        """Put all of it on the disk, and close it."""
        self.flush()
        self.close()

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give a file its size, and where the file system can, its room on the disk."""
    if hasattr(os, "posix_fallocate") and nbytes:
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


_flush = getattr(os, "fdatasync", os.fsync)


class _Flusher:
    """The thread that waits for the disk, so that no other has to."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._running: Future[None] | None = None
        self._finishing: list[Future[None]] = []
        self._unflushed = 0

    def written(self, writer: _ShardWriter, nbytes: int) -> None:
        """Note bytes written; once they are many and the disk is idle, have them put there."""
        self._unflushed += nbytes
        if self._unflushed < _FLUSH_NBYTES or not (self._running is None or self._running.done()):
            return
        if self._running is not None:
            self._running.result()
        self._unflushed = 0
        self._running = self._executor.submit(writer.flush)

    def finish(self, writer: _ShardWriter) -> None:
        """Have a whole shard put on the disk and closed."""
        self._finishing.append(self._executor.submit(writer.finish))

    def wait(self) -> None:
        """Return when everything is on the disk."""
        for future in self._finishing:
            future.result()
