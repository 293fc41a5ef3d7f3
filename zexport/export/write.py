"""Write files of tensors (stream, flush, read back, add a receipt) and small files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from enum import Enum
from pathlib import Path

from blake3 import blake3

from zexport.errors import CheckpointError, OutputError, VerificationError
from zexport.export.journal import Journal, Receipt
from zexport.export.manifest import FileEntry
from zexport.export.output_files import check_opens
from zexport.export.plan import ExportPlan, FilePlan, SideFile
from zexport.export.progress import Meter
from zexport.export.stream import ReadTensor, StreamedFile, stream
from zexport.ranges.digest import crc32_of_file, digest_file
from zexport.ranges.reader import SourceReader
from zexport.storage.files import (
    exists,
    is_file,
    is_link,
    is_local,
    open_input,
    open_output,
    remove,
    sync_path,
    version,
)
from zexport.storage.os_errors import reading, writing
from zexport.storage.storage import OutputFile, Version

_FLUSH_NBYTES = 32 << 20
"""Bytes between flushes, so that the last one is short."""

READBACK_THREADS = 2
_FINISHING_MAX = 1
"""Files that wait for the disk: with their plans, a thousand small ones take memory."""
_COPY_NBYTES = 1 << 20
_LOADED_FIRST = ("config.json", ".index.json", "latest", "latest_universal")
"""Loaders open these first, so they are written last."""


class VerifyMode(Enum):
    """How files are read back after writing."""

    READBACK = "readback"
    """Read every file again and compare its CRC-32."""
    DISK = "disk"
    """The same, after asking the system to drop its cached copy."""
    NONE = "none"
    """Only open each file as its readers do."""


def write_files(
    plan: ExportPlan,
    files: Iterable[FilePlan],
    folder: Path,
    journal: Journal,
    sources: SourceReader,
    verify: VerifyMode,
    meter: Meter,
    read: ReadTensor,
) -> None:
    """Write files of a plan; each is on the disk, read back, and has a receipt.

    Separate threads wait for the disk and read back. Files that are complete when this fails have
    receipts.
    """
    with ExitStack() as stack:
        outputs = stack.enter_context(ExitStack())  # closed last: threads use them
        readers = stack.enter_context(ThreadPoolExecutor(READBACK_THREADS))
        flusher = stack.enter_context(ThreadPoolExecutor(1))
        finisher = stack.enter_context(ThreadPoolExecutor(1))
        open_outputs: dict[str, OutputFile] = {}
        flushes: dict[str, list[Future[None]]] = {}
        unflushed = 0

        def opened(file: FilePlan) -> OutputFile:
            path = folder / file.filename
            output = outputs.enter_context(open_output(path, is_new=False, nbytes=file.nbytes))
            output.reserve(file.nbytes)
            open_outputs[file.filename], flushes[file.filename] = output, []
            return output

        def on_chunk(one: StreamedFile, nbytes: int) -> None:
            nonlocal unflushed
            meter.written(nbytes)
            unflushed += nbytes
            own = flushes[one.file.filename]
            if unflushed >= _FLUSH_NBYTES and all(flush.done() for flush in own):
                unflushed = 0
                own.append(flusher.submit(open_outputs[one.file.filename].sync))

        def finish(one: StreamedFile, output: OutputFile, pending: list[Future[None]]) -> None:
            for flush in pending:  # a disk reports lost bytes only once
                flush.result()
            output.sync()
            output.close()
            digests = one.digests()
            read_back(output.path, one.file, digests.crc32, verify, readers, meter.verified)
            journal.add(one.file.filename, digests, one.remarkable, one.ledger.ranges())

        finishing: list[Future[None]] = []
        for one in stack.enter_context(
            closing(stream(plan, files, sources, opened, on_chunk, read))
        ):
            name = one.file.filename
            output = open_outputs.pop(name)
            with writing(output.path):
                output.complete()
            finishing.append(finisher.submit(finish, one, output, flushes.pop(name)))
            while len(finishing) > _FINISHING_MAX or (finishing and finishing[0].done()):
                finishing.pop(0).result()
        for future in finishing:
            future.result()


def read_back(
    path: Path,
    file: FilePlan,
    crc32: int,
    verify: VerifyMode,
    readers: Executor,
    on_bytes: Callable[[int], None],
) -> None:
    """Open a file as its readers do and, depending on ``verify``, read it again.

    Raises:
        VerificationError: it does not contain what was written.
    """
    check_opens(path, file)
    if verify is not VerifyMode.NONE:
        with _read_again(path, verify):
            found = crc32_of_file(path, readers, on_bytes)
        if found != crc32:
            raise _not_as_written(path, f"CRC-32 {found:08x}", f"{crc32:08x}")


def still_holds(
    path: Path,
    file: FilePlan,
    receipt: Receipt,
    readers: Executor,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> bool:
    """Whether a finished file still contains what was written."""
    if is_link(path) or not is_file(path) or version(path).nbytes != file.nbytes:
        return False
    try:
        read_back(path, file, receipt.digests.crc32, VerifyMode.READBACK, readers, on_bytes)
    except VerificationError:
        return False
    return True


@contextmanager
def _read_again(path: Path, verify: VerifyMode) -> Iterator[None]:
    """Read a written file in the block, from the disk if ``verify`` says so."""
    with reading(path, OutputError):
        if verify is VerifyMode.DISK:
            with open_input(path) as written:
                written.forget()
        yield


def write_small(sides: Iterable[SideFile], folder: Path) -> dict[str, FileEntry]:
    """Write small files durably; return their manifest entries by name.

    Raises:
        CheckpointError: a file to copy changed after planning.
    """
    entries = {}
    for side in sorted(sides, key=lambda one: one.filename.endswith(_LOADED_FIRST)):
        path = folder / side.filename
        digest, nbytes, is_new = blake3(), 0, is_local(path)
        with writing(path):
            if is_new and exists(path):  # of a process that was killed
                remove(path)
        with open_output(path, is_new=is_new) as file:
            for data in _content(side):
                file.write(data, nbytes)
                digest.update(data)
                nbytes += len(data)
            with writing(path):
                file.complete()
        with writing(path):
            sync_path(path)
        if side.origin is not None and side.version is not None:
            check_unchanged(side.origin, side.version, nbytes)
        entries[side.filename] = FileEntry(nbytes, digest.hexdigest())
    return entries


def _content(side: SideFile) -> Iterator[bytes]:
    if side.origin is None:
        yield side.content or b""
        return
    with reading(side.origin), open_input(side.origin, side.version) as file:
        for offset in range(0, file.version().nbytes, _COPY_NBYTES):
            yield file.read_at(offset, _COPY_NBYTES)


def check_unchanged(
    path: Path,
    known: Version,
    nbytes: int | None = None,
    error: type[CheckpointError] = CheckpointError,
) -> None:
    """Raise if a local file changed after planning, or if another number of bytes was read.

    Reads of objects are bound to their version.
    """
    with reading(path):
        found = version(path) if is_local(path) else known
    if found != known or nbytes not in (None, found.nbytes):
        raise error(
            "file changed after planning",
            path=path,
            found=found if found != known else f"{nbytes} bytes",
            expected=known,
            hint="Run the command again",
        )


def check_small(path: Path, expected: str, verify: VerifyMode) -> None:
    """Read a small file back, depending on ``verify``, and compare its digest."""
    if verify is not VerifyMode.NONE:
        with _read_again(path, verify):
            found = digest_file(path)
        if found != expected:
            raise _not_as_written(path, f"BLAKE3 {found}", expected)


def _not_as_written(path: Path, found: str, expected: str) -> VerificationError:
    return VerificationError(
        "does not read back as written",
        path=path,
        found=found,
        expected=expected,
        hint="Do not trust this disk; write to another",
    )
