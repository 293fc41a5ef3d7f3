"""Progress of a job, and reports of an export or of one of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from msgspec import Struct

from zexport.export.plan import Form, Origin
from zexport.export.plan_file import FileSize
from zexport.findings import Finding
from zexport.model.hub_cache import GivenBase
from zexport.storage.json import JsonReport, Natural


class VerifyMode(Enum):
    """How files are read back after writing."""

    READBACK = "readback"
    """Read every file again and compare its CRC-32."""
    DISK = "disk"
    """The same, after asking the system to drop its cached copy."""
    NONE = "none"
    """Only open each file as its readers do."""


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


OnProgress: TypeAlias = Callable[[Progress], None]
OnBytes: TypeAlias = Callable[[int], None]
"""Called with a number of bytes."""


class Meter:
    """Counts bytes of several threads by phase; calls ``on_progress`` from one thread at a time.

    Finished files are verified while others are written; that is reported once all are written.
    """

    def __init__(
        self,
        on_progress: OnProgress | None,
        *,
        reads_again: bool = True,
        to_verify: int = 0,
    ) -> None:
        self._on_progress = on_progress
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
        if self._on_progress is not None:
            self._on_progress(
                Progress(self._done[phase], self._totals[phase], phase, self._resumed)
            )


class ExportReport(JsonReport, Struct, frozen=True):
    """What an export did.

    Attributes:
        out_dir: the output folder, now complete.
        origin: the checkpoint.
        form: dtypes and names of the output.
        files: its files, sorted, the manifest included.
        tensors: number of tensors written.
        nbytes_read: bytes read from the checkpoint's tensors.
        nbytes_written: bytes of all its files.
        seconds: duration.
        findings: anomalies, accepted or harmless.
        warnings: what the user should act on.
        notes: what the user may want to know.
        verified: how the files were read back before publishing.
        left_out: entries of the module's state dict without tensors or values.
        resumed: shards that an interrupted run had finished, read back and reused.
        base: the base model, if given.
    """

    out_dir: Path
    origin: Origin
    form: Form
    files: tuple[str, ...]
    tensors: Natural
    nbytes_read: Natural
    nbytes_written: Natural
    seconds: float
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    verified: VerifyMode
    left_out: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    base: GivenBase | None = None


class PartReport(JsonReport, Struct, frozen=True):
    """What one part did while others are missing.

    Attributes:
        out_dir: the output folder, once all parts are written.
        part: its number, from 1.
        parts: the number of parts.
        missing: the parts that are not written; none if the output is complete.
        origin: the checkpoint.
        nbytes_read: bytes read from the checkpoint's tensors.
        nbytes_written: bytes of tensors written.
        seconds: duration.
        findings: anomalies found by comparing replicas.
        warnings: what the user should act on.
    """

    out_dir: Path
    part: Natural
    parts: Natural
    missing: tuple[Natural, ...]
    origin: Origin
    nbytes_read: Natural
    nbytes_written: Natural
    seconds: float
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
