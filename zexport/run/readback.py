"""Reading an output again before it gets its name: progress, modes and the checks themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import ParamSpec, Self

from safetensors import SafetensorError, safe_open

from zexport.errors import VerificationError
from zexport.plan.plan import FilePlan, TensorPlan, qualified
from zexport.ranges.digests import digest_file, digest_ranges, drop_from_cache
from zexport.run.manifest import FileEntry
from zexport.run.results import ShardResult
from zexport.store.disk import writing

_READBACK_THREADS = 2

_BATCH_NBYTES = 32 << 20
"""Tensors are read again in runs of about this many bytes, several at a time."""

_P = ParamSpec("_P")


class VerifyMode(Enum):
    """How what was written is read again before it is believed."""

    READBACK = "readback"
    """Every file is read again, and its digest compared."""
    DISK = "disk"
    """The same, after the system was asked to forget its copy in memory."""
    NONE = "none"
    """Nothing is read again; the headers are still opened by the safetensors library."""


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

    def __init__(self, verify: VerifyMode, tell: Callable[[Progress], None] | None) -> None:
        self._times = 1 if verify is VerifyMode.NONE else 2
        self._tell = tell
        self._done = 0
        self._resumed = 0
        self._to_write = 0
        self._written = 0
        self._total = 0
        self._lock = Lock()

    def expect(self, *, to_write: int, left: int = 0) -> None:
        """Set what is to be written, and how much a stopped export has left to be read."""
        with self._lock:
            self._to_write = to_write
            self._total = self._done + self._times * to_write + left

    def written(self, nbytes: int) -> None:
        """Note bytes written."""
        with self._lock:
            self._written += nbytes
            self._done += nbytes
            self._report(Phase.WRITE if self._written < self._to_write else Phase.VERIFY)

    def verified(self, nbytes: int) -> None:
        """Note bytes read again."""
        with self._lock:
            self._done += nbytes
            self._report(Phase.WRITE if self._written < self._to_write else Phase.VERIFY)

    def compared(self, nbytes: int) -> None:
        """Note bytes of a left shard read."""
        with self._lock:
            self._done += nbytes
            self._report(Phase.RESUME)

    def resumed(self, nbytes: int) -> None:
        """Note bytes of a left shard taken over."""
        with self._lock:
            self._resumed += nbytes

    def _report(self, phase: Phase) -> None:
        if self._tell is not None:
            self._tell(Progress(self._done, self._total, phase, self._resumed))


class Checks:
    """Reading again what was written, in other threads, while the rest is being written."""

    def __init__(self, folder: Path, verify: VerifyMode, meter: Meter) -> None:
        self._folder = folder
        self._verify = verify
        self._meter = meter
        self._executor = ThreadPoolExecutor(_READBACK_THREADS)
        self._running: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    def add_shard(self, planned: FilePlan, written: ShardResult) -> None:
        """Have a shard opened by the safetensors library, and read again if the mode says so."""
        path = self._folder / planned.filename
        self._submit(_check_opens, path, written)
        if self._verify is not VerifyMode.NONE:
            self._add_reading(path, planned, written, self._meter.verified)

    def holds(self, planned: FilePlan, written: ShardResult) -> bool:
        """Whether a shard that was left is still what was written, read again whatever the mode."""
        path = self._folder / planned.filename
        if not path.is_file() or path.stat().st_size != planned.nbytes:
            return False
        self._submit(_check_opens, path, written)
        self._add_reading(path, planned, written, self._meter.compared)
        try:
            self.wait()
        except VerificationError:
            return False
        return True

    def _add_reading(
        self,
        path: Path,
        planned: FilePlan,
        written: ShardResult,
        on_bytes: Callable[[int], None],
    ) -> None:
        if self._verify is VerifyMode.DISK:
            with writing(path):
                drop_from_cache(path)
        self._submit(_check_header, path, planned)
        for batch in _batches(planned):
            self._submit(_check_tensors, path, batch, written, on_bytes)

    def add_file(self, filename: str, entry: FileEntry) -> None:
        """Have a file beside the shards read again, if the mode says so."""
        if self._verify is not VerifyMode.NONE:
            self._submit(_check_file, self._folder / filename, entry, self._verify)

    def _submit(self, check: Callable[_P, None], *args: _P.args, **named: _P.kwargs) -> None:
        self._running.append(self._executor.submit(check, *args, **named))

    def wait(self) -> None:
        """Return when all is checked, or raise what was found first."""
        running, self._running = self._running, []
        for future in running:
            future.result()


def _check_opens(path: Path, shard: ShardResult) -> None:
    try:
        with safe_open(path, framework="np") as opened:
            names = set(opened.keys())
    except SafetensorError as cause:
        raise VerificationError(
            "was written, but the safetensors library cannot open it", path=path, found=str(cause)
        ) from cause
    if {qualified(shard.filename, name) for name in names} != shard.tensors.keys():
        raise VerificationError(
            "was written, but holds other tensors than planned",
            path=path,
            found=f"{len(names)} tensors",
            expected=len(shard.tensors),
        )


def _batches(shard: FilePlan) -> Iterator[list[TensorPlan]]:
    """The shard's tensors in runs that are worth a task of their own."""
    batch: list[TensorPlan] = []
    nbytes = 0
    for tensor in shard.tensors:
        batch.append(tensor)
        nbytes += tensor.nbytes
        if nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _check_header(path: Path, planned: FilePlan) -> None:
    with writing(path), path.open("rb") as file:
        found = file.read(len(planned.head))
    if found != planned.head or path.stat().st_size != planned.nbytes:
        raise _not_as_written(path, "another header or size", "those that were written")


def _check_tensors(
    path: Path,
    batch: Sequence[TensorPlan],
    written: ShardResult,
    on_bytes: Callable[[int], None],
) -> None:
    ranges = [(tensor.offset, tensor.nbytes) for tensor in batch]
    with writing(path):
        digests = digest_ranges(path, ranges, on_bytes=on_bytes)
    for tensor, found in zip(batch, digests, strict=True):
        expected = written.tensors[tensor.name].blake3
        if found != expected:
            raise _not_as_written(path, f"BLAKE3 {found} for {tensor.name}", expected)


def _check_file(path: Path, entry: FileEntry, verify: VerifyMode) -> None:
    with writing(path):
        if verify is VerifyMode.DISK:
            drop_from_cache(path)
        found = digest_file(path)
    if found != entry.blake3:
        raise _not_as_written(path, f"BLAKE3 {found}", entry.blake3)


def _not_as_written(path: Path, found: str, expected: str) -> VerificationError:
    return VerificationError(
        "does not read back as it was written",
        path=path,
        found=found,
        expected=expected,
        hint="Do not trust this disk; write to another",
    )
