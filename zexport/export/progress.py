"""Progress of a job in bytes, by phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from threading import Lock

from msgspec import Struct

from zexport.export.plan_file import FileSize


class Phase(Enum):
    """What a job is doing."""

    RESUME = "resume"
    """Reading files that an interrupted job finished."""
    WRITE = "write"
    VERIFY = "verify"


class Progress(Struct, frozen=True):
    """Progress of one phase.

    Attributes:
        nbytes_done: bytes done.
        nbytes_total: bytes to do in this run.
        phase: the phase.
        nbytes_resumed: bytes of finished shards that were reused so far.
    """

    nbytes_done: int
    nbytes_total: int
    phase: Phase
    nbytes_resumed: int = 0


class Meter:
    """Counts bytes of several threads by phase; calls ``tell`` from one thread at a time.

    Finished files are verified while others are written; that is reported once all are written.
    """

    def __init__(
        self,
        tell: Callable[[Progress], None] | None,
        *,
        reads_again: bool = True,
        to_verify: int = 0,
    ) -> None:
        self._tell = tell
        self._reads_again = reads_again
        self._done = dict.fromkeys(Phase, 0)
        self._totals = {Phase.RESUME: 0, Phase.WRITE: 0, Phase.VERIFY: to_verify}
        self._resumed = 0
        self._lock = Lock()
        self.written, self.verified, self.compared = (
            partial(self._add, phase) for phase in (Phase.WRITE, Phase.VERIFY, Phase.RESUME)
        )

    def expect(self, files: Sequence[FileSize], left: Sequence[FileSize] = ()) -> None:
        """Set the files to write, and the finished files to compare first."""
        self._totals = {
            Phase.RESUME: sum(file.nbytes for file in left),
            Phase.WRITE: sum(file.data_nbytes for file in files),
            Phase.VERIFY: sum(file.nbytes for file in files),
        }

    def resumed(self, nbytes: int) -> None:
        """Count bytes of a finished file that is reused."""
        self._resumed += nbytes

    def _add(self, phase: Phase, nbytes: int) -> None:
        with self._lock:
            self._done[phase] += nbytes
            all_written = self._done[Phase.WRITE] >= self._totals[Phase.WRITE]
            if phase is not Phase.VERIFY:
                self._report(phase)
            if phase is not Phase.RESUME and all_written and self._reads_again:
                self._report(Phase.VERIFY)

    def _report(self, phase: Phase) -> None:
        if self._tell is not None:
            self._tell(Progress(self._done[phase], self._totals[phase], phase, self._resumed))
