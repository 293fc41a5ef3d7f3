"""When a file is still the same: its size and time, and of an object its ETag."""

from __future__ import annotations

from msgspec import Struct


class Version(Struct, frozen=True):
    """What tells whether a file is still as it was: its size, and when it was last modified.

    Of an object also its ETag, by which every reading of it is bound to this very content.
    """

    nbytes: int
    mtime_ns: int
    etag: str = ""

    def __str__(self) -> str:
        if self.etag:
            return f"{self.nbytes} bytes, ETag {self.etag}"
        return f"{self.nbytes} bytes, modified at {self.mtime_ns} ns"
