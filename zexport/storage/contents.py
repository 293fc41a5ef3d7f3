"""Contents of files as bytes or JSON, within limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zexport.errors import DamagedCheckpointError
from zexport.storage.files import open_input, write_durably
from zexport.storage.json import JsonObject
from zexport.storage.location import Address
from zexport.storage.os_errors import reading
from zexport.storage.storage import InputFile

if TYPE_CHECKING:
    from zexport.storage.requests import Edition

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that ``git lfs pull`` has not replaced yet."""

_BLOCK_NBYTES = 1 << 20

_NBYTES_MAX = 64 << 20
_MEMORY_NBYTES_MAX = 128 << 20
"""Limit of ``_parsed``'s estimate. An index of 100,000 weights takes a third; 60 MB of empty lists
would take more than a gigabyte."""

_REPAIR = "Repair or remove the file"

_DICT_NBYTES, _LIST_NBYTES, _ITEM_NBYTES = 240, 96, 180  # CPython 3.11 to 3.14, upwards
_CHARACTER_NBYTES = 4  # of a text with a character beyond U+FFFF


def read_whole(path: Path) -> bytes:
    """Return the content of one of zexport's own files, however large."""
    with open_input(path) as file:
        return file.read_at(0, file.version().nbytes)


def read_regular(path: Path, nbytes_max: int) -> bytes | None:
    """Return the content of a file; ``None`` if it has more than ``nbytes_max`` bytes."""
    content = read_range(path, 0, nbytes_max + 1)
    return content if len(content) <= nbytes_max else None


def read_range(path: Path, offset: int, nbytes: int) -> bytes:
    """Return ``nbytes`` bytes of a file from ``offset``, fewer only at its end."""
    with open_input(path) as file:
        return file.read_at(offset, nbytes)


class FileBytes:
    """A file to read like ``bytes``, mostly forward; a megabyte is in memory."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._start = 0
        self._held = b""

    def __len__(self) -> int:
        return self._file.version().nbytes

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self._read(place.start, place.stop)
        return self._read(place, place + 1)[0]

    def find(self, wanted: bytes, start: int, stop: int) -> int:
        """Find a single byte."""
        while start < stop and self._read(start, start + 1):
            at = self._held.find(wanted, start - self._start, stop - self._start)
            if at >= 0:
                return self._start + at
            start = self._start + len(self._held)
        return -1

    def _read(self, start: int, stop: int) -> bytes:
        if start < self._start or stop > self._start + len(self._held):
            self._start = start
            self._held = self._file.read_at(start, max(stop - start, _BLOCK_NBYTES))
        return self._held[start - self._start : stop - self._start]


def read_edition(path: Path) -> tuple[bytes, Edition | None]:
    """Return the content of a small file, and of an object its edition."""
    if not isinstance(path, Address):
        return read_whole(path), None
    from zexport.storage import requests  # noqa: PLC0415 - only for addresses

    return requests.read_edition(path)


def rewrite(path: Path, content: bytes, known: Edition | None) -> Edition | None:
    """Write a small file durably, an object only if its edition is ``known``; return the new."""
    if isinstance(path, Address):
        from zexport.storage import requests  # noqa: PLC0415 - only for addresses

        return requests.replace(path, content, known)
    write_durably(path, content)
    return None


def same_bytes(one: Path, other: Path) -> bool:
    with reading(other), open_input(one) as left, open_input(other) as right:
        nbytes = left.version().nbytes
        return nbytes == right.version().nbytes and all(
            left.read_at(at, _BLOCK_NBYTES) == right.read_at(at, _BLOCK_NBYTES)
            for at in range(0, nbytes, _BLOCK_NBYTES)
        )


def read_json_object(path: Path) -> JsonObject:
    """Return the JSON object in a file."""
    with reading(path, DamagedCheckpointError, _REPAIR):
        content = read_regular(path, _NBYTES_MAX)
    try:
        value = None if content is None else _parsed(content)
    except (ValueError, RecursionError) as error:
        raise _not_an_object(path, error) from error
    if not isinstance(value, dict):
        raise _not_an_object(path, f"a {type(value).__name__}")
    return value


def _parsed(content: bytes) -> object:
    """Return the value; estimate its memory first, by its brackets and commas."""
    nbytes = len(content) * (1 if content.isascii() else _CHARACTER_NBYTES)
    nbytes += content.count(b"{") * _DICT_NBYTES + content.count(b"[") * _LIST_NBYTES
    nbytes += content.count(b",") * _ITEM_NBYTES
    if nbytes > _MEMORY_NBYTES_MAX:
        raise ValueError(f"its values may take {nbytes >> 20} MiB of memory")
    return json.loads(content)


def _not_an_object(path: Path, found: object) -> DamagedCheckpointError:
    return DamagedCheckpointError("is not a JSON object", path=path, found=found, hint=_REPAIR)
