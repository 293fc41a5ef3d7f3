"""The directory of a zip file exactly as ``torch.save`` writes it, read in one pass.

``zipfile`` makes an object of every record, and under ZeRO-3 the model file of each rank has an
empty one for every parameter. What differs from the common form in any way is left to it.
"""

from __future__ import annotations

import struct
from io import FileIO
from zlib import crc32

from msgspec import Struct

from zexport.store.files import read_at, version_of

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, sizes of the name and of the extra field
_RECORD = struct.Struct("<4s2xHHH4xLLLHHH8xL")
_END = struct.Struct("<4s8xLLH")  # signature, the directory's size and offset, comment
_END64 = struct.Struct("<4s36xQQ")
_LOCATOR_NBYTES = 20
_VERSION_MAX = 63
_FLAGS_KNOWN = 0x808
"""The name is in UTF-8; the record's own header has neither size nor CRC."""
_IN_ZIP64 = 0xFFFFFFFF


class Entry(Struct, frozen=True):
    """What the central directory says of a record, and the first byte that is not its own.

    A third of what ``zipfile`` takes to say it; there are as many as ranks times tensors.
    """

    name: str
    raw_name: str
    encoding: str
    header_offset: int
    nbytes: int
    compressed_nbytes: int
    crc32: int
    is_stored: bool
    limit: int

    @property
    def header_nbytes(self) -> int:
        """Bytes of the record's own header at the least."""
        return _LOCAL_HEADER.size + len(self.raw_name.encode(self.encoding))


def data_offset(file: FileIO, entry: Entry) -> int | None:
    """The record's first data byte, or None if its own header contradicts the central directory."""
    name, begin = entry.raw_name.encode(entry.encoding), entry.header_offset
    raw = read_at(file, begin, _LOCAL_HEADER.size + len(name))
    if len(raw) < _LOCAL_HEADER.size + len(name):
        return None
    signature, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack_from(raw)
    offset: int = begin + len(raw) + extra_nbytes
    agrees = signature == b"PK\x03\x04" and name_nbytes == len(name) and raw.endswith(name)
    return offset if agrees and offset + entry.nbytes <= entry.limit else None


def plain_entries(file: FileIO, nbytes_max: int) -> tuple[str, dict[str, Entry]] | None:
    """The one folder of a file, and its records but for empty storages, by their names in it.

    Every record is stored, none reaches into the next, and no two have one name. ``None`` where the
    file is not of this form, or its directory has more than ``nbytes_max`` bytes.
    """
    place = _place(file)
    if place is None or place[1] > nbytes_max:
        return None
    start, nbytes = place
    rows = _rows(read_at(file, start, nbytes), nbytes)
    names = {name for name, *_ in rows}
    root = rows[0][0].partition(b"/")[0] if rows else b""
    if not root or len(names) < len(rows) or not all(n.startswith(root + b"/") for n in names):
        return None
    limits = [*(offset for _, offset, *_ in rows[1:]), start]
    entries = {}
    for (raw, offset, size, crc), limit in zip(rows, limits, strict=True):
        if offset + _LOCAL_HEADER.size + len(raw) + size > limit:
            return None
        if size or not raw.startswith(root + b"/data/"):
            name = raw.decode("ascii")
            entry = Entry(name, name, "ascii", offset, size, size, crc, True, limit)
            entries[name[len(root) + 1 :]] = entry
    return root.decode("ascii"), entries


def read_entry(file: FileIO, entry: Entry) -> bytes | None:
    """The bytes of a stored record; ``None`` where they are not those that were saved."""
    offset = data_offset(file, entry)
    data = b"" if offset is None else read_at(file, offset, entry.nbytes)
    return data if len(data) == entry.nbytes and crc32(data) == entry.crc32 else None


def _place(file: FileIO) -> tuple[int, int] | None:
    """Where the directory begins and its size; it ends where the end records begin."""
    size = version_of(file.fileno()).nbytes
    nbytes = _END64.size + _LOCATOR_NBYTES + _END.size
    tail = read_at(file, max(size - nbytes, 0), nbytes)
    if len(tail) < nbytes:
        return None
    signature, count, begin, comment = _END.unpack_from(tail, nbytes - _END.size)
    end = size - _END.size
    if signature != b"PK\x05\x06" or comment:
        return None
    if tail[_END64.size :].startswith(b"PK\x06\x07"):
        signature, count, begin = _END64.unpack_from(tail)
        end = size - nbytes
        if signature != b"PK\x06\x06":
            return None
    return (begin, count) if begin + count == end else None


def _rows(directory: bytes, nbytes: int) -> list[tuple[bytes, int, int, int]]:
    """Name, offset of its header, size and CRC-32 of each record; nothing if one is uncommon."""
    rows = []
    at = 0
    while at + _RECORD.size <= nbytes == len(directory):
        signature, version, flags, method, crc, stored, size, n, extra, comment, offset = (
            _RECORD.unpack_from(directory, at)
        )
        raw = directory[at + _RECORD.size : at + _RECORD.size + n]
        at += _RECORD.size + n
        is_plain = signature == b"PK\x01\x02" and version <= _VERSION_MAX and stored == size
        if not is_plain or flags & ~_FLAGS_KNOWN or method or extra or comment:
            return []
        if _IN_ZIP64 in (size, offset) or b"\0" in raw or not raw.isascii():
            return []
        rows.append((raw, offset, size, crc))
    return rows if at == nbytes else []
