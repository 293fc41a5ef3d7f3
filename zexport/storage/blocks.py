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
"""Memory for blocks of all objects together, except those that a reader waits for."""
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

    def fetched(self) -> Future[memoryview]:
        if self.future is None:
            self.future = _fetchers().submit(self.owner.fetch, self.start, self.stop)
        return self.future


_lock = Lock()
_blocks: dict[_Block, None] = {}
"""All blocks, in the order in which they will be read."""


def _fetch_ahead() -> None:
    """Fetch blocks, in order, while there is room."""
    room = _AHEAD_NBYTES - sum(one.stop - one.start for one in _blocks if one.future is not None)
    for block in [one for one in _blocks if one.future is None]:
        room -= block.stop - block.start
        if room < 0:
            break
        block.fetched()


@cache
def _fetchers() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - slow, and only for objects

    return ThreadPoolExecutor(_REQUESTS, thread_name_prefix="zexport-fetch")


class ReadAhead(InputFile):
    """An object to read with read-ahead; readers of a block get the errors of its request."""

    def __init__(self) -> None:
        self._own: list[_Block] = []

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
                insort(self._own, block, key=lambda one: one.start)
                _blocks[block] = None
            _fetch_ahead()

    def read(self, offset: int, part: memoryview) -> int:
        with _lock:
            block = self._at(offset)
            future = None if block is None else block.fetched()
        if block is None or future is None:
            data = self.fetch(offset, offset + part.nbytes)
        else:
            data = future.result()[offset - block.start :][: part.nbytes]
            with _lock:
                block.unread -= data.nbytes
                if block.unread <= 0:
                    self._drop(block)
        part[: data.nbytes] = data
        return data.nbytes

    def _at(self, offset: int) -> _Block | None:
        before = bisect_right(self._own, offset, key=lambda one: one.start)
        return next((one for one in self._own[:before][-1:] if offset < one.stop), None)

    def _drop(self, *blocks: _Block) -> None:
        for block in blocks:
            if block in _blocks:
                del _blocks[block]
                self._own.remove(block)
        _fetch_ahead()

    def close(self) -> None:
        with _lock:
            for block in self._own:
                if block.future is not None:
                    block.future.cancel()
            self._drop(*self._own)
