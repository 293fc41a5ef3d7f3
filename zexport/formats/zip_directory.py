"""The directory of a zip file, and its records.

``zipfile`` makes an object of every record, of which there is one for each parameter and rank.

Source: APPNOTE.TXT 6.3.10, sections 4.3.7 (local header) to 4.3.16 (end of the directory).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from itertools import repeat
from operator import le
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.storage.storage import InputFile

COPY_AGAIN = "Copy the file again from where it was written"
DIRECTORY_NBYTES_MAX = 12 << 20
"""Room for 120,000 records with the long names of rank files; read, it takes ten times as much."""

_STORED, _DEFLATED = 0, 8
_ENCRYPTED = 0x1
_IN_ZIP64 = 0xFFFFFFFF
_ZIP64_FIELD = 1
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_RECORD = struct.Struct("<4s4xHH4xLLLHHH8xL")
_PLAIN = re.compile(rb"(PK\x01\x02.{42})([ -~]+)(?=PK\x01\x02|\Z)", re.DOTALL)
"""A record of the directory with its name, as ``torch.save`` writes almost all."""

_Row: TypeAlias = "tuple[int, bytes, int, int, int, int]"
_END = struct.Struct("<4s8xLLH")  # signature, size and offset of the directory, comment
_END64 = struct.Struct("<4s36xQQ")
_LOCATOR_NBYTES = 20


class Entry(Struct, frozen=True, gc=False):
    """A record as the directory describes it; ``limit`` is the first byte that is not its own."""

    raw_name: bytes
    header_offset: int
    nbytes: int
    stored_nbytes: int
    crc32: int
    method: int
    limit: int

    @property
    def name(self) -> str:
        return self.raw_name.decode("utf-8", "replace")

    @property
    def is_stored(self) -> bool:
        return self.method == _STORED


def read_directory(file: InputFile, path: Path, stop: int) -> dict[str, Entry]:
    """Return the records with content, by name, of the archive that ends at byte ``stop``."""
    begin, nbytes, base = _place(file, path, stop)
    data = file.read_at(begin, nbytes)
    if base == 0 and (plain := _plain(data, begin)) is not None:
        return plain
    rows = sorted(_rows(data, base, path))
    if len({name for _, name, *_ in rows}) < len(rows):
        raise damaged(path, "the zip archive has two records of one name", len(rows))
    found: dict[str, Entry] = {}
    limits = [*(offset for offset, *_ in rows[1:]), begin]
    for (offset, name, size, stored, crc32, method), limit in zip(rows, limits, strict=False):
        is_long = offset + _LOCAL_HEADER.size + len(name) + stored > limit
        if is_long or (method == _STORED and stored != size):
            raise damaged(path, "a record reaches into the next one", name.decode(errors="replace"))
        if size:
            entry = Entry(name, offset, size, stored, crc32, method, limit)
            found[entry.name] = entry
    return found


def _plain(data: bytes, begin: int) -> dict[str, Entry] | None:
    """Return the same, twice as fast, for a directory exactly as ``torch.save`` writes it."""
    found = _PLAIN.findall(data)
    heads, names = b"".join([head for head, _ in found]), [name for _, name in found]
    if not found or len(heads) + sum(map(len, names)) != len(data):
        return None
    columns = zip(*_RECORD.iter_unpack(heads), strict=True)
    _, flags, methods, crcs, stored, sizes, lengths, extras, comments, offsets = columns
    limits = (*offsets[1:], begin)
    ends = map(sum, zip(offsets, repeat(_LOCAL_HEADER.size), lengths, sizes, strict=False))
    if (
        lengths != tuple(map(len, names))
        or len({*names}) < len(names)
        or stored != sizes
        or max(*sizes, *offsets) >= _IN_ZIP64
        or {*methods, *extras, *comments} != {0}
        or any(flag & _ENCRYPTED for flag in {*flags})
        or not all(map(le, ends, limits))
    ):
        return None
    rows = zip(names, offsets, sizes, crcs, limits, strict=True)
    return {
        name.decode(): Entry(name, offset, size, size, crc, _STORED, limit)
        for name, offset, size, crc, limit in rows
        if size
    }


def _rows(data: bytes, base: int, path: Path) -> Iterator[_Row]:
    """Yield offset, name, size, stored size, CRC-32 and method of every record."""
    at = 0
    while at < len(data):
        if len(data) - at < _RECORD.size:
            raise _broken(path, "a directory that ends early")
        row = _RECORD.unpack_from(data, at)
        signature, flags, method, crc32, stored, size, *lengths, offset = row
        name_nbytes, extra_nbytes, comment_nbytes = lengths
        name_end = at + _RECORD.size + name_nbytes
        name = data[at + _RECORD.size : name_end]
        at = name_end + extra_nbytes + comment_nbytes
        if signature != b"PK\x01\x02":
            raise _broken(path, "a directory with other bytes")
        if flags & _ENCRYPTED:
            raise UnsupportedError("the zip archive is encrypted", path=path)
        if _IN_ZIP64 in (size, stored, offset):
            extra = data[name_end : name_end + extra_nbytes]
            size, stored, offset = _wide((size, stored, offset), extra)
        yield base + offset, name, size, stored, crc32, method


def _place(file: InputFile, path: Path, stop: int) -> tuple[int, int, int]:
    """Return the directory's place and size, and the byte from which its offsets count."""
    both = _END64.size + _LOCATOR_NBYTES
    tail = file.read_at(max(stop - both - _END.size, 0), min(stop, both + _END.size))
    end = stop - _END.size
    signature, nbytes, offset, comment = _END.unpack(tail[-_END.size :].rjust(_END.size))
    if signature != b"PK\x05\x06" or comment:
        raise _broken(path, "no directory at its end")
    if tail[_END64.size :].startswith(b"PK\x06\x07") and tail.startswith(b"PK\x06\x06"):
        _, nbytes, offset = _END64.unpack_from(tail)
        end -= both
    if nbytes > DIRECTORY_NBYTES_MAX:
        raise UnsupportedError(
            f"holds a zip directory of {nbytes} bytes",
            path=path,
            expected=f"at most {DIRECTORY_NBYTES_MAX}",
            hint="Save fewer tensors in one file",
        )
    if offset + nbytes > end:
        raise _broken(path, "a directory beyond its end")
    return end - nbytes, nbytes, end - nbytes - offset


