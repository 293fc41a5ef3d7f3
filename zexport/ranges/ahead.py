"""Announce reads to the storage while earlier data is processed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from itertools import chain
from typing import TypeVar

_BATCH_NBYTES = 32 << 20
_BATCHES_AHEAD = 2

_T = TypeVar("_T")
_R = TypeVar("_R")


def announced(
    items: Iterable[_T],
    nbytes: Callable[[_T], int],
    windows: Callable[[_T], Iterable[_R]],
    expect: Callable[[Iterable[_R]], None],
) -> Iterator[_T]:
    """Yield ``items``, and pass their ``windows`` to ``expect`` two batches ahead."""
    before: deque[list[_T]] = deque()
    batch: list[_T] = []
    size = 0
    for one in items:
        batch.append(one)
        size += nbytes(one)
        if size >= _BATCH_NBYTES:
            expect(chain.from_iterable(map(windows, batch)))
            before.append(batch)
            batch, size = [], 0
            if len(before) > _BATCHES_AHEAD:
                yield from before.popleft()
    expect(chain.from_iterable(map(windows, batch)))
    yield from chain.from_iterable((*before, batch))


def in_order(
    workers: Executor, act: Callable[[_T], _R], items: Iterable[_T], *, ahead: int
) -> Iterator[tuple[_T, _R]]:
    """Yield each item with its result, in order; at most ``ahead`` are in progress."""
    running: deque[tuple[_T, Future[_R]]] = deque()
    for one in items:
        running.append((one, workers.submit(act, one)))
        if len(running) > ahead:
            first, future = running.popleft()
            yield first, future.result()
    for first, future in running:
        yield first, future.result()
