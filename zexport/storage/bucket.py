"""Buckets as a ``Storage``: a folder is a common prefix of object names."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

import obstore

from zexport.storage import requests
from zexport.storage.blocks import ReadAhead
from zexport.storage.client import asking
from zexport.storage.location import Address
from zexport.storage.retries import steadily
from zexport.storage.storage import Entry, Kind, OutputFile, Stat, Storage, Version

if TYPE_CHECKING:
    from obstore import WritableFile

_WINDOW_NBYTES = 64 << 10
"""The least to fetch: a zip directory, a header, or a whole small file."""
_WINDOWS_MAX = 256
_PART_NBYTES = 8 << 20
_PARTS_MAX = 9_000
"""S3 accepts 10,000 parts."""
_PARTS_AT_ONCE = 4


@lru_cache(_WINDOWS_MAX)
def _version_of(path: Address, listed: Version) -> Version:  # noqa: ARG001 - a cache key
    """Return the version of an object; ask for it once while the listing stays the same."""
    return requests.head(path)


@lru_cache(_WINDOWS_MAX)
def _window(path: Address, version: Version, number: int) -> memoryview:
    """Return part of an object, since a rank file is opened several times for a few bytes each.

    Windows count from the end, where a zip has its directory.
    """
    stop = version.nbytes - number * _WINDOW_NBYTES
    return requests.get(path, max(stop - _WINDOW_NBYTES, 0), stop, version.etag)


class ObjectInput(ReadAhead):
    """One version of an object; reads fail once it is replaced."""

    def __init__(self, path: Address, version: Version) -> None:
        super().__init__()
        self.path = path
        self._version = version

    def version(self) -> Version:
        return self._version

    def fetch(self, start: int, stop: int) -> memoryview:
        if start >= self._version.nbytes:  # stores refuse such a range
            return memoryview(b"")
        return requests.get(self.path, start, stop, self._version.etag)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        end = self._version.nbytes
        stop = min(offset + nbytes, end)
        if offset >= stop:
            return b""
        first, last = ((end - at) // _WINDOW_NBYTES for at in (stop, offset + 1))
        if last - first > 1:  # too large to cache
            return bytes(self.fetch(offset, stop))
        parts = [_window(self.path, self._version, number) for number in range(last, first - 1, -1)]
        begin = max(end - (last + 1) * _WINDOW_NBYTES, 0)
        return b"".join(parts)[offset - begin : stop - begin]


class ObjectOutput(OutputFile):
    """An object that appears when complete, uploaded in parts; bytes written ahead wait in memory.

    A new object is sent in one request, which fails if it exists.
    """

    def __init__(self, path: Address, *, is_new: bool, nbytes: int) -> None:
        self.path = path
        self._is_new = is_new
        self._part_nbytes = max(_PART_NBYTES, -(-nbytes // _PARTS_MAX))
        self._waiting: dict[int, bytes] = {}
        self._sent = 0
        self._small = bytearray()
        self._writer: WritableFile | None = None
        self._lock = Lock()

    def write(self, data: bytes | memoryview, offset: int) -> None:
        with self._lock:
            if offset < self._sent:
                raise AssertionError(f"{self.path}: byte {offset} was sent already")
            if offset > self._sent:
                self._waiting[offset] = bytes(data)
                return
            self._send(data)
            while (follows := self._waiting.pop(self._sent, None)) is not None:
                self._send(follows)

    def _send(self, data: bytes | memoryview) -> None:
        self._sent += memoryview(data).nbytes
        if self._is_new:
            self._small += data
            return
        with asking(self.path) as store:
            if self._writer is None:
                self._writer = obstore.open_writer(
                    store,
                    self.path.key,
                    buffer_size=self._part_nbytes,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            self._writer.write(bytes(data))  # obstore keeps the buffer, which is reused

    def complete(self) -> None:
        if self._waiting:
            raise AssertionError(f"{self.path}: bytes {self._sent} and more were not written")
        if self._writer is None:
            requests.put(self.path, bytes(self._small), is_new=self._is_new)
            return
        writer, self._writer = self._writer, None
        with asking(self.path), requests.changing():
            writer.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            abandoned = InterruptedError("abandoned")
            with suppress(OSError), asking(self.path):  # the first failure was raised before
                writer.__exit__(InterruptedError, abandoned, None)


class ObjectStorage(Storage[Address]):
    def stat(self, path: Address) -> Stat | None:
        """Return the stat as its folder lists it, or its own if this user may not list.

        Some stores keep empty folders; these do not count.
        """
        if not path.key:
            return Stat(Kind.FOLDER)
        above: requests.Listing | None = None
        with suppress(PermissionError):
            above = requests.listing(path.parent)
        if above is None or path.name in above.folders:
            here = requests.listing(path)
            if here.files or here.folders:
                return Stat(Kind.FOLDER)
        found = None if above is None else above.files.get(path.name)
        if above is None:
            with suppress(FileNotFoundError):
                found = requests.head(path)
        return None if found is None else Stat(Kind.FILE, found, found.mtime_ns)

    def entries(self, folder: Address) -> list[Entry]:
        found = requests.listing(folder)
        folders = [Entry(name, Kind.FOLDER) for name in found.folders]
        return folders + [Entry(n, Kind.FILE) for n in found.files if n not in found.folders]

    def version(self, path: Address) -> Version:
        return requests.head(path)

    def open(self, path: Address, known: Version | None) -> ObjectInput:
        with suppress(PermissionError):  # may read, but not list
            if known is None and (listed := requests.listed(path)):
                known = _version_of(path, listed)
        return ObjectInput(path, known or requests.head(path))

    def create(self, path: Address, *, is_new: bool, nbytes: int) -> ObjectOutput:
        return ObjectOutput(path, is_new=is_new, nbytes=nbytes)

    def put(self, path: Address, content: bytes, *, is_new: bool, note: str) -> None:
        requests.put(path, content, is_new=is_new, note=note)

    def note(self, path: Address) -> str:
        with asking(path) as store:
            found = obstore.get(store, path.key, options={"head": True})
            return found.attributes.get(requests.NOTE, "")

    def delete(self, paths: list[Address]) -> None:
        """Remove objects, with retries: obstore does not repeat a POST."""
        keys: list[str] = []
        for path in paths:
            is_object = requests.listed(path) is not None
            keys += [one.key for one in ([path] if is_object else sorted(requests.below(path)))]

        def act() -> None:
            with asking(paths[0]) as store, requests.changing():
                obstore.delete(store, keys)

        if keys:
            steadily(act)

    def refresh(self, folder: Address, *, below: bool = False) -> None:
        if below:
            requests.list_below(folder)
        else:
            requests.forget_listings()


BUCKETS = ObjectStorage()
