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
from zexport.export.commit import writing
from zexport.export.manifest import FileEntry
from zexport.export.plan import ExportPlan, ShardPlan, TensorPlan
from zexport.export.writer import ShardResult
from zexport.streams.digests import digest_file, digest_ranges, drop_from_cache

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

    WRITE = "write"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work has come; bytes written and bytes read again count alike."""

    nbytes_done: int
    nbytes_total: int
    phase: Phase


class Meter:
    """Adds up bytes from several threads, and tells of them one at a time."""

    def __init__(
        self, plan: ExportPlan, verify: VerifyMode, tell: Callable[[Progress], None] | None
    ) -> None:
        self._to_write = sum(shard.data_nbytes for shard in plan.shards)
        to_verify = 0
        if verify is not VerifyMode.NONE:
            to_verify = self._to_write
        self._total = self._to_write + to_verify
        self._tell = tell
        self._written = 0
        self._verified = 0
        self._lock = Lock()

    def written(self, nbytes: int) -> None:
        """Note bytes written."""
        with self._lock:
            self._written += nbytes
            self._report()

    def verified(self, nbytes: int) -> None:
        """Note bytes read again."""
        with self._lock:
            self._verified += nbytes
            self._report()

    def _report(self) -> None:
        if self._tell is not None:
            phase = Phase.WRITE if self._written < self._to_write else Phase.VERIFY
            self._tell(Progress(self._written + self._verified, self._total, phase))


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

    def add_shard(self, planned: ShardPlan, written: ShardResult) -> None:
        """Have a shard opened by the safetensors library, and read again if the mode says so."""
        path = self._folder / planned.filename
        self._submit(_check_opens, path, written)
        if self._verify is VerifyMode.NONE:
            return
        if self._verify is VerifyMode.DISK:
            with writing(path):
                drop_from_cache(path)
        self._submit(_check_header, path, planned)
        for batch in _batches(planned):
            self._submit(_check_tensors, path, planned, batch, written, self._meter.verified)

    def add_file(self, filename: str, entry: FileEntry) -> None:
        """Have a file beside the shards read again, if the mode says so."""
        if self._verify is not VerifyMode.NONE:
            self._submit(_check_file, self._folder / filename, entry, self._verify)

    def _submit(self, check: Callable[_P, None], *args: _P.args, **named: _P.kwargs) -> None:
        self._running.append(self._executor.submit(check, *args, **named))

    def wait(self) -> None:
        """Return when all is checked, or raise what was found first."""
        for future in self._running:
            future.result()


def _check_opens(path: Path, shard: ShardResult) -> None:
    try:
        with safe_open(path, framework="np") as opened:
            names = set(opened.keys())
    except SafetensorError as cause:
        raise VerificationError(
            "was written, but the safetensors library cannot open it", path=path, found=str(cause)
        ) from cause
    if names != shard.tensors.keys():
        raise VerificationError(
            "was written, but holds other tensors than planned",
            path=path,
            found=f"{len(names)} tensors",
            expected=len(shard.tensors),
        )


def _batches(shard: ShardPlan) -> Iterator[list[TensorPlan]]:
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


def _check_header(path: Path, planned: ShardPlan) -> None:
    with writing(path), path.open("rb") as file:
        found = file.read(len(planned.header))
    if found != planned.header or path.stat().st_size != planned.nbytes:
        raise _not_as_written(path, "another header or size", "those that were written")


def _check_tensors(
    path: Path,
    planned: ShardPlan,
    batch: Sequence[TensorPlan],
    written: ShardResult,
    on_bytes: Callable[[int], None],
) -> None:
    begin = len(planned.header)
    ranges = [(begin + tensor.offset, tensor.nbytes) for tensor in batch]
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
