"""Read tensor bytes by range and check their CRC-32."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain, islice, starmap
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from threading import Lock, RLock
from typing import Protocol, Self

from zexport.errors import CheckpointError, DamagedCheckpointError
from zexport.ranges.calculator import Calculator, FactorCache
from zexport.ranges.computed import ComputedExtent
from zexport.ranges.coverage import Coverage, Range
from zexport.ranges.source import ByteSource, Extent, Mosaic, Record, Window, gather
from zexport.storage.files import is_local, open_input, version
from zexport.storage.os_errors import reading
from zexport.storage.storage import InputFile, Version

_OPEN_FILES_MIN, _OPEN_FILES_MAX = 64, 8192
_OTHER_DESCRIPTORS = 256
"""Descriptors for the rest of the process. Half of the others are for a second reader."""

_SMALL_NBYTES = 1 << 18
_TURN_SECONDS = 0.02
"""Threads with many small ranges take turns, because waking each other takes longer than reading.
They wait only briefly, so that a slow storage still gets requests from all."""

_GAP_CHUNK_NBYTES = 1 << 20
_EXTENTS_MAX = 1 << 12
"""With more extents, a window is too scattered to announce."""


class ReadableFile(Protocol):
    """A file, its version when it was opened, and its records by offset."""

    @property
    def path(self) -> Path: ...

    @property
    def version(self) -> Version: ...

    @property
    def records(self) -> tuple[Record, ...]: ...


class SourceReader:
    """Reads ranges of ``files`` from any number of threads.

    Every byte counts towards its record's CRC-32; ``finish`` reads the missing bytes of these
    records and compares. A file that changed is refused when it is opened and by ``finish``.
    ``zexport.storage.os_errors`` retries reads of buckets.

    Weights that are used are read through ``zexport.export.checked_reader``; other callers
    read only bytes that decide something.
    """

    def __init__(self, files: Iterable[ReadableFile]) -> None:
        self._files = {file.path: file for file in files}
        self._records = {path: file.records for path, file in self._files.items()}
        self._open = _OpenFiles(self._files)
        self._coverage = self.new_coverage()
        self._lock = Lock()
        self._nbytes_read = 0
        self._cache = FactorCache()
        self._turn = RLock()  # computed sources read while reading
        self.are_far = not all(map(is_local, self._files))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far, including those for checksums."""
        return self._nbytes_read

    def add(self, *files: ReadableFile) -> None:
        """Read these files too."""
        self._files |= {file.path: file for file in files}
        self._records |= {file.path: file.records for file in files}

    def new_coverage(self) -> Coverage:
        """Return an empty coverage of the same files."""
        return Coverage(self._records)

    def read_into(
        self, source: ByteSource, start: int, buffer: memoryview, coverage: Coverage | None = None
    ) -> None:
        """Fill ``buffer`` with the bytes of ``source`` from ``start``.

        Reads count in ``coverage``, by default the reader's own. Pass its ranges to ``take`` before
        ``finish``.
        """
        while isinstance(source, Window):
            start += source.start
            source = source.source
        if isinstance(source, Mosaic) and not (start | buffer.nbytes) % source.itemsize:
            gather(source, start, buffer, partial(self.read_into, coverage=coverage))
            return
        extents = source.extents(start, start + buffer.nbytes)
        first = next(extents, None)
        if first is None:
            return
        is_small = not self.are_far and first.nbytes < min(_SMALL_NBYTES, buffer.nbytes)
        has_turn = is_small and self._turn.acquire(timeout=_TURN_SECONDS)
        try:
            nbytes_read = self._fill(chain((first,), extents), buffer, coverage)
        finally:
            if has_turn:
                self._turn.release()
        with self._lock:
            self._nbytes_read += nbytes_read

    def _fill(
        self, extents: Iterable[Extent], buffer: memoryview, coverage: Coverage | None
    ) -> int:
        """Read ranges; return how many bytes were in files."""
        noted = self._coverage if coverage is None else coverage
        filled = nbytes_read = 0
        for extent in extents:
            path, offset, nbytes = extent.path, extent.offset, extent.nbytes
            part = buffer[filled : filled + nbytes]
            if isinstance(extent, ComputedExtent):
                again = partial(self.read_into, coverage=coverage)
                Calculator(again, self._cache).fill(extent.of, offset, part)
            else:
                self._read(path, offset, part)
                noted.of(path).enter(offset, part)
                nbytes_read += nbytes
            filled += nbytes
        return nbytes_read

    def expect(self, windows: Iterable[tuple[ByteSource, int, int]]) -> None:
        """Announce windows (source, start, stop) that will each be read once.

        A bucket fetches them early, in few requests.
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
        """Count ranges of another coverage, or of an earlier run."""
        self._coverage.add(ranges, in_digest=True)

    def finish(self, seen: Coverage | None = None) -> dict[Path, str]:
        """Compare the CRC-32 of every record that was read at least in part.

        ``seen`` is the coverage of all readers, to which this reader's is added. If given, a record
        is compared only if at most 1 MiB of it is unread.

        Returns:
            The digest of the records of each file (``FileCoverage.digest``).
        """
        buffer = memoryview(bytearray(_GAP_CHUNK_NBYTES))
        if seen is not None:
            seen.add(self._coverage.ranges())
        for path, own in self._coverage.files():
            coverage = own if seen is None else seen.of(path)
            gaps = {record: [*coverage.gaps(record, buffer.nbytes)] for record in own.touched()}
            if seen is not None:
                gaps = {m: g for m, g in gaps.items() if sum(b - a for a, b in g) <= buffer.nbytes}
            for start, stop in chain.from_iterable(gaps.values()):
                part = buffer[: stop - start]
                self._read(path, start, part)
                self._nbytes_read += part.nbytes
                coverage.enter(start, part)
            for record in gaps:
                crc = coverage.crc(record)
                if record.crc32 is not None and record.crc32 != crc:
                    raise DamagedCheckpointError(
                        f"CRC-32 of record {record.name!r} differs",
                        path=path,
                        found=f"{crc:08x}",
                        expected=f"{record.crc32:08x}",
                        hint="Copy the file again, or use another checkpoint",
                    )
        self.check_unchanged()
        digests = ((path, coverage.digest()) for path, coverage in self._coverage.files())
        return {path: digest for path, digest in digests if digest is not None}

    def check_unchanged(self) -> None:
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
    """Return the ranges of a window; none if it is computed or scattered."""
    found = list(islice(source.extents(start, stop), _EXTENTS_MAX + 1))
    is_plain = len(found) <= _EXTENTS_MAX and not any(isinstance(e, ComputedExtent) for e in found)
    return found if is_plain else []


def _read_exactly(file: InputFile, offset: int, part: memoryview) -> None:
    path, done, rest = file.path, 0, part
    while rest.nbytes:
        try:
            count = file.read(offset + done, rest)
        except OSError as cause:
            problem = f"cannot be read at byte {offset + done}: {cause.strerror}"
            raise CheckpointError(problem, path=path) from cause
        if count == 0:
            raise DamagedCheckpointError(
                "file is too short",
                path=path,
                found=f"{offset + done} bytes",
                expected=f"at least {offset + part.nbytes}",
                hint="Copy the file again",
            )
        done += count
        rest = part[done:]


class _OpenFiles:
    """Open files, as many as the process may have; the least recently used are closed first.

    ZeRO-3 reads all ranks' files in turn, so with fewer descriptors every read would open a file.
    """

    def __init__(self, files: dict[Path, ReadableFile]) -> None:
        self._files = files
        self._open_files: OrderedDict[Path, InputFile] = OrderedDict()
        self._users: Counter[Path] = Counter()
        self._seen: set[Path] = set()
        self._lock = Lock()
        soft, _ = getrlimit(RLIMIT_NOFILE)
        own = _OPEN_FILES_MAX if soft == RLIM_INFINITY else (soft - _OTHER_DESCRIPTORS) // 2
        self._limit = min(max(own, _OPEN_FILES_MIN), _OPEN_FILES_MAX)

    @property
    def lasting(self) -> Mapping[Path, InputFile]:
        """Files that stay open until the end: all, if the limit allows."""
        return self._open_files if len(self._files) <= self._limit else {}

    def take(self, path: Path) -> InputFile:
        """Return a file that stays open until ``give_back``."""
        with self._lock:
            file = self._open_files.get(path)
            if file is None:
                if len(self._open_files) >= self._limit:  # several at once: it visits all
                    idle = [path for path in self._open_files if not self._users[path]]
                    for other in idle[: max(self._limit // 8, 1)]:
                        self._open_files.pop(other).close()
                file = self._open_files[path] = self._open(path)
            else:
                self._open_files.move_to_end(path)
            self._users[path] += 1
            return file

    def give_back(self, path: Path) -> None:
        with self._lock:
            self._users[path] -= 1

    def check_unchanged(self) -> None:
        """Raise if a file that was opened has changed."""
        for path in sorted(self._seen):
            with reading(path):
                self._check(path, version(path))

    def close(self) -> None:
        with self._lock:
            while self._open_files:
                self._open_files.popitem()[1].close()

    def _open(self, path: Path) -> InputFile:
        with reading(path):
            file = open_input(path, self._files[path].version)
            try:
                self._check(path, file.version())
            except DamagedCheckpointError:
                file.close()
                raise
        self._seen.add(path)
        return file

    def _check(self, path: Path, found: Version) -> None:
        expected = self._files[path].version
        if found != expected:
            raise DamagedCheckpointError(
                "file changed while it was read",
                path=path,
                found=found,
                expected=expected,
                hint="Run the command again when nothing writes to the checkpoint",
            )
