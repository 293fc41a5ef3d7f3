"""Joining: many small reads of objects become few large ones, several at a time, ahead of use.

Stores answer after tens of milliseconds, however little is asked for. What will be read is
announced; it is fetched once, in blocks, while what goes before it is still being used, and a block
is dropped when all that was announced of it was used. A block that waits for room takes in what is
announced beside it later on. Anything else is fetched as it is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

BLOCK_NBYTES = 8 << 20
"""Large enough that the wait for the first byte does not count."""

_GAP_NBYTES = 64 << 10
"""Unused bytes between two ranges that are read sooner than asked for apart."""
_BLOCK_NBYTES_MAX = BLOCK_NBYTES * 3 // 2
_HELD_NBYTES_MAX = 64 << 20
"""Bytes that are there or on their way, of all objects together."""
_APART_NBYTES_MAX = _HELD_NBYTES_MAX // 2
"""Bytes announced between two that are joined: no block is held much longer than it is used."""
_REQUESTS = 32
"""As many as small blocks need; of large ones fewer fit."""

Fetch = Callable[[int, int], memoryview]


def joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Ranges (start, stop) as blocks (start, stop, bytes wanted), by place.

    Those close to each other are joined, up to a block and half of one; longer ones are cut.
    """
    start = stop = wanted = 0
    for begin, end in sorted(ranges):
        if wanted and (begin - stop > _GAP_NBYTES or end - start > _BLOCK_NBYTES_MAX):
            yield start, stop, wanted
            wanted = 0
        if not wanted:
            start = stop = begin
        while end - start > _BLOCK_NBYTES_MAX:  # of what begins here: nothing is joined
            yield start, start + BLOCK_NBYTES, BLOCK_NBYTES
            start = stop = start + BLOCK_NBYTES
        wanted += max(end - max(begin, stop), 0)
        stop = max(stop, end)
    if wanted:
        yield start, stop, wanted


class _Block:
    """Bytes ``start`` to ``stop`` of an object: announced, on their way, or there.

    ``since`` is how much had been announced of all objects before it.
    """

    def __init__(self, owner: Blocks, start: int, stop: int, wanted: int, since: int) -> None:
        self.owner = owner
        self.start = start
        self.stop = stop
        self.wanted = wanted
        self.since = since
        self.is_open = True
        self.future: Future[memoryview] | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def takes(self, start: int, stop: int, now: int) -> bool:
        """Whether a range lies in it, or beside it and may be fetched with it."""
        if self.start <= start and stop <= self.stop:
            return True
        return (
            self.future is None
            and now - self.since <= _APART_NBYTES_MAX
            and start - self.stop <= _GAP_NBYTES
            and self.start - stop <= _GAP_NBYTES
            and max(stop, self.stop) - min(start, self.start) <= _BLOCK_NBYTES_MAX
        )

    def take(self, start: int, stop: int, wanted: int) -> None:
        """Have the range in it."""
        self.start, self.stop = min(self.start, start), max(self.stop, stop)
        self.wanted += wanted


class _Queue:
    """All blocks: those under way in the order they were begun, and those that wait for room."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.announced = 0
        self._is_open = True
        self._nbytes = 0
        self._begun: dict[_Block, None] = {}
        self._waiting: deque[_Block] = deque()

    def announce(self, blocks: Iterable[_Block]) -> None:
        self._waiting.extend(blocks)
        self._fill()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """A block in which nothing is begun that is not needed."""
        with self.lock:
            self._is_open = False
        try:
            yield
        finally:
            with self.lock:
                self._is_open = True
                self._fill()

    def need(self, block: _Block) -> Future[memoryview]:
        """The block's bytes, whether there is room or not; the oldest that is there makes room."""
        if block.future is None:
            spare = [one for one in self._begun if one.future is not None and one.future.done()]
            for old in spare:
                if self._nbytes + block.nbytes <= _HELD_NBYTES_MAX:
                    break
                self.drop(old)
            self._begin(block)
        assert block.future is not None  # noqa: S101 - begun just now, or before
        return block.future

    def drop(self, block: _Block) -> None:
        """Let a block go, whatever it is; what was announced after it may begin."""
        block.is_open = False
        block.owner.forget(block)
        if block in self._begun:
            del self._begun[block]
            self._nbytes -= block.nbytes
            self._fill()

    def _fill(self) -> None:
        while self._waiting and self._is_open:
            block = self._waiting[0]
            is_open = block.is_open and block.future is None
            if is_open and self._nbytes + block.nbytes > _HELD_NBYTES_MAX:
                return
            self._waiting.popleft()
            if is_open:
                self._begin(block)

    def _begin(self, block: _Block) -> None:
        self._nbytes += block.nbytes
        self._begun[block] = None
        block.future = _fetchers().submit(block.owner.fetch, block.start, block.stop)


_queue = _Queue()


def announcing() -> AbstractContextManager[None]:
    """A block in which ranges of objects are announced in the order in which they are read.

    What lies side by side is joined, however far apart in that order it is announced.
    """
    return _queue.closed()


@cache
def _fetchers() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes long, and disks need none

    return ThreadPoolExecutor(_REQUESTS, thread_name_prefix="zexport-fetch")


class Blocks:
    """One object, read from any number of threads; ``fetch`` gives bytes from one place to another.

    A fetch that fails is told to whoever reads these bytes.
    """

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self._blocks: list[_Block] = []

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say that ranges (start, stop) will be read, each once."""
        with _queue.lock:
            _queue.announce([new for one in joined(ranges) if (new := self._taken_in(*one))])

    def _taken_in(self, start: int, stop: int, wanted: int) -> _Block | None:
        """A new block, unless one that is beside it takes the range in."""
        now, at = _queue.announced, self._place_of(start)
        _queue.announced += wanted
        for one in self._blocks[max(at - 1, 0) : at + 1]:
            if one.takes(start, stop, now):
                one.take(start, stop, wanted)
                return None
        block = _Block(self, start, stop, wanted, now)
        self._blocks.insert(at, block)
        return block

    def _place_of(self, offset: int) -> int:
        """How many blocks begin there or before."""
        return bisect_right(self._blocks, offset, key=lambda one: one.start)

    def forget(self, block: _Block) -> None:
        """Have a block no longer."""
        if block in self._blocks:
            self._blocks.remove(block)

    def read(self, offset: int, part: memoryview) -> int:
        """How many bytes from ``offset`` on were put into ``part``; 0 only at the end."""
        with _queue.lock:
            at = self._place_of(offset)
            block = next((one for one in self._blocks[at - 1 : at] if offset < one.stop), None)
            future = None if block is None else _queue.need(block)
        if block is None or future is None:
            data = self.fetch(offset, offset + part.nbytes)
        else:
            data = future.result()[offset - block.start :][: part.nbytes]
        part[: data.nbytes] = data
        if block is not None:
            with _queue.lock:
                block.wanted -= data.nbytes
                if block.wanted <= 0:
                    _queue.drop(block)
        return data.nbytes

    def close(self) -> None:
        """Let everything go; what is on its way is not waited for."""
        with _queue.lock:
            blocks, self._blocks = self._blocks, []
            for block in blocks:  # none of them is begun any more
                block.is_open = False
            for block in blocks:
                if block.future is not None:
                    block.future.cancel()
                _queue.drop(block)
