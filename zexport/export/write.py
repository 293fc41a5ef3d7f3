"""Write files of tensors (stream, flush, read back, add a receipt) and small files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from zexport.errors import CheckpointError, OutputError, VerificationError, ZexportError
from zexport.export.checked_reader import WeightReader
from zexport.export.journal import Journal, Receipt
from zexport.export.manifest import FileEntry
from zexport.export.plan import ExportPlan, FilePlan, SideFile, qualified
from zexport.export.report import Meter, OnBytes, VerifyMode
from zexport.export.stream import StreamedFile, stream
from zexport.formats.pickle_values import TensorRef
from zexport.formats.safetensors import FileTensor, read_header
from zexport.formats.torch_file import read_torch_file
from zexport.formats.torch_writer import tensors_in
from zexport.ranges.digest import crc32_of_file, digest_file
from zexport.ranges.source import Extent
from zexport.storage.files import (
    is_file,
    is_link,
    is_local,
    open_input,
    open_output,
    version,
    write_durably,
)
from zexport.storage.os_errors import reading, writing
from zexport.storage.storage import OutputFile, Version

_FLUSH_NBYTES = 32 << 20
"""Bytes between flushes, so that the last one is short."""

READBACK_THREADS = 2
_LOADED_FIRST = ("config.json", ".index.json", "latest", "latest_universal")
"""Loaders open these first, so they are written last."""


def write_files(
    plan: ExportPlan,
    files: Iterable[FilePlan],
    folder: Path,
    journal: Journal,
    sources: WeightReader,
    verify: VerifyMode,
    meter: Meter,
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
        flushes: defaultdict[str, list[Future[None]]] = defaultdict(list)
        unflushed = 0

        def opened(file: FilePlan) -> OutputFile:
            path = folder / file.filename
            output = outputs.enter_context(open_output(path, is_new=False, nbytes=file.nbytes))
            output.reserve(file.nbytes)
            return output

        def on_chunk(one: StreamedFile, nbytes: int) -> None:
            nonlocal unflushed
            meter.written(nbytes)
            unflushed += nbytes
            own = flushes[one.file.filename]
            if unflushed >= _FLUSH_NBYTES and all(flush.done() for flush in own):
                unflushed = 0
                own.append(flusher.submit(one.output.sync))

        def finish(one: StreamedFile) -> None:
            for flush in flushes.pop(one.file.filename):  # a disk reports lost bytes only once
                flush.result()
            one.output.sync()
            one.output.close()
            digests = one.digests()
            read_back(one.output.path, one.file, digests.crc32, verify, readers, meter.verified)
            journal.add(one.file.filename, digests, one.remarkable, one.coverage.ranges())

        finishing: Future[None] | None = None
        for one in stack.enter_context(closing(stream(plan, files, sources, opened, on_chunk))):
            with writing(one.output.path):
                one.output.complete()
            if finishing is not None:  # one at a time: with their plans, many take memory
                finishing.result()
            finishing = finisher.submit(finish, one)
        if finishing is not None:
            finishing.result()


def is_safetensors(filename: str) -> bool:
    return filename.endswith(".safetensors")


def read_written(
    path: Path, filename: str, refusal: type[ZexportError] = VerificationError
) -> dict[str, FileTensor]:
    """Return the tensors of an output file in file order, by their names in the whole output.

    Raises:
        VerificationError: it is not a valid safetensors or torch file.
        refusal: the system refuses to read it.
    """
    try:
        if is_safetensors(filename):
            header = read_header(path)
            return {qualified(filename, name): one for name, one in header.tensors.items()}
        every = sorted(_in_torch_file(path, filename), key=lambda one: one.offset)
        return {one.name: one for one in every}
    except ZexportError as cause:
        system = cause.__cause__ if isinstance(cause.__cause__, OSError) else None
        kind = VerificationError if system is None else refusal
        problem, found, expected = cause.problem, cause.found, cause.expected
        raise kind(problem, path=path, found=found, expected=expected, hint=cause.hint) from (
            system or cause
        )


def _in_torch_file(path: Path, filename: str) -> Iterator[FileTensor]:
    """Yield the tensors that have bytes; each must be a record of its own."""
    file = read_torch_file(path)
    records = {(record.offset, record.nbytes) for record in file.records}
    for own, tensor in tensors_in(file.value, TensorRef):
        if not tensor.nbytes:
            continue
        source = file.source(tensor)
        name = f"{filename}/{own}"
        if not isinstance(source, Extent) or (source.offset, source.nbytes) not in records:
            raise VerificationError("tensor is not a record of its own", path=path, found=name)
        yield FileTensor(name, tensor.dtype, tensor.shape, source.offset)


def check_opens(path: Path, file: FilePlan) -> None:
    found = read_written(path, file.filename, OutputError)
    planned = {one.name: (one.dtype, one.shape, one.offset) for one in file.tensors}
    if planned != {name: (t.dtype, t.shape, t.offset) for name, t in found.items()}:
        raise VerificationError(
            "contains other tensors than planned",
            path=path,
            found=f"{len(found)} tensors",
            expected=len(file.tensors),
        )


def read_back(
    path: Path,
    file: FilePlan,
    crc32: int,
    verify: VerifyMode,
    readers: Executor,
    on_bytes: OnBytes,
) -> None:
    """Open a file as its readers do and, depending on ``verify``, read it again.

    Raises:
        VerificationError: it does not contain what was written.
        OutputError: the system refuses to read it.
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
    on_bytes: OnBytes = lambda _: None,
) -> bool:
    if is_link(path) or not is_file(path) or version(path).nbytes != file.nbytes:
        return False
    try:
        read_back(path, file, receipt.digests.crc32, VerifyMode.READBACK, readers, on_bytes)
    except VerificationError:
        return False
    return True


@contextmanager
def _read_again(path: Path, verify: VerifyMode) -> Iterator[None]:
    """Read a written file in the block, bypassing the page cache if ``verify`` is ``DISK``."""
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
        path, content = folder / side.filename, side.content or b""
        if side.origin is not None:
            with reading(side.origin), open_input(side.origin, side.version) as file:
                content = file.read_at(0, file.version().nbytes)
            if side.version is not None:
                check_unchanged(side.origin, side.version, len(content))
        with writing(path):
            write_durably(path, content)
        entries[side.filename] = FileEntry.of(content)
    return entries


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
