"""Moving a plan's bytes: read, cast, looked at, digested and written, in small buffers."""

from __future__ import annotations

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

from zexport.plan.plan import ExportPlan, FilePlan
from zexport.ranges.casts import Statistics
from zexport.ranges.digests import digest_shard
from zexport.run.chunks import Chunk, Piece, chunks
from zexport.run.convert import Buffers, TensorReader, convert
from zexport.run.results import ShardResult, TensorResult
from zexport.store.disk import OutputFile

_FLUSH_NBYTES = 32 << 20
"""Bytes between two requests to put them on the disk: few enough that the last is short."""


def write_shards(
    plan: ExportPlan,
    folder: Path,
    reader: TensorReader,
    *,
    on_bytes: Callable[[int], None],
    on_shard: Callable[[ShardResult], None],
    on_disk: Callable[[ShardResult], None],
) -> None:
    """Write every shard of a plan into ``folder``; on return, all of it is on the disk.

    Strategy: ``plan.jobs`` workers each hold one chunk; chunks begin in file order and are digested
    in file order (each waits for the one before), but are read, cast and written whenever they are
    ready. One more thread asks the disk to take what was written, all the while.

    Args:
        plan: what to write.
        folder: holds every shard's file, with its room taken (``reserve_shards``).
        reader: where the stored bytes come from.
        on_bytes: told of bytes written, in the calling thread.
        on_shard: told of each shard when all of it is written, if not yet on the disk; in the
            calling thread.
        on_disk: told of each shard when all of it is on the disk; in another thread.

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
                result = job.writer.result()
                flusher.finish(job.writer, lambda: on_disk(result))
                on_shard(result)
            else:
                flusher.written(job.writer, job.chunk.nbytes)

        for writer, chunk, is_last, turn in _schedule(plan, folder, reader, files):
            if len(in_flight) == 2 * plan.jobs:
                land()
            future = workers.submit(writer.move, chunk, turn, buffers)
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


def reserve_shards(plan: ExportPlan, folder: Path) -> None:
    """Make every shard's file and take its room: a full disk shows here, before any byte is read.

    Raises:
        OutputError: a file cannot be made, or has no room.
    """
    for shard in plan.shards:
        with OutputFile(folder / shard.filename, is_new=True) as file:
            file.reserve(shard.nbytes)


def _schedule(
    plan: ExportPlan, folder: Path, reader: TensorReader, files: ExitStack
) -> Iterator[tuple[_ShardWriter, Chunk, bool, _Turn]]:
    """Every chunk of every shard in order: its writer, whether it is the shard's last, its turn."""
    for shard in plan.shards:
        writer = _ShardWriter(folder / shard.filename, shard, reader)
        files.callback(writer.close)
        writer.begin()
        turn = _Turn()
        for chunk in chunks(shard, plan.chunk_nbytes):
            is_last = chunk.offset + chunk.nbytes == writer.nbytes
            yield writer, chunk, is_last, turn
            turn = _Turn(turn)


class _ShardWriter:
    """One shard on its way to the disk."""

    def __init__(self, path: Path, shard: FilePlan, reader: TensorReader) -> None:
        self._shard = shard
        self._reader = reader
        self.nbytes = shard.nbytes  # a sum over all tensors, made once
        self._tensors: dict[str, TensorResult] = {}
        self._split_digest = blake3()
        self._split_statistics = Statistics()
        self._ledger = reader.new_ledger()
        self._file = OutputFile(path, is_new=False)

    def begin(self) -> None:
        """Write the file's header."""
        self._file.write(self._shard.head, 0)

    def move(self, chunk: Chunk, turn: _Turn, pool: SimpleQueue[Buffers]) -> None:
        """Everything that happens to one chunk."""
        with turn:
            buffers = pool.get()
            try:
                seen = self._convert(chunk, buffers)
                self._file.write(buffers.out[: chunk.nbytes], chunk.offset)
                turn.wait()
                self._take_split(seen)
            finally:
                pool.put(buffers)

    def _convert(
        self, chunk: Chunk, buffers: Buffers
    ) -> list[tuple[Piece, memoryview, Statistics]]:
        """Fill the chunk; whole tensors are done with, the pieces of others are returned."""
        position = 0
        split = []
        for piece in chunk.pieces:
            out = buffers.out[position : position + piece.nbytes]
            statistics = convert(piece, self._reader, buffers.stored, out, self._ledger)
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

    def result(self) -> ShardResult:
        digests = (self._tensors[tensor.name].blake3 for tensor in self._shard.tensors)
        return ShardResult(
            self._shard.filename,
            self.nbytes,
            digest_shard(self._shard.head, digests),
            self._tensors,
            self._ledger.ranges(),
        )

    def flush(self) -> None:
        """Put what is written on the disk."""
        self._file.sync()

    def finish(self, then: Callable[[], None]) -> None:
        """Put all of it on the disk, close it, and do ``then``."""
        self.flush()
        self.close()
        then()

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._file.close()


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

    def finish(self, writer: _ShardWriter, then: Callable[[], None]) -> None:
        """Have a whole shard put on the disk and closed, and ``then`` done.

        A flush before it that failed counts: a disk tells of lost bytes once.
        """
        before = self._running

        def finish() -> None:
            if before is not None:
                before.result()  # is done: there is one thread
            writer.finish(then)

        self._finishing.append(self._executor.submit(finish))

    def wait(self) -> None:
        """Return when everything is on the disk."""
        for future in self._finishing:
            future.result()
