"""Read-ahead for objects: many small reads become a few large requests, made before they are used.

Object storage takes tens of milliseconds to answer even a small request. Announced ranges are
fetched in blocks by a thread pool; a block is dropped once its announced bytes are read.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

from zexport.storage.storage import InputFile

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

BLOCK_NBYTES = 8 << 20
_GAP_NBYTES = 64 << 10
"""Reading this many unused bytes is faster than another request."""
_AHEAD_NBYTES = 64 << 20
"""Memory for blocks of all objects together; half more if readers need blocks that do not fit."""
_HELD_NBYTES_MAX = _AHEAD_NBYTES * 3 // 2
_REQUESTS = 32


def joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join ranges (start, stop) into blocks (start, stop, announced bytes), sorted."""
    start = stop = nbytes = 0
    for begin, end in sorted(ranges):
        at = max(begin, start)
        while at < end:
            if nbytes and (at - stop > _GAP_NBYTES or at - start >= BLOCK_NBYTES):
                yield start, stop, nbytes
                nbytes = 0
            if not nbytes:
                start = stop = at
            cut = min(end, start + BLOCK_NBYTES)
            nbytes += cut - at
            at, stop = cut, max(stop, cut)
    if nbytes:
        yield start, stop, nbytes


class _Block:
    def __init__(self, owner: ReadAhead, start: int, stop: int, unread: int) -> None:
        self.owner = owner
        self.start = start
        self.stop = stop
        self.unread = unread
        self.future: Future[memoryview] | None = None


_lock = Lock()
_waiting: dict[_Block, None] = {}
_begun: dict[_Block, None] = {}


def _fits(limit: int, *more: _Block) -> bool:
    return sum(one.stop - one.start for one in (*_begun, *more)) <= limit


def _begin(block: _Block) -> Future[memoryview]:
    del _waiting[block]
    _begun[block] = None
    block.future = _fetchers().submit(block.owner.fetch, block.start, block.stop)
    return block.future


def _fill() -> None:
    """Begin waiting blocks, in order, while there is room."""
    while _waiting and _fits(_AHEAD_NBYTES, first := next(iter(_waiting))):
        _begin(first)


def _need(block: _Block) -> Future[memoryview]:
    """Begin a block even if there is no room; drop the oldest fetched ones if too many."""
    future = block.future or _begin(block)
    for old in [*_begun]:
        if _fits(_HELD_NBYTES_MAX):
            break
        if old is not block and old.future is not None and old.future.done():
            _drop([old])
    return future


def _drop(blocks: Iterable[_Block]) -> None:
    for block in blocks:
        if block in block.owner.blocks:
            block.owner.blocks.remove(block)
        _waiting.pop(block, None)
        _begun.pop(block, None)
    _fill()


@cache
def _fetchers() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - slow, and only for objects

    return ThreadPoolExecutor(_REQUESTS, thread_name_prefix="zexport-fetch")


class ReadAhead(InputFile):
    """An object to read with read-ahead; readers of a block get the errors of its request."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []

    @abstractmethod
    def fetch(self, start: int, stop: int) -> memoryview:
        """Return the bytes from ``start`` to ``stop``, or to the end."""

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        with _lock:
            for start, stop, nbytes in joined(ranges):
                if (known := self._at(start)) is not None and stop <= known.stop:
                    known.unread += nbytes
                    continue
                block = _Block(self, start, stop, nbytes)
                insort(self.blocks, block, key=lambda one: one.start)
                _waiting[block] = None
            _fill()

    def read(self, offset: int, part: memoryview) -> int:
        with _lock:
            block = self._at(offset)
            future = None if block is None else _need(block)
        if block is None or future is None:
            data = self.fetch(offset, offset + part.nbytes)
        else:
            data = future.result()[offset - block.start :][: part.nbytes]
            with _lock:
                block.unread -= data.nbytes
                if block.unread <= 0:
                    _drop([block])
        part[: data.nbytes] = data
        return data.nbytes

    def _at(self, offset: int) -> _Block | None:
        before = bisect_right(self.blocks, offset, key=lambda one: one.start)
        return next((one for one in self.blocks[:before][-1:] if offset < one.stop), None)

    def close(self) -> None:
        with _lock:
            for block in self.blocks:
                if block.future is not None:
                    block.future.cancel()
            _drop([*self.blocks])