def _wide(numbers: tuple[int, ...], extra: bytes) -> list[int]:
    """Return numbers, those that do not fit into 32 bits from the extra field of zip64."""
    while len(extra) >= 4:
        kind, nbytes = struct.unpack_from("<HH", extra)
        if kind == _ZIP64_FIELD:
            words = (extra[at : at + 8] for at in range(4, 4 + nbytes, 8))
            return [
                int.from_bytes(next(words, b""), "little") if number == _IN_ZIP64 else number
                for number in numbers
            ]
        extra = extra[4 + nbytes :]
    return [*numbers]


def data_offset(file: InputFile, path: Path, entry: Entry) -> int:
    """Return the place of a record's first byte, if its own header agrees with the directory."""
    name, begin = entry.raw_name, entry.header_offset
    raw = file.read_at(begin, _LOCAL_HEADER.size + len(name)).ljust(_LOCAL_HEADER.size)
    signature, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack_from(raw)
    offset: int = begin + len(raw) + extra_nbytes
    agrees = signature == b"PK\x03\x04" and name_nbytes == len(name) and raw.endswith(name)
    if not agrees or offset + entry.stored_nbytes > entry.limit:
        raise damaged(path, f"the record {entry.name} is not where the zip's directory puts it")
    return offset


def read_record(
    file: InputFile, path: Path, entries: Mapping[str, Entry], name: str, limit: int
) -> bytes:
    """Return the bytes of a record, size and CRC-32 checked."""
    entry = entries.get(name)
    if entry is not None and entry.method not in (_STORED, _DEFLATED):
        problem = f"the record {name} is compressed in a way that torch.load does not read"
        raise UnsupportedError(problem, path=path, hint="Take the file as torch.save wrote it")
    if entry is None or max(entry.nbytes, entry.stored_nbytes) > limit:
        raise DamagedCheckpointError(
            f"the zip archive has no {name} of a fit size, so torch.save did not write it",
            path=path,
            found="no record" if entry is None else f"{entry.nbytes} bytes",
            expected=f"at most {limit}",
        )
    data = file.read_at(data_offset(file, path, entry), entry.stored_nbytes)
    if entry.method == _DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, entry.nbytes + 1)
        except zlib.error as error:
            raise _broken(path, error) from error
    if len(data) != entry.nbytes or zlib.crc32(data) != entry.crc32:
        problem = f"the record {name} ends early, or its CRC-32 differs"
        raise damaged(path, problem, f"{len(data)} bytes", f"{entry.nbytes} bytes")
    return data


def damaged(
    path: Path, problem: str, found: object = None, expected: object = None
) -> DamagedCheckpointError:
    """Return the error for a file whose bytes were changed."""
    return DamagedCheckpointError(
        problem, path=path, found=found, expected=expected, hint=COPY_AGAIN
    )


def _broken(path: Path, found: object) -> DamagedCheckpointError:
    problem = "is not a whole zip archive: it ends early, or its bytes were changed"
    return damaged(path, problem, found)
