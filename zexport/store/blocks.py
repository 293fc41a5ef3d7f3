"""Joining: many small reads of objects become few large ones, several at a time, ahead of use.

Stores answer after tens of milliseconds, however little is asked for. What will be read is
announced; it is fetched once, in blocks, while what goes before it is still being used, and a block
is dropped when all that was announced of it was used. Anything else is fetched as it is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

BLOCK_NBYTES = 8 << 20
"""Large enough that the wait for the first byte does not count."""

_GAP_NBYTES = 64 << 10
"""Unused bytes between two ranges that are read sooner than asked for apart."""
_HELD_NBYTES_MAX = 64 << 20
"""Bytes that are there or on their way, of all objects together."""
_REQUESTS = 12

Fetch = Callable[[int, int], memoryview]


def joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Ranges (start, stop) as blocks (start, stop, bytes wanted), by place.

    Those close to each other are joined, up to a block and half of one; longer ones are cut.
    """
    start = stop = wanted = 0
    for begin, end in sorted(ranges):
        if wanted and (begin - stop > _GAP_NBYTES or end - start > BLOCK_NBYTES * 3 // 2):
            yield start, stop, wanted
            wanted = 0
        if not wanted:
            start = stop = begin
        while end - start > BLOCK_NBYTES * 3 // 2:  # of what begins here: nothing is joined
            yield start, start + BLOCK_NBYTES, BLOCK_NBYTES
            start = stop = start + BLOCK_NBYTES
        wanted += max(end - max(begin, stop), 0)
        stop = max(stop, end)
    if wanted:
        yield start, stop, wanted


class _Block:
    """Bytes ``start`` to ``stop`` of an object: announced, on their way, or there."""

    def __init__(self, owner: Blocks, start: int, stop: int, wanted: int) -> None:
        self.owner = owner
        self.start = start
        self.stop = stop
        self.wanted = wanted
        self.future: Future[memoryview] | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class _Queue:
    """All blocks: those under way in the order they were begun, and those that wait for room."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._nbytes = 0
        self._begun: dict[_Block, None] = {}
        self._waiting: deque[_Block] = deque()

    def announce(self, blocks: Iterable[_Block]) -> None:
        self._waiting.extend(blocks)
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
        block.owner.blocks.pop(block.start, None)
        if block in self._begun:
            del self._begun[block]
            self._nbytes -= block.nbytes
            self._fill()

    def _fill(self) -> None:
        while self._waiting:
            block = self._waiting[0]
            is_open = block.future is None and block.owner.blocks.get(block.start) is block
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
        self.blocks: dict[int, _Block] = {}

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say that ranges (start, stop) will be read, each once."""
        new = [_Block(self, *one) for one in joined(ranges)]
        with _queue.lock:
            fresh = [block for block in new if block.start not in self.blocks]
            self.blocks |= {block.start: block for block in fresh}
            _queue.announce(fresh)

    def read(self, offset: int, part: memoryview) -> int:
        """How many bytes from ``offset`` on were put into ``part``; 0 only at the end."""
        with _queue.lock:
            blocks = self.blocks.values()
            block = next((one for one in blocks if one.start <= offset < one.stop), None)
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
            blocks, self.blocks = list(self.blocks.values()), {}  # none of them is begun any more
            for block in blocks:
                if block.future is not None:
                    block.future.cancel()
                _queue.drop(block)
