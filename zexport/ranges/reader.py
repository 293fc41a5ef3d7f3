"""Tensor bytes by range, with the proof that what was read is what was saved."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain, islice, starmap
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from threading import Lock, RLock
from types import TracebackType
from typing import Protocol, Self

from zexport.errors import CheckpointError, DamagedCheckpointError
from zexport.ranges.calculator import Calculator, Kept
from zexport.ranges.computed import ComputedExtent
from zexport.ranges.coverage import Ledger, Range
from zexport.ranges.source import ByteSource, Extent, Member, Mosaic, Window, gather
from zexport.storage.files import is_local, open_input, version
from zexport.storage.storage import InputFile, Version

_OPEN_FILES_MIN, _OPEN_FILES_MAX = 64, 8192
_OTHER_DESCRIPTORS = 256
"""Left to the rest of the process: outputs, streams, what a caller has open. Of the others half are
left to a second reader of the same files."""

_SMALL_NBYTES = 1 << 18
_TURN_SECONDS = 0.02
"""Threads that read many small ranges take turns, or they would wake one another at each. But none
waits for long: a storage that answers slowly is asked by all at once."""

_GAP_CHUNK_NBYTES = 1 << 20
_EXTENTS_MAX = 1 << 12
"""Of a piece of a tensor; with more they are too small to be fetched apart."""


class ReadableFile(Protocol):
    """A file that may be read, and what was known of it beforehand (a plan's ``SourceFile``)."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def version(self) -> Version:
        """What it was beforehand."""
        ...

    @property
    def members(self) -> tuple[Member, ...]:
        """Its records, by ascending offset."""
        ...


class SourceReader:
    """Bytes of a fixed list of files, by range, from any number of threads.

    Every byte that belongs to a record goes into that record's CRC-32; ``finish`` reads what is
    missing of the records that were touched, and compares. A file that is no longer as it was
    beforehand is refused, when it is opened and again by ``finish``. A storage that falters is
    tried again (``zexport.storage.retries``).

    Weights that are used are read by ``zexport.export.proof``; by this alone only what decides how
    they are read.

    Args:
        files: all that may be read.
    """

    def __init__(self, files: Iterable[ReadableFile]) -> None:
        self._files = {file.path: file for file in files}
        self._members = {path: file.members for path, file in self._files.items()}
        self._open = _OpenFiles(self._files)
        self._ledger = self.new_ledger()
        self._lock = Lock()
        self._nbytes_read = 0
        self._kept = Kept()
        self._turn = RLock()  # what is computed reads within a reading
        self.are_far = not all(map(is_local, self._files))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far, those read again for a CRC included."""
        return self._nbytes_read

    def new_ledger(self) -> Ledger:
        """An empty ledger, for a part of the reading that is accounted for by itself."""
        return Ledger(self._members)

    def read_into(
        self, source: ByteSource, start: int, buffer: memoryview, ledger: Ledger | None = None
    ) -> None:
        """Fill ``buffer`` with the bytes of ``source`` from ``start`` on.

        Args:
            source: lies in the files of this reader.
            start: byte of it.
            buffer: as much as is wanted.
            ledger: where to note what was read; this reader's own where none is given. What is
                noted elsewhere counts for ``finish`` once it is handed to ``take``.
        """
        while isinstance(source, Window):
            start += source.start
            source = source.source
        if isinstance(source, Mosaic) and not (start | buffer.nbytes) % source.itemsize:
            gather(source, start, buffer, partial(self.read_into, ledger=ledger))
            return
        extents = source.extents(start, start + buffer.nbytes)
        first = next(extents, None)
        if first is None:
            return
        is_small = not self.are_far and first.nbytes < min(_SMALL_NBYTES, buffer.nbytes)
        has_turn = is_small and self._turn.acquire(timeout=_TURN_SECONDS)
        try:
            nbytes_read = self._fill(chain((first,), extents), buffer, ledger)
        finally:
            if has_turn:
                self._turn.release()
        with self._lock:
            self._nbytes_read += nbytes_read

    def _fill(self, extents: Iterable[Extent], buffer: memoryview, ledger: Ledger | None) -> int:
        """Read ranges, one after another; how many of the bytes lie in files as they are."""
        noted = self._ledger if ledger is None else ledger
        filled = nbytes_read = 0
        for extent in extents:
            path, offset, nbytes = extent.path, extent.offset, extent.nbytes
            part = buffer[filled : filled + nbytes]
            if isinstance(extent, ComputedExtent):
                again = partial(self.read_into, ledger=ledger)
                Calculator(again, self._kept).fill(extent.of, offset, part)
            else:
                self._read(path, offset, part)
                noted.of(path).enter(offset, part)
                nbytes_read += nbytes
            filled += nbytes
        return nbytes_read

    def expect(self, windows: Iterable[tuple[ByteSource, int, int]]) -> None:
        """Say which bytes (source, start, stop) will be read soon, each once.

        Object storage fetches them ahead, in few requests; a disk needs no such help.
        """
        if not self.are_far:
            return
        ranges: defaultdict[Path, list[tuple[int, int]]] = defaultdict(list)
        for extent in chain.from_iterable(starmap(_plain_extents, windows)):
            ranges[extent.path].append((extent.offset, extent.offset + extent.nbytes))
        for path, own in ranges.items():
            self._open.take(path).expect(own)
            self._open.give_back(path)

    def take(self, ranges: Mapping[Path, Iterable[Range]]) -> None:
        """Count ranges that were read with another ledger, now or before a stop."""
        self._ledger.take(ranges)

    def finish(self, seen: Ledger | None = None) -> dict[Path, str]:
        """Compare the CRC-32 of every record of which a byte was read.

        Args:
            seen: what others read of the files, to which this reader's is added. With it a record
                is compared when no more than a MiB of it is unread by all of them.

        Returns:
            For each file of which ranges were taken, the digest of its records
            (``FileLedger.digest``).
        """
        buffer = memoryview(bytearray(_GAP_CHUNK_NBYTES))
        if seen is not None:
            seen.take(self._ledger.ranges())
        for path, own in self._ledger.files():
            ledger = own if seen is None else seen.of(path)
            gaps = {member: [*ledger.gaps(member, buffer.nbytes)] for member in own.touched()}
            if seen is not None:
                gaps = {m: g for m, g in gaps.items() if sum(b - a for a, b in g) <= buffer.nbytes}
            for start, stop in chain.from_iterable(gaps.values()):
                part = buffer[: stop - start]
                self._read(path, start, part)
                self._nbytes_read += part.nbytes
                ledger.enter(start, part)
            for member in gaps:
                _compare(path, member, ledger.crc(member))
        self.check_unchanged()
        digests = ((path, ledger.digest()) for path, ledger in self._ledger.files())
        return {path: digest for path, digest in digests if digest is not None}

    def check_unchanged(self) -> None:
        """Raise if a file changed since it was opened here."""
        self._open.check_unchanged()

    def _read(self, path: Path, offset: int, part: memoryview) -> None:
        if (file := self._open.lasting.get(path)) is not None:
            _read_exactly(file, offset, part)
            return
        file = self._open.take(path)
        try:
            _read_exactly(file, offset, part)
        finally:
            self._open.give_back(path)


def _plain_extents(source: ByteSource, start: int, stop: int) -> list[Extent]:
    """The ranges of a source that are read as they are; what is gathered from many small is not."""
    found = list(islice(source.extents(start, stop), _EXTENTS_MAX + 1))
    is_plain = len(found) <= _EXTENTS_MAX and not any(isinstance(e, ComputedExtent) for e in found)
    return found if is_plain else []


def _read_exactly(file: InputFile, offset: int, part: memoryview) -> None:
    path, done, rest = file.path, 0, part
    while rest.nbytes:
        try:
            count = file.read(offset + done, rest)
        except OSError as cause:
            raise CheckpointError(
                f"cannot be read at byte {offset + done}: {cause.strerror}", path=path
            ) from cause
        if count == 0:
            raise DamagedCheckpointError(
                "ends too early",
                path=path,
                found=f"{offset + done} bytes",
                expected=f"at least {offset + part.nbytes}",
                hint="Copy the checkpoint again",
            )
        done += count
        rest = part[done:]


def _compare(path: Path, member: Member, found: int) -> None:
    if member.crc32 is not None and found != member.crc32:
        raise DamagedCheckpointError(
            f"record {member.name!r} does not hold the bytes that were saved",
            path=path,
            found=f"CRC-32 {found:08x}",
            expected=f"{member.crc32:08x}",
            hint="Copy the file again, or use another checkpoint",
        )


class _OpenFiles:
    """Descriptors of the files in use and of those used last, as many as the process may have.

    ZeRO-3 asks for every rank's file in turn, so that with fewer descriptors than ranks each piece
    of a tensor would open a file anew.
    """

    def __init__(self, files: dict[Path, ReadableFile]) -> None:
        self._files = files
        self._opened_files: OrderedDict[Path, InputFile] = OrderedDict()
        self._users: Counter[Path] = Counter()
        self._seen: set[Path] = set()
        self._lock = Lock()
        soft, _ = getrlimit(RLIMIT_NOFILE)
        own = _OPEN_FILES_MAX if soft == RLIM_INFINITY else (soft - _OTHER_DESCRIPTORS) // 2
        self._limit = min(max(own, _OPEN_FILES_MIN), _OPEN_FILES_MAX)
        self.lasting: Mapping[Path, InputFile] = {}
        """Those open that none is closed before the end, as all are where all fit."""
        if len(files) <= self._limit:
            self.lasting = self._opened_files

    def take(self, path: Path) -> InputFile:
        """A file, which stays open until it is given back."""
        with self._lock:
            file = self._opened_files.get(path)
            if file is None:
                if len(self._opened_files) >= self._limit:
                    self._close_idle()
                file = self._opened_files[path] = self._open(path)
            else:
                self._opened_files.move_to_end(path)
            self._users[path] += 1
            return file

    def give_back(self, path: Path) -> None:
        """Say that a file that was taken is no longer used."""
        with self._lock:
            self._users[path] -= 1

    def check_unchanged(self) -> None:
        for path in sorted(self._seen):
            try:
                _check_unchanged(self._files[path], version(path))
            except OSError as cause:
                raise _unreadable(path, cause) from cause

    def close(self) -> None:
        with self._lock:
            while self._opened_files:
                self._opened_files.popitem()[1].close()

    def _open(self, path: Path) -> InputFile:
        try:
            file = open_input(path, self._files[path].version)
        except OSError as cause:
            raise _unreadable(path, cause) from cause
        try:
            _check_unchanged(self._files[path], file.version())
        except DamagedCheckpointError:
            file.close()
            raise
        self._seen.add(path)
        return file

    def _close_idle(self) -> None:
        """Close what was not used for the longest time, some at once: it takes a look at each."""
        idle = [path for path in self._opened_files if not self._users[path]]
        for path in idle[: max(self._limit // 8, 1)]:
            self._opened_files.pop(path).close()


def _unreadable(path: Path, cause: OSError) -> CheckpointError:
    return CheckpointError(f"cannot be read: {cause.strerror}", path=path)


def _check_unchanged(file: ReadableFile, found: Version) -> None:
    if found != file.version:
        raise DamagedCheckpointError(
            "was changed while it was read",
            path=file.path,
            found=found,
            expected=file.version,
            hint="Run again when nothing writes to the checkpoint",
        )
