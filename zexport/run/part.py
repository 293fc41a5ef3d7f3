"""A part of an export: stretches of its files, written and proved, each with a receipt.

It works from the plan and the folder that was begun alone, so parts may run one after another, or
side by side.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Event, Lock
from typing import TypeAlias

from blake3 import blake3
from isal import isal_zlib
from msgspec.structs import replace

from zexport.export.plan import FilePlan
from zexport.ranges.ahead import announced
from zexport.ranges.casts import Statistics
from zexport.run.begin import Workplace
from zexport.run.pieces import Buffers, Chunk, Piece, TensorReader, chunks, convert
from zexport.run.receipts import DIGEST_NBYTES, Receipt
from zexport.run.shares import Stretch
from zexport.store.files import OutputFile, open_output, writing

_FLUSH_NBYTES = 32 << 20
"""Bytes between two requests to put them on the disk: few enough that the last is short."""


def write_part(work: Workplace, stretches: Sequence[Stretch], reader: TensorReader) -> None:
    """Write some of a plan: on return each is on the disk, read again, and has a receipt."""
    work.receipts.need_begun()
    notes: list[Future[None]] = []
    # The clerk stops before the checks do: what is finished when the rest fails is noted.
    with work.checks() as checks, ThreadPoolExecutor(1) as clerk:

        def on_written(stretch: Stretch, receipt: Receipt) -> Callable[[], None]:
            proofs = checks.add(stretch, receipt)

            def note() -> None:
                for proof in proofs:
                    proof.result()
                work.receipts.add(stretch, receipt)

            return lambda: notes.append(clerk.submit(note))

        _write_stretches(work, stretches, reader, on_written)
        checks.wait()
        for noted in notes:
            noted.result()


def _write_stretches(
    work: Workplace,
    stretches: Sequence[Stretch],
    reader: TensorReader,
    on_written: Callable[[Stretch, Receipt], Callable[[], None]],
) -> None:
    """Write into files that are there with their room taken; on return all is on the disk.

    The workers each hold one chunk. Chunks begin and are digested in file order, but are read, cast
    and written whenever they are ready. ``on_written`` says what to do once a file is on the disk.
    """
    jobs, chunk_nbytes = work.plan.jobs, work.plan.chunk_nbytes
    with ExitStack() as stack:
        closing = stack.enter_context(ExitStack())  # done last, when no thread uses them any more
        flusher = _Flusher(stack.enter_context(ThreadPoolExecutor(1)))
        workers = ThreadPoolExecutor(jobs)
        stack.callback(workers.shutdown, cancel_futures=True)
        buffers: SimpleQueue[Buffers] = SimpleQueue()
        for _ in range(jobs):
            buffers.put(Buffers(chunk_nbytes))
        in_flight: deque[tuple[Future[None], _StretchWriter, Chunk]] = deque()

        def land() -> None:
            future, writer, chunk = in_flight.popleft()
            future.result()
            work.meter.written(chunk.nbytes)
            if chunk.is_last:
                flusher.finish(writer, on_written(writer.stretch, writer.complete()))
            else:
                flusher.written(writer, chunk.nbytes)

        for writer, chunk, turn in _schedule(work, stretches, reader, closing):
            if len(in_flight) == 2 * jobs:
                land()
            future = workers.submit(writer.move, chunk, turn, buffers)
            in_flight.append((future, writer, chunk))
            del writer  # what it holds goes with its last chunk
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

    def __exit__(self, *_: object) -> None:
        self.wait()
        self._gone.set()

    def wait(self) -> None:
        if self._before is not None:
            self._before.wait()


_Split: TypeAlias = tuple[int, Piece, memoryview, Statistics]
"""A piece of the tensor of an index, its bytes as written, and what was seen of its values."""


def _schedule(
    work: Workplace, stretches: Sequence[Stretch], reader: TensorReader, closing: ExitStack
) -> Iterator[tuple[_StretchWriter, Chunk, _Turn]]:
    """Every chunk in order, with its turn, and its stretch's writer, made for the first of them."""
    writer, turn = None, _Turn()
    for stretch, chunk in _announced(work, stretches, reader):
        if writer is None:
            path = work.folder / stretch.file.filename
            output = open_output(path, is_new=False, nbytes=stretch.file.nbytes)
            closing.callback(output.close)
            writer, turn = _StretchWriter(output, stretch, reader), _Turn()
        yield writer, chunk, turn
        writer, turn = (None, turn) if chunk.is_last else (writer, _Turn(turn))


def _announced(
    work: Workplace, stretches: Sequence[Stretch], reader: TensorReader
) -> Iterator[tuple[Stretch, Chunk]]:
    """The chunks of all stretches in order; the reader is told of them before."""
    every = (
        (stretch, chunk)
        for stretch in stretches
        for chunk in chunks(stretch.tensors, work.plan.chunk_nbytes)
    )
    return announced(every, lambda one: one[1].nbytes, lambda one: one[1].pieces, reader.expect)


class _Passed:
    """What is made of a tensor's bytes as they pass, in order."""

    def __init__(self, *, with_crc32: bool) -> None:
        self._with_crc32 = with_crc32
        self._digest = blake3()
        self.crc32 = 0
        self.seen = Statistics()

    def add(self, data: memoryview, seen: Statistics) -> _Passed:
        """Take in the next bytes, and what was seen of their values."""
        self._digest.update(data)
        if self._with_crc32:
            self.crc32 = isal_zlib.crc32(data, self.crc32)
        self.seen += seen
        return self

    def digest(self) -> bytes:
        """BLAKE3 of the bytes so far."""
        return self._digest.digest()


