"""How far an export has come: bytes counted in several threads, and told one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from threading import Lock


class Phase(Enum):
    """What the bytes of a ``Progress`` are being done to."""

    RESUME = "resume"
    """Reading again what a stopped export has left."""
    WRITE = "write"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work has come; bytes written and bytes read again count alike.

    Attributes:
        nbytes_done: what is done.
        nbytes_total: what there is to do, in this run.
        phase: what is being done.
        nbytes_resumed: bytes of finished shards that were taken over, so far.
    """

    nbytes_done: int
    nbytes_total: int
    phase: Phase
    nbytes_resumed: int = 0


class Meter:
    """Adds up bytes from several threads, and tells of them one at a time.

    What is to be done is known bit by bit: first the shards left by a stopped export are read,
    then the rest is written, and read if the mode says so.
    """

    def __init__(self, tell: Callable[[Progress], None] | None, *, reads_again: bool) -> None:
        self._times = 2 if reads_again else 1
        self._tell = tell
        self._done = self._resumed = self._to_write = self._written = self._total = 0
        self._lock = Lock()

    def expect(self, *, to_write: int, left: int = 0) -> None:
        """Set what is to be written, and how much a stopped export has left to be read."""
        with self._lock:
            self._to_write = to_write
            self._total = self._done + self._times * to_write + left

    def written(self, nbytes: int) -> None:
        """Note bytes written."""
        self._add(nbytes, written=nbytes)

    def verified(self, nbytes: int) -> None:
        """Note bytes read again."""
        self._add(nbytes)

    def compared(self, nbytes: int) -> None:
        """Note bytes of a left shard read."""
        self._add(nbytes, Phase.RESUME)

    def resumed(self, nbytes: int) -> None:
        """Note bytes of a left shard taken over."""
        with self._lock:
            self._resumed += nbytes

    def _add(self, nbytes: int, phase: Phase | None = None, *, written: int = 0) -> None:
        with self._lock:
            self._done += nbytes
            self._written += written
            if phase is None:
                phase = Phase.WRITE if self._written < self._to_write else Phase.VERIFY
            if self._tell is not None:
                self._tell(Progress(self._done, self._total, phase, self._resumed))
