"""The directory of a zip file exactly as ``torch.save`` writes it, read in one pass.

Whatever differs from that form in any way is left to ``zipfile``, which makes an object of every
record, of which there is one for every parameter and rank under ZeRO-3.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from itertools import repeat
from operator import le

from msgspec import Struct

from zexport.store.files import OpenFile, read_at, version_of

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, sizes of the name and of the extra field


_RECORD = struct.Struct("<6xHHH4xLLLHHH8xL")


_ROW = re.compile(rb"(PK\x01\x02.{42})([ -~]+)(?=PK\x01\x02|\Z)", re.DOTALL)
"""What the directory says of a record that has neither an extra field nor a comment: ``_RECORD``
and the name, which ends where the next begins."""


_END = struct.Struct("<4s8xLLH")  # signature, the directory's size and offset, comment


_END64 = struct.Struct("<4s36xQQ")


_LOCATOR_NBYTES = 20


_VERSION_MAX = 63


_FLAGS_KNOWN = frozenset({0, 0x8, 0x800, 0x808})
"""The name is in UTF-8; the record's own header has neither size nor CRC; or both."""


_IN_ZIP64 = 0xFFFFFFFF


class Entry(Struct, frozen=True, gc=False):
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


def data_offset(file: OpenFile, entry: Entry) -> int | None:
    """The record's first data byte, or None if its own header contradicts the central directory."""
    name, begin = entry.raw_name.encode(entry.encoding), entry.header_offset
    raw = read_at(file, begin, _LOCAL_HEADER.size + len(name))
    if len(raw) < _LOCAL_HEADER.size + len(name):
        return None
    signature, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack_from(raw)
    offset: int = begin + len(raw) + extra_nbytes
    agrees = signature == b"PK\x03\x04" and name_nbytes == len(name) and raw.endswith(name)
    return offset if agrees and offset + entry.nbytes <= entry.limit else None


def plain_entries(file: OpenFile, nbytes_max: int) -> tuple[str, dict[str, Entry]] | None:
    """The one folder of a file, and its records but for empty storages, by their names in it.

    Every record is stored, none reaches into the next, and no two have one name. ``None`` where the
    file is not of this form, or its directory has more than ``nbytes_max`` bytes.
    """
    place = _place(file)
    if place is None or place[1] > nbytes_max:
        return None
    start, nbytes = place
    found = _ROW.findall(read_at(file, start, nbytes))
    heads, names = b"".join([head for head, _ in found]), [name for _, name in found]
    columns = _columns(heads, names, start) if found else None
    if columns is None or len(heads) + sum(map(len, names)) != nbytes:
        return None
    root = names[0].partition(b"/")[0] + b"/"
    edges = (min(names), max(names))  # what lies between them begins as they do
    if root == b"/" or not all(n.startswith(root) for n in edges) or len({*names}) < len(names):
        return None
    entries, data = {}, root + b"data/"
    for raw, offset, size, crc, limit in zip(names, *columns, strict=True):
        if size or not raw.startswith(data):
            name = raw.decode("ascii")
            entry = Entry(name, name, "ascii", offset, size, size, crc, True, limit)
            entries[name[len(root) :]] = entry
    return root[:-1].decode("ascii"), entries


def read_entry(file: OpenFile, entry: Entry) -> bytes | None:
    """The bytes of a stored record; ``None`` where they are not those that were saved."""
    offset = data_offset(file, entry)
    data = b"" if offset is None else read_at(file, offset, entry.nbytes)
    return data if len(data) == entry.nbytes and zlib.crc32(data) == entry.crc32 else None


def _place(file: OpenFile) -> tuple[int, int] | None:
    """Where the directory begins and its size; it ends where the end records begin."""
    size = version_of(file).nbytes
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


def _columns(heads: bytes, names: Sequence[bytes], end: int) -> Sequence[Sequence[int]] | None:
    """Of each record its header's offset, its size and CRC-32, and where the next begins.

    ``None`` where one is uncommon, or reaches into the next.
    """
    versions, flags, methods, crcs, stored, sizes, lengths, extras, comments, offsets = zip(
        *_RECORD.iter_unpack(heads), strict=True
    )
    limits = (*offsets[1:], end)
    ends = map(sum, zip(offsets, repeat(_LOCAL_HEADER.size), lengths, sizes, strict=False))
    is_plain = (
        lengths == tuple(map(len, names))
        and stored == sizes
        and max(versions) <= _VERSION_MAX
        and {*flags} <= _FLAGS_KNOWN
        and not {*methods, *extras, *comments} - {0}
        and max(*sizes, *offsets) < _IN_ZIP64
        and all(map(le, ends, limits))
    )
    return (offsets, sizes, crcs, limits) if is_plain else None