class FrameWriter:
    """A file's frame on its way; what stands before a tensor is there when those before it are.

    So a file can be sent from its first byte to its last, though some of its bytes follow from the
    tensors'. May be told from any thread.
    """

    def __init__(self, output: OutputFile, file: FilePlan) -> None:
        self._output = output
        self._crc32s = array("Q", bytes(8 * len(file.tensors)))
        self._is_known = bytearray(len(file.tensors))
        self._pieces = file.frame.pieces(iter(self._crc32s))
        self._digest = blake3()
        self._passed = 0
        self._lock = Lock()
        self._write_next()

    def passed(self, index: int, crc32: int) -> None:
        """All bytes of the file's tensor of this index are known."""
        with self._lock:
            self._crc32s[index], self._is_known[index] = crc32, True
            while self._is_known.startswith(b"\1", self._passed):
                self._passed += 1
                self._write_next()

    def _write_next(self) -> None:
        if (piece := next(self._pieces, None)) is not None:
            offset, data = piece
            self._output.write(data, offset)
            self._digest.update(data)

    def file_digest(self, digests: bytes) -> str:
        """BLAKE3 of the frame, now that it is whole, and of its tensors' digests, end to end."""
        if self._passed != len(self._crc32s):
            raise AssertionError(f"{self._output.path}: its frame is not whole")
        return self._digest.update(digests).hexdigest()


class _StretchWriter:
    """One stretch of a file on its way to the disk."""

    def __init__(self, output: OutputFile, stretch: Stretch, reader: TensorReader) -> None:
        self.stretch = stretch
        self._output = output
        self._reader = reader
        self._edges = stretch.edges
        self._digests = bytearray(DIGEST_NBYTES * len(stretch.tensors))
        self._crc32s = array("Q", bytes(8 * len(stretch.tensors)))
        self._remarkable: dict[str, Statistics] = {}
        self._lock = Lock()
        self._split = self._passed()
        self._ledger = reader.new_ledger()
        self._frame = FrameWriter(self._output, stretch.file) if stretch.is_whole else None

    def _passed(self) -> _Passed:
        return _Passed(with_crc32=self.stretch.file.frame.has_crc32)

    def move(self, chunk: Chunk, turn: _Turn, pool: SimpleQueue[Buffers]) -> None:
        """Everything that happens to one chunk."""
        with turn:
            buffers = pool.get()
            try:
                seen = self._convert(chunk, buffers)
                for start, stop in chunk.runs():
                    run = buffers.out[start - chunk.offset : stop - chunk.offset]
                    self._output.write(run, start)
                turn.wait()
                self._take_split(seen)
            finally:
                pool.put(buffers)

    def _convert(self, chunk: Chunk, buffers: Buffers) -> list[_Split]:
        """Fill the chunk; whole tensors are done with, the pieces of others are returned."""
        begin = chunk.offset
        split = []
        for index, piece in enumerate(chunk.pieces, chunk.index):
            position = piece.offset - begin
            out = buffers.out[position : position + piece.nbytes]
            statistics = convert(piece, self._reader, buffers.stored, out, self._ledger)
            if piece.is_whole:
                self._note(index, self._passed().add(out, statistics))
            else:
                split.append((index, piece, out, statistics))
        return split

    def _take_split(self, split: list[_Split]) -> None:
        """Add pieces to what is made of the tensor that goes on from chunk to chunk."""
        for index, piece, out, statistics in split:
            if piece.first == 0:
                self._split = self._passed()
            self._split.add(out, statistics)
            if piece.last == piece.tensor.numel:
                self._note(index, self._split)

    def _note(self, index: int, passed: _Passed) -> None:
        at, name = DIGEST_NBYTES * index, self.stretch.tensors[index].name
        self._digests[at : at + DIGEST_NBYTES] = passed.digest()
        self._crc32s[index] = passed.crc32
        if passed.seen.is_remarkable or name in self._edges:
            with self._lock:
                before = self._remarkable.get(name, Statistics())
                self._remarkable[name] = before + passed.seen
        if self._frame is not None:
            self._frame.passed(index, passed.crc32)

    def complete(self) -> Receipt:
        """What was written; a whole file is complete with it."""
        crc32s, ranges = tuple(self._crc32s), self._ledger.ranges()
        receipt = Receipt(bytes(self._digests), crc32s, self._remarkable, ranges)
        if self._frame is None:
            return receipt
        with writing(self._output.path):
            self._output.complete()
        return replace(receipt, blake3=self._frame.file_digest(receipt.digests))

    def flush(self) -> None:
        """Put what is written on the disk."""
        self._output.sync()

    def finish(self, then: Callable[[], None]) -> None:
        """Put all of it on the disk, close it, and do ``then``."""
        self.flush()
        self._output.close()
        then()


class _Flusher:
    """The thread that waits for the disk, so that no other has to."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._running: Future[None] | None = None
        self._finishing: list[Future[None]] = []
        self._unflushed = 0

    def written(self, writer: _StretchWriter, nbytes: int) -> None:
        """Note bytes written; once they are many and the disk is idle, have them put there."""
        self._unflushed += nbytes
        if self._unflushed < _FLUSH_NBYTES or not (self._running is None or self._running.done()):
            return
        if self._running is not None:
            self._running.result()
        self._unflushed = 0
        self._running = self._executor.submit(writer.flush)

    def finish(self, writer: _StretchWriter, then: Callable[[], None]) -> None:
        """Have a whole file put on the disk and closed, and ``then`` done.

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
