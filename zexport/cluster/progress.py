"""How far all workers have come: each tells an actor, and the driver makes one figure of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from zexport.run.progress import Phase, Progress

_SECONDS = 0.25
"""Between two reports of one worker."""


class Board:
    """What each worker told last; runs as an actor."""

    def __init__(self) -> None:
        self._told: dict[int, Progress] = {}

    def tell(self, number: int, progress: Progress) -> None:
        """Note how far a worker has come."""
        self._told[number] = progress

    def told(self) -> dict[int, Progress]:
        """How far each worker has come that has told it."""
        return self._told


class Teller:
    """Tells the board of one worker's progress, now and then."""

    def __init__(self, board: Any, number: int) -> None:
        self._board = board
        self._number = number
        self._told_at = 0.0

    def __call__(self, progress: Progress) -> None:
        """Tell it, if the last time was a while ago or this is the end of something."""
        now = time.monotonic()
        if now - self._told_at >= _SECONDS or progress.nbytes_done >= progress.nbytes_total:
            self._told_at = now
            self._board.tell.remote(self._number, progress)


def together(shares: Sequence[int], told: Mapping[int, Progress]) -> Progress:
    """One figure of all workers: their shares' bytes, and what each told last, by number from 1.

    All that is written counts first; once that is everything, what was read again.
    """
    total = sum(shares)
    resumed = sum(one.nbytes_resumed for one in told.values())
    written = sum(_written(shares[number - 1], one) for number, one in told.items())
    if written < total:
        return Progress(written, total, Phase.WRITE, resumed)
    checked = sum(_checked(shares[number - 1], one) for number, one in told.items())
    return Progress(checked, total, Phase.VERIFY, resumed)


def _written(nbytes: int, told: Progress) -> int:
    """Bytes of a worker's share that are written, now or before a stop."""
    if told.phase is Phase.VERIFY:
        return nbytes
    now = told.nbytes_done if told.phase is Phase.WRITE else 0
    return min(told.nbytes_resumed + now, nbytes)


def _checked(nbytes: int, told: Progress) -> int:
    now = told.nbytes_done if told.phase is Phase.VERIFY else 0
    return min(told.nbytes_resumed + now, nbytes)
