"""Files as a whole: small ones read within a bound, as bytes or as JSON, compared, and written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

from zexport.errors import DamagedCheckpointError
from zexport.store import objects
from zexport.store.address import Address
from zexport.store.files import open_input, open_regular, reading, sync_path, version
from zexport.store.json import Json, JsonObject
from zexport.store.object_files import ObjectReader
from zexport.store.objects import Edition

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the file begins that a clone has in the place of one that git-lfs keeps."""

_BLOCK_NBYTES = 1 << 20

_NBYTES_MAX = 64 << 20
_MEMORY_NBYTES_MAX = 128 << 20
"""What the values of one file may take, as ``_parsed`` estimates it; an index of 100,000
weights takes a third. Sixty million bytes of empty lists would take more than a gigabyte."""

_PARSED_NBYTES_MAX = 1 << 20
_BRACKETS = {b"{": b"}", b"[": b"]"}
_REPEATED_NBYTES_MAX = 1 << 20
"""What people write or mend by hand is shorter."""

_MEND = "Mend or remove the file"

_DICT_NBYTES, _LIST_NBYTES, _ITEM_NBYTES = 240, 96, 180  # CPython 3.11 to 3.14, upwards
_CHARACTER_NBYTES = 4  # in a text with a character beyond the 65,536 first ones


def read_whole(path: Path) -> bytes:
    """The content of a file of our own, however large."""
    with open_regular(path) as file:
        return file.readall()


def read_regular(path: Path, nbytes_max: int) -> bytes | None:
    """The content of the file; ``None`` where it has more than ``nbytes_max`` bytes."""
    with open_regular(path) as file:
        content = file.read(nbytes_max + 1)
        while content and len(content) <= nbytes_max and (more := file.read(nbytes_max)):
            content += more
    return content if len(content) <= nbytes_max else None


def read_range(path: Path, offset: int, nbytes: int) -> bytes:
    """Bytes of a file, or what there is of them."""
    if isinstance(path, Address):
        return ObjectReader(path).read_at(offset, nbytes)
    buffer = memoryview(bytearray(nbytes))
    done = 0
    with open_input(path) as file:
        while done < nbytes and (count := file.read(offset + done, buffer[done:])):
            done += count
    return bytes(buffer[:done])


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two files are equal; both are read to the first difference, a megabyte at a time."""
    with reading(other):
        if version(one).nbytes != version(other).nbytes:
            return False
        return all(a == b for a, b in zip(_blocks_of(one), _blocks_of(other), strict=True))


def _blocks_of(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        while block := file.read(_BLOCK_NBYTES):
            yield block


def read_edition(path: Path) -> tuple[bytes, Edition | None]:
    """The content of a small file of our own, and of an object which edition of it that is."""
    if isinstance(path, Address):
        return objects.read_edition(path)
    return read_whole(path), None


def rewrite(path: Path, content: bytes, known: Edition | None) -> Edition | None:
    """A small file of our own holds ``content``, on the disk; of an object, which edition it is.

    Raises:
        FileExistsError: another edition of an object is there than was ``known``, if any was.
        OSError: it cannot be written.
    """
    if isinstance(path, Address):
        return objects.replace(path, content, known)
    write_durably(path, content)
    return None


def fresh_name(name: str) -> str:
    """What a small file is called while it is written."""
    return f".{name}.new"


def write_durably(path: Path, content: bytes, *, is_new: bool = False) -> None:
    """``path`` holds ``content``, on the disk; or, after an ``OSError``, what it held before.

    An object that is to be new and is there already is a ``FileExistsError``.
    """
    if isinstance(path, Address):
        objects.put(path, content, is_new=is_new)
        return
    fresh = path.with_name(fresh_name(path.name))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fresh.write_bytes(content)
        sync_path(fresh)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def blocks(content: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """A file's content in few pieces, each with its place in the file."""
    offset, gathered = 0, bytearray()
    for data in content:
        gathered += data
        if len(gathered) >= _BLOCK_NBYTES:
            yield offset, bytes(gathered)
            offset += len(gathered)
            gathered.clear()
    yield offset, bytes(gathered)


def read_json_object(path: Path) -> JsonObject:
    """The JSON object in a file."""
    value = _read(path, "object")
    if not isinstance(value, dict):
        raise _is_not(path, "object", f"a {type(value).__name__}")
    return value


def read_json_list(path: Path) -> list[Json]:
    """The JSON list in a file."""
    value = _read(path, "list")
    if not isinstance(value, list):
        raise _is_not(path, "list", f"a {type(value).__name__}")
    return value


def is_json(path: Path) -> bool:
    """Whether a file is whole JSON.

    Of a large one, such as a vocabulary of tens of megabytes, only the two ends are looked at.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with open_regular(path) as file:
            head = file.read(_PARSED_NBYTES_MAX)
            if len(head) < _PARSED_NBYTES_MAX:
                json.loads(head)
                return True
            file.seek(-_PARSED_NBYTES_MAX, 2)
            tail = file.read().rstrip()
    except (ValueError, RecursionError):
        return False
    return _BRACKETS.get(head.lstrip()[:1]) == tail[-1:]


def repeated_keys(path: Path) -> dict[str, list[Json]]:
    """Keys that a JSON object has twice, at any depth, with all values; readers keep the last."""
    repeated: dict[str, list[Json]] = {}

    def note(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        values: dict[str, list[Json]] = {}
        for key, value in pairs:
            values.setdefault(key, []).append(value)
        repeated.update((key, told) for key, told in values.items() if len(told) > 1)
        return dict(pairs)

    with suppress(OSError, ValueError, RecursionError):
        json.loads(read_regular(path, _REPEATED_NBYTES_MAX) or b"{}", object_pairs_hook=note)
    return repeated


def _read(path: Path, kind: str) -> Json:
    with reading(path, DamagedCheckpointError, _MEND):
        content = read_regular(path, _NBYTES_MAX)
    try:
        value = None if content is None else _parsed(content)
    except (ValueError, RecursionError) as error:
        raise _is_not(path, kind, error) from error
    return cast("Json", value)


def _parsed(content: bytes) -> object:
    """The value, whose memory is estimated first, by what separates and opens values."""
    nbytes = len(content) * (1 if content.isascii() else _CHARACTER_NBYTES)
    nbytes += content.count(b"{") * _DICT_NBYTES + content.count(b"[") * _LIST_NBYTES
    nbytes += content.count(b",") * _ITEM_NBYTES
    if nbytes > _MEMORY_NBYTES_MAX:
        raise ValueError(f"its values may take {nbytes >> 20} MiB of memory")
    return json.loads(content)


def _is_not(path: Path, kind: str, found: object) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"is not a JSON {kind}", path=path, found=found, hint=_MEND)
