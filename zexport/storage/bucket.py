"""Buckets as a ``Storage``: a folder is a common prefix of object names.

obstore retries status 429, 5xx and lost connections.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from posixpath import basename
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import obstore
from msgspec import Struct
from obstore.exceptions import AlreadyExistsError

from zexport.storage.blocks import ReadAhead
from zexport.storage.client import asking
from zexport.storage.location import Address
from zexport.storage.os_errors import CUT_SHORT, steadily
from zexport.storage.storage import Entry, Kind, OutputFile, Stat, Storage, Version

if TYPE_CHECKING:
    from obstore import ObjectMeta, WritableFile
    from obstore.store import ObjectStore

_T = TypeVar("_T")

_LISTING_SECONDS = 1.0
_WINDOW_NBYTES = 64 << 10
"""The least to fetch: a zip directory, a header, or a whole small file."""
_WINDOWS_MAX = 256
_PART_NBYTES = 8 << 20
_PARTS_MAX = 9_000
"""S3 accepts 10,000 parts."""
_PARTS_AT_ONCE = 4


def _version_of(meta: ObjectMeta) -> Version:
    mtime_ns = int(meta["last_modified"].timestamp()) * 1_000_000_000
    return Version(meta["size"], mtime_ns, meta["e_tag"] or "")


def _head(address: Address) -> Version:
    with asking(address) as store:
        return _version_of(obstore.head(store, address.key))


# --- listings ---


class _Listing(Struct, frozen=True):
    """Objects and folders in a folder; some stores list other ETags than they send."""

    files: Mapping[str, Version]
    folders: frozenset[str]


class _Recent:
    """Listings and when they were made: a folder is asked about many names."""

    listings: ClassVar[dict[Address, tuple[float, _Listing]]] = {}


def forget_listings() -> None:
    """List again on the next look at a folder; drop listings under way, too."""
    _Recent.listings = {}


@contextmanager
def _changing(address: Address) -> Iterator[ObjectStore]:
    """Yield the client of a bucket for a change; forget listings afterwards."""
    try:
        with asking(address) as store:
            yield store
    finally:
        forget_listings()


def _listed(folder: Address, pages: Callable[[ObjectStore, str | None], _T]) -> _T:
    """Return the pages of a listing, whole even if the connection is cut."""

    def ask() -> _T:
        with asking(folder) as store:
            return pages(store, folder.key or None)

    return steadily(ask, on=CUT_SHORT)


def _listing(folder: Address) -> _Listing:
    """Return the listing of a folder, at most a second old; empty if it does not exist."""
    recent = _Recent.listings
    at, known = recent.get(folder, (0.0, None))
    if known is not None and time.monotonic() - at < _LISTING_SECONDS:
        return known
    found = _listed(folder, obstore.list_with_delimiter)
    objects = [one for one in found["objects"] if one["path"] != folder.key]  # a folder marker
    files = {basename(one["path"]): _version_of(one) for one in objects}
    fresh = _Listing(files, frozenset(map(basename, found["common_prefixes"])))
    recent[folder] = time.monotonic(), fresh
    return fresh


def _objects_below(folder: Address) -> dict[Address, Version]:
    """Return the objects below a folder at any depth."""
    top = Address(folder.root_url)
    found = _listed(folder, lambda store, key: [*chain.from_iterable(obstore.list(store, key))])
    below = {top / one["path"]: _version_of(one) for one in found}
    below.pop(folder, None)  # a folder marker
    return below


def _listed_version(address: Address) -> Version | None:
    """Return the version of an object as its folder lists it; ``None`` if missing."""
    return _listing(address.parent).files.get(address.name) if address.key else None


# --- reading and writing ---


def _get(address: Address, start: int, stop: int, etag: str) -> memoryview:
    """Return the bytes of an object from ``start`` to ``stop``, or to its end.

    Raises:
        OSError: its ETag is not ``etag``, if not empty.
    """
    options: Any = {"range": (start, stop)} | ({"if_match": etag} if etag else {})
    with asking(address) as store:
        result = obstore.get(store, address.key, options=options)
        version, data = _version_of(result.meta), memoryview(result.bytes())
    if data.nbytes != max(min(stop, version.nbytes) - start, 0):
        raise OSError(errno.EIO, "the store's answer is too short", address)
    return data


@lru_cache(_WINDOWS_MAX)
def _head_once(path: Address, listed: Version) -> Version:  # noqa: ARG001 - a cache key
    """Return the version of an object; ask for it once while the listing stays the same."""
    return _head(path)


@lru_cache(_WINDOWS_MAX)
def _window(path: Address, version: Version, number: int) -> memoryview:
    """Return part of an object, since a rank file is opened several times for a few bytes each.

    Windows count from the end, where a zip has its directory.
    """
    stop = version.nbytes - number * _WINDOW_NBYTES
    return _get(path, max(stop - _WINDOW_NBYTES, 0), stop, version.etag)


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
        return _get(self.path, start, stop, self._version.etag)

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
    """An object that appears when complete, sent in parts; bytes written ahead wait in memory."""

    def __init__(self, path: Address, *, nbytes: int) -> None:
        self.path = path
        self._part_nbytes = max(_PART_NBYTES, -(-nbytes // _PARTS_MAX))
        self._waiting: dict[int, bytes] = {}
        self._sent = 0
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
        writer, self._writer = self._writer, None
        if writer is not None:
            with _changing(self.path):
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
        above: _Listing | None = None
        with suppress(PermissionError):
            above = _listing(path.parent)
        if above is None or path.name in above.folders:
            here = _listing(path)
            if here.files or here.folders:
                return Stat(Kind.FOLDER)
        found = None if above is None else above.files.get(path.name)
        if above is None:
            with suppress(FileNotFoundError):
                found = _head(path)
        return None if found is None else Stat(Kind.FILE, found, found.mtime_ns)

    def entries(self, folder: Address) -> list[Entry]:
        found = _listing(folder)
        folders = [Entry(name, Kind.FOLDER) for name in found.folders]
        return folders + [Entry(n, Kind.FILE) for n in found.files if n not in found.folders]

    def version(self, path: Address) -> Version:
        return _head(path)

    def open(self, path: Address, known: Version | None) -> ObjectInput:
        with suppress(PermissionError):  # may read, but not list
            if known is None and (listed := _listed_version(path)):
                known = _head_once(path, listed)
        return ObjectInput(path, known or _head(path))

    def create(self, path: Address, *, is_new: bool, nbytes: int) -> ObjectOutput:  # noqa: ARG002
        return ObjectOutput(path, nbytes=nbytes)

    def put(self, path: Address, content: bytes, *, is_new: bool) -> None:
        """Write a small object in one request.

        Raises:
            FileExistsError: it exists with other content, and ``is_new``. With the same content,
                obstore has repeated a request whose answer was lost.
        """
        how: Any = {"mode": "create" if is_new else "overwrite", "use_multipart": False}
        with _changing(path) as store:
            try:
                obstore.put(store, path.key, content, **how)
            except AlreadyExistsError:
                if bytes(obstore.get(store, path.key).bytes()) != content:
                    raise

    def delete(self, paths: list[Address]) -> None:
        """Remove objects, with retries: obstore does not repeat a POST."""
        keys: list[str] = []
        for path in paths:
            is_object = _listed_version(path) is not None
            keys += [one.key for one in ([path] if is_object else sorted(_objects_below(path)))]

        def act() -> None:
            with _changing(paths[0]) as store:
                obstore.delete(store, keys)

        if keys:
            steadily(act)

    def refresh(self, folder: Address, *, below: bool = False) -> None:
        if not below:
            forget_listings()
            return
        recent = _Recent.listings
        files: dict[Address, dict[str, Version]] = {folder: {}}
        folders: dict[Address, set[str]] = {}
        for path, version in _objects_below(folder).items():
            files.setdefault(path.parent, {})[path.name] = version
            while (path := path.parent) != folder:
                folders.setdefault(path.parent, set()).add(path.name)
        now = time.monotonic()
        for one in {*files, *folders}:
            recent[one] = now, _Listing(files.get(one, {}), frozenset(folders.get(one, ())))


BUCKETS = ObjectStorage()
