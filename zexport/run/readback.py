"""Reading an output again before it gets its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import ParamSpec, Self

from zexport.errors import OutputError, VerificationError
from zexport.export.plan import FilePlan
from zexport.ranges.digests import digest_file, digest_of_parts, digest_ranges
from zexport.run.manifest import FileEntry
from zexport.run.output_files import check_opens
from zexport.run.progress import Meter
from zexport.run.receipts import Receipt
from zexport.run.shares import Stretch
from zexport.store.files import open_input, reading, version, writing
from zexport.store.folders import is_file, is_link

_READBACK_THREADS = 2

_BATCH_NBYTES = 32 << 20
_BATCH_TENSORS = 4096
"""Tensors are read again in runs of about so many bytes, several at a time; none has more."""

_P = ParamSpec("_P")


class VerifyMode(Enum):
    """How what was written is read again before it is believed."""

    READBACK = "readback"
    """Every file is read again, and its digest compared."""
    DISK = "disk"
    """The same, after the system was asked to forget its copy in memory."""
    NONE = "none"
    """Nothing is read again; each file is still opened as its readers do."""


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

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def add(self, stretch: Stretch, receipt: Receipt) -> list[Future[None]]:
        """Have a stretch read again if the mode says so; a whole file is opened in any case."""
        running = self._opened(stretch)
        if self._verify is not VerifyMode.NONE:
            running += self._read(stretch, receipt, self._meter.verified)
        return running

    def holds(self, stretch: Stretch, receipt: Receipt) -> bool:
        """Whether what was left is still what was written, read again whatever the mode."""
        path = self._folder / stretch.file.filename
        if is_link(path) or not is_file(path) or version(path).nbytes != stretch.file.nbytes:
            return False
        self._opened(stretch)
        self._read(stretch, receipt, self._meter.compared)
        try:
            self.wait()
        except VerificationError:
            return False
        return True

    def _opened(self, stretch: Stretch) -> list[Future[None]]:
        path = self._folder / stretch.file.filename
        return [self._submit(check_opens, path, stretch.file)] if stretch.is_whole else []

    def _read(
        self, stretch: Stretch, receipt: Receipt, on_bytes: Callable[[int], None]
    ) -> list[Future[None]]:
        path = self._folder / stretch.file.filename
        if self._verify is VerifyMode.DISK:
            with writing(path), open_input(path) as written:
                written.forget()
        running = [
            self._submit(_check_tensors, path, stretch, receipt, batch, on_bytes)
            for batch in _batches(stretch)
        ]
        if stretch.is_whole:
            running.append(self._submit(_check_frame, path, stretch.file, receipt))
        return running

    def add_frame(self, stretch: Stretch, receipt: Receipt) -> None:
        """Have a file opened whose tensors were read again already, and the rest of it read."""
        self._opened(stretch)
        if self._verify is not VerifyMode.NONE:
            path = self._folder / stretch.file.filename
            self._submit(_check_frame, path, stretch.file, receipt)

    def add_file(self, filename: str, entry: FileEntry) -> None:
        """Have a file beside the shards read again, if the mode says so."""
        if self._verify is not VerifyMode.NONE:
            self._submit(_check_file, self._folder / filename, entry, self._verify)

    def _submit(
        self, check: Callable[_P, None], *args: _P.args, **named: _P.kwargs
    ) -> Future[None]:
        self._running.append(self._executor.submit(check, *args, **named))
        return self._running[-1]

    def wait(self) -> None:
        """Return when all is checked, or raise what was found first."""
        running, self._running = self._running, []
        for future in running:
            future.result()


def _batches(stretch: Stretch) -> Iterator[range]:
    """Its tensors, by their places, in runs that are worth a task of their own."""
    first = nbytes = 0
    for last, tensor in enumerate(stretch.tensors, 1):
        nbytes += tensor.nbytes
        if nbytes >= _BATCH_NBYTES or last - first == _BATCH_TENSORS:
            yield range(first, last)
            first, nbytes = last, 0
    if first < len(stretch.tensors):
        yield range(first, len(stretch.tensors))


def _check_frame(path: Path, file: FilePlan, receipt: Receipt) -> None:
    """All that is no tensor's, with the digests of the tensors."""
    ranges = ((tensor.offset, tensor.nbytes) for tensor in file.tensors)
    with reading(path, OutputError):
        nbytes = version(path).nbytes
        found = digest_of_parts(path, nbytes, ranges, receipt.tensor_digests())
    if found != receipt.blake3 or nbytes != file.nbytes:
        raise _not_as_written(path, "another header or size", "those that were written")


def _check_tensors(
    path: Path, stretch: Stretch, receipt: Receipt, batch: range, on_bytes: Callable[[int], None]
) -> None:
    tensors = stretch.tensors[batch.start : batch.stop]
    ranges = [(tensor.offset, tensor.nbytes) for tensor in tensors]
    with reading(path, OutputError):
        read = digest_ranges(path, ranges, on_bytes=on_bytes)
    expected_digests = receipt.tensor_digests(batch.start, batch.stop)
    for tensor, found, expected in zip(tensors, read, expected_digests, strict=True):
        if found != expected:
            raise _not_as_written(path, f"BLAKE3 {found} for {tensor.name}", expected)


def _check_file(path: Path, entry: FileEntry, verify: VerifyMode) -> None:
    if verify is VerifyMode.DISK:
        with writing(path), open_input(path) as written:
            written.forget()
    with reading(path, OutputError):
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
