"""An object that is being written: its pieces come in any order and are sent in theirs."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Self

from zexport.store import objects
from zexport.store.address import Address
from zexport.store.client import store_of
from zexport.store.refusals import refusals

if TYPE_CHECKING:
    from obstore import WritableFile

_PART_NBYTES = 8 << 20
_PARTS_MAX = 9_000
"""S3 takes 10,000 parts of an upload."""
_PARTS_AT_ONCE = 4


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
