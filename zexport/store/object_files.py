"""An object as an open file: read here and there, or by range, or written in any order."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from io import RawIOBase
from threading import Lock
from typing import TYPE_CHECKING, Self, overload

from zexport.store import objects
from zexport.store.address import Address
from zexport.store.blocks import Blocks
from zexport.store.client import refusals, store_of
from zexport.store.versions import Version

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from obstore import WritableFile

_WINDOW_NBYTES = 64 << 10
"""What is fetched at the least: a zip's directory, a header or a small file whole."""
_HEAD_NBYTES = 1 << 20
_KNOWN_NBYTES_MAX = 16 << 20
_PART_NBYTES = 8 << 20
_PARTS_MAX = 9_000
"""S3 takes 10,000 parts of an upload."""
_PARTS_AT_ONCE = 4
_lock = Lock()


class _Known:
    """What small reads have found of an object: its version, and windows of its bytes."""

    def __init__(self, listed: Version) -> None:
        self.listed = listed
        self.version: Version | None = None
        self.windows: dict[int, memoryview] = {}

    def find(self, start: int, stop: int) -> bytes | None:
        """The bytes, where a window has them all."""
        for begin, data in list(self.windows.items()):  # other threads add some
            if begin <= start and stop <= begin + data.nbytes:
                return bytes(data[start - begin : stop - begin])
        return None

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(data.nbytes for data in list(self.windows.values()))


_known: OrderedDict[Address, _Known] = OrderedDict()
"""Of the objects read last: a rank file is opened several times for a few bytes each."""


def _known_of(path: Address) -> _Known:
    """What is known of an object that is as it was when this was learnt."""
    listed = objects.listed(path) or objects.head(path)
    known = _known.pop(path, None)
    if known is None or known.listed != listed:
        known = _Known(listed)
    _known[path] = known
    while sum(one.nbytes for one in _known.values()) > _KNOWN_NBYTES_MAX and len(_known) > 1:
        _known.popitem(last=False)
    return known


class ObjectReader(RawIOBase):
    """An object, open for reading at any place, in windows that are kept for a while."""

    def __init__(self, path: Address) -> None:
        self.path = path
        self._position = 0
        with _lock:
            self._known = _known_of(path)
        if self._known.version is None:
            self._fetch(0)

    @property
    def version(self) -> Version:
        """What all that is read is of."""
        return self._known.version or self._known.listed

    def _fetch(self, start: int, nbytes: int = 0) -> None:
        """Fetch a window; near the end, that whole: a zip has its directory there."""
        if not self._known.listed.nbytes:
            self._known.version = objects.head(self.path)
            return
        etag = self._known.version.etag if self._known.version is not None else ""
        begin = min(start, max(self.version.nbytes - _WINDOW_NBYTES, 0))
        stop = min(max(start + nbytes, begin + _WINDOW_NBYTES), self.version.nbytes)
        self._known.version, data = objects.get(self.path, begin, stop, etag)
        self._known.windows[begin] = data

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes of it, or what there is of them; its position stays where it is."""
        stop = min(offset + nbytes, self.version.nbytes)
        if offset >= stop:
            return b""
        if (found := self._known.find(offset, stop)) is None:
            self._fetch(offset, stop - offset)
            found = self._known.find(offset, stop)
        return found or b""

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """How many bytes were read into the buffer."""
        view = memoryview(buffer).cast("B")
        data = self.read_at(self._position, view.nbytes)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        """All bytes from here on."""
        data = self.read_at(self._position, self.version.nbytes)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place; where that is."""
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.version.nbytes}
        self._position = origins[whence] + offset
        return self._position

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._position

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True


class ObjectBytes:
    """An object as bytes: those from the first on are held as far as they were asked for.

    What lies far behind these is fetched by itself.
    """

    def __init__(self, file: ObjectReader) -> None:
        self._file = file
        self._head = b""

    def __len__(self) -> int:
        return self._file.version.nbytes

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> bytes: ...

    def __getitem__(self, place: int | slice) -> int | bytes:
        if isinstance(place, int):
            self._reach(place + 1)
        elif place.start <= len(self._head):
            self._reach(place.stop)
        else:
            return self._file.read_at(place.start, place.stop - place.start)
        return self._head[place]

    def find(self, wanted: bytes, start: int, stop: int) -> int:
        """Where ``wanted`` begins between two places; -1 where it is not."""
        stop = min(stop, len(self))
        while (at := self._head.find(wanted, start, stop)) < 0 and len(self._head) < stop:
            self._reach(len(self._head) + 1)
        return at

    def _reach(self, stop: int) -> None:
        held, stop = len(self._head), min(stop, len(self))
        if stop > held:
            nbytes = max(stop - held, held, _HEAD_NBYTES)
            self._head += self._file.read_at(held, nbytes)


class ObjectInput:
    """An object that is being read by range: that of the version that was known of it, or none."""

    def __init__(self, path: Address, known: Version | None = None) -> None:
        self.path = path
        self._version = objects.head(path) if known is None else known
        self._blocks = Blocks(self._fetch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what was fetched."""
        self._blocks.close()

    def version(self) -> Version:
        """What all that is read is of."""
        return self._version

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say that ranges (start, stop) will be read, each once: they are fetched ahead."""
        self._blocks.expect(ranges)

    def read(self, offset: int, part: memoryview) -> int:
        """How many bytes from ``offset`` on were read into ``part``: 0 only at the end."""
        nbytes = min(part.nbytes, self._version.nbytes - offset)
        return self._blocks.read(offset, part[:nbytes]) if nbytes > 0 else 0

    def forget(self) -> None:
        """There is no copy in memory that could be forgotten."""

    def _fetch(self, start: int, stop: int) -> memoryview:
        return objects.get(self.path, start, stop, self._version.etag)[1]


class ObjectOutput:
    """An object of ``nbytes``, which appears when it is complete, or never.

    It is uploaded in parts; a piece that lies ahead of what was sent waits for what is between.
    What is ``is_new`` is small, sent at once when it is complete, and refused if it is there then.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, nbytes: int) -> None:
        """A store has room."""

    def sync(self) -> None:
        """Nothing of it is there before it is complete."""

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Send ``data``, or have it wait for what lies before."""
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
        with refusals(self.path):
            if self._writer is None:
                import obstore  # noqa: PLC0415 - for addresses alone

                self._writer = obstore.open_writer(
                    store_of(self.path.root_url),
                    self.path.key,
                    buffer_size=self._part_nbytes,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            self._writer.write(bytes(data))  # it keeps what it is given, and a buffer is used again

    def complete(self) -> None:
        """Have the object appear."""
        with self._lock:
            if self._waiting:
                raise AssertionError(f"{self.path}: bytes {self._sent} and more were not written")
            writer, self._writer = self._writer, None
            if writer is None:
                objects.put(self.path, bytes(self._small), is_new=self._is_new)
                return
            with refusals(self.path):
                writer.close()
            objects.forget_listings()

    def close(self) -> None:
        """Abandon what is not complete: its upload is aborted, so that its parts cost nothing."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            abandoned = InterruptedError("abandoned")
            with suppress(OSError), refusals(self.path):  # what failed before is told
                writer.__exit__(InterruptedError, abandoned, None)
