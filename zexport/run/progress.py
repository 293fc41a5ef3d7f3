"""How far an export has come: bytes counted in several threads, and told one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from threading import Lock

from msgspec import Struct


class Phase(Enum):
    """What the bytes of a ``Progress`` are being done to."""

    RESUME = "resume"
    """Reading again what a stopped export has left."""
    WRITE = "write"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one phase of the work has come.

    Attributes:
        nbytes_done: what is done of it.
        nbytes_total: what there is to do in it, in this run.
        phase: what is being done.
        nbytes_resumed: bytes of finished shards that were taken over, so far.
    """

    nbytes_done: int
    nbytes_total: int
    phase: Phase
    nbytes_resumed: int = 0


class Teller(Struct):
    """Adds up bytes that are read to be compared, in the calling thread, and tells of them."""

    tell: Callable[[Progress], None] | None
    nbytes_total: int
    nbytes_done: int = 0

    def add(self, nbytes: int) -> None:
        """Note bytes read."""
        self.nbytes_done += nbytes
        if self.tell is not None:
            self.tell(Progress(self.nbytes_done, self.nbytes_total, Phase.VERIFY))


class Meter:
    """Adds up bytes from several threads, and tells of them one at a time, phase after phase.

    Shards left by a stopped export are read first. While the rest is written, finished files are
    read again already; that is told once all is written.
    """

    def __init__(self, tell: Callable[[Progress], None] | None, *, reads_again: bool) -> None:
        self._reads_again = reads_again
        self._callback = tell
        self._left = self._compared = self._resumed = 0
        self._to_write = self._written = self._verified = 0
        self._lock = Lock()

    def expect(self, *, to_write: int, left: int = 0) -> None:
        """Set what is to be written, and how much a stopped export has left to be read."""
        with self._lock:
            self._to_write, self._left = to_write, left

    def written(self, nbytes: int) -> None:
        """Note bytes written."""
        with self._lock:
            self._written += nbytes
            self._tell(Phase.WRITE, self._written, self._to_write)
            if self._reads_again:
                self._tell_verified()

    def verified(self, nbytes: int) -> None:
        """Note bytes read again."""
        with self._lock:
            self._verified += nbytes
            self._tell_verified()

    def compared(self, nbytes: int) -> None:
        """Note bytes of a left shard read."""
        with self._lock:
            self._compared += nbytes
            self._tell(Phase.RESUME, self._compared, self._left)

    def resumed(self, nbytes: int) -> None:
        """Note bytes of a left shard taken over."""
        with self._lock:
            self._resumed += nbytes

    def _tell_verified(self) -> None:
        if self._written >= self._to_write:
            self._tell(Phase.VERIFY, self._verified, self._to_write)

    def _tell(self, phase: Phase, done: int, total: int) -> None:
        if self._callback is not None:
            self._callback(Progress(done, total, phase, self._resumed))
