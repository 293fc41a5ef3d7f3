"""Read files of ``torch.save``, zip and legacy, without their tensor data.

A zip record's own header is read only when its bytes are used, because that takes one small read
per record. ``zipfile`` takes four times as long for a directory with one record per parameter.

Source: APPNOTE.TXT 6.3.10, sections 4.3.7 (local header) to 4.3.16 (end of the directory).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.formats.pickle_reader import MAX_PICKLE_NBYTES, Pickle, load
from zexport.formats.pickle_values import Global, StorageRef, TensorRef
from zexport.ranges.source import ByteSource, Extent, Mosaic, Record, Tile
from zexport.storage.files import LFS_POINTER, FileBytes, open_input, read_range
from zexport.storage.os_errors import reading
from zexport.storage.storage import InputFile, Version

DIRECTORY_NBYTES_MAX = 12 << 20
"""Enough for 120,000 records with the long names of rank files; takes ten times as much memory."""

_COPY = "Copy the file again"
_ZIP_START, _PICKLE_START = b"PK\x03\x04", b"\x80"
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of legacy files
_COUNT_NBYTES = 8
_STORED = 0
_ENCRYPTED = 0x1
_IN_ZIP64 = 0xFFFFFFFF
_ZIP64_FIELD = 1
_LOCAL = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_CENTRAL = struct.Struct("<4s4xHH4xLLLHHH8xL")
_END = struct.Struct("<4s8xLLH")  # signature, size and offset of the directory, comment
_END64 = struct.Struct("<4s36xQQ")
_LOCATOR_NBYTES = 20


class ZipEntry(Struct, frozen=True, gc=False):
    """A record in the directory; ``limit`` is where the next record or the directory begins."""

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


class TorchFile(Struct, frozen=True):
    """A file of ``torch.save``.

    Attributes:
        version: of the file when it was read.
        is_legacy: it is not a zip file; it has no checksums.
        value, unknown_globals: as of ``Pickle``.
        root: top folder of the zip: the file's name without ``.pt`` when it was written, or
            ``archive`` if it was written to a stream; ``None`` for a legacy file.
    """

    path: Path
    version: Version
    is_legacy: bool
    value: object
    unknown_globals: tuple[Global, ...]
    root: str | None
    _stored: dict[str, ZipEntry | Record]

    @property
    def records(self) -> tuple[Record, ...]:
        """Uncompressed records of tensor data, by offset; empty ones are left out."""
        wanted = [k for k, one in self._stored.items() if isinstance(one, Record) or one.is_stored]
        with reading(self.path), open_input(self.path) as file:
            found = [self._record(key, file) for key in wanted]
        return tuple(sorted((one for one in found if one.nbytes), key=lambda one: one.offset))

    def checksum(self, storage: StorageRef) -> int | bytes:
        """Return a storage's CRC-32, or in a legacy file all its bytes."""
        entry = self._stored.get(storage.key)
        if entry is None:
            return 0
        if isinstance(entry, Record) and entry.crc32 is None:
            return read_range(self.path, entry.offset, entry.nbytes)
        return entry.crc32 or 0

    def source(self, tensor: TensorRef) -> ByteSource:
        """Return the elements of a tensor, row-major; an ``Extent`` if it is contiguous."""
        storage = tensor.storage
        entry = self._stored.get(storage.key)
        if (0 if entry is None else entry.nbytes) != storage.nbytes:
            raise damaged(
                self.path,
                f"size of storage {storage.key!r} differs from its tensors",
                "no record" if entry is None else f"{entry.nbytes} bytes",
                f"{storage.nbytes} bytes",
            )
        if isinstance(entry, ZipEntry):
            _check_stored(entry, self.path)
            with reading(self.path), open_input(self.path) as file:
                entry = self._record(storage.key, file)
        return tensor_source(self.path, tensor, 0 if entry is None else entry.offset)

    def _record(self, key: str, file: InputFile) -> Record:
        entry = self._stored[key]
        if isinstance(entry, ZipEntry):
            offset = data_offset(file, self.path, entry)
            entry = Record(entry.name, offset, entry.nbytes, entry.crc32)
            self._stored[key] = entry
        return entry


def read_torch_file(path: Path, known: dict[bytes, Pickle] | None = None) -> TorchFile:
    """Return the content of a file without its tensor data; no code in it runs.

    ``known`` caches pickles of zip files by their bytes: ranks often write equal ones, which are
    read, and held in memory, once.
    """
    with reading(path, hint="Check its permissions"), open_input(path) as file:
        version = file.version()
        start = file.read_at(0, len(_ZIP_START))
        if start == _ZIP_START:
            return _read_zip(file, path, {} if known is None else known)
        if start[:1] == _PICKLE_START:
            return _read_legacy(file, path)
    if start and LFS_POINTER.startswith(start):
        problem, hint = "is a Git LFS pointer, not the file", "Fetch the file: git lfs pull"
    else:
        problem = "was not written by torch.save" if version.nbytes else "is empty"
        hint = f"{_COPY}, or remove it if it is not part of the checkpoint"
    raise DamagedCheckpointError(problem, path=path, found=f"{version.nbytes} bytes", hint=hint)


def tensor_source(path: Path, tensor: TensorRef, begin: int) -> ByteSource:
    """Return the elements of a tensor, row-major; its storage begins at byte ``begin``."""
    itemsize = tensor.dtype.itemsize
    if not tensor.numel:
        return Extent(path, begin, 0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    needed = (tensor.offset + last + 1) * itemsize
    if needed > tensor.storage.nbytes:
        raise damaged(
            path,
            f"tensor of shape {tensor.shape} exceeds its storage {tensor.storage.key!r}",
            f"{tensor.storage.nbytes} bytes",
            f"at least {needed}",
        )
    offset = begin + tensor.offset * itemsize
    if tensor.is_dense:
        return Extent(path, offset, tensor.nbytes)
    span = Extent(path, offset, (last + 1) * itemsize)
    start = (0,) * len(tensor.shape)
    return Mosaic(tensor.shape, itemsize, (Tile(start, tensor.shape, span, 0, tensor.stride),))


def _read_zip(file: InputFile, path: Path, known: dict[bytes, Pickle]) -> TorchFile:
    """Read the directory and ``data.pkl``."""
    entries = read_directory(file, path, file.version().nbytes)
    roots = {name.partition("/")[0] for name in entries}
    if len(roots) != 1:
        raise damaged(path, "zip file does not have one top folder", len(roots))
    root = roots.pop()
    if f"{root}/byteorder" in entries:  # since torch 2.1
        order = read_record(file, path, entries, f"{root}/byteorder", 16)
        _check_byte_order(path, order == b"little")
    data = read_record(file, path, entries, f"{root}/data.pkl", MAX_PICKLE_NBYTES)
    if data not in known:
        known[data] = load(data, path=path)
    pickle, start = known[data], f"{root}/data/"
    stored: dict[str, ZipEntry | Record] = {
        name[len(start) :]: entry for name, entry in entries.items() if name.startswith(start)
    }
    contents = pickle.value, pickle.unknown_globals, root, stored
    return TorchFile(path, file.version(), False, *contents)


def _read_legacy(file: InputFile, path: Path) -> TorchFile:
    """Read the pickles, and the number of elements before each storage.

    Source: torch 2.13, ``torch/serialization.py`` (``_legacy_save``).
    """
    data = FileBytes(file)
    magic = load(data, path=path)
    if magic.value != _MAGIC:
        problem = "is a pickle that torch.save did not write"
        raise DamagedCheckpointError(problem, path=path, hint="Remove it from the checkpoint")
    protocol = load(data, path=path, start=magic.end)
    system = load(data, path=path, start=protocol.end)
    if protocol.value != _PROTOCOL:
        problem = "legacy torch file has an unknown protocol version"
        raise UnsupportedError(problem, path=path, expected=_PROTOCOL, hint=_COPY)
    is_little = isinstance(system.value, dict) and system.value.get("little_endian") is True
    _check_byte_order(path, is_little)
    pickle = load(data, path=path, start=system.end)
    keys = load(data, path=path, start=pickle.end)
    stored: dict[str, ZipEntry | Record] = {}
    at, nbytes = keys.end, file.version().nbytes
    for key in keys.value if isinstance(keys.value, list) else [keys.value]:
        storage = pickle.storages.get(key) if isinstance(key, str) else None
        if storage is None or storage.key in stored:
            raise damaged(path, "list of storages does not match the tensors")
        count = int.from_bytes(file.read_at(at, _COUNT_NBYTES), "little")
        stored[storage.key] = Record(storage.key, at + _COUNT_NBYTES, storage.nbytes, None)
        at += _COUNT_NBYTES + storage.nbytes
        if count != storage.numel or at > nbytes:
            raise damaged(
                path,
                f"storage {storage.key!r} is incomplete or has another size",
                f"{count} elements in a file of {nbytes} bytes",
                f"{storage.numel} elements up to byte {at}",
            )
    if at != nbytes:
        raise damaged(path, "bytes after the last storage", f"{nbytes} bytes", f"{at}")
    contents = pickle.value, pickle.unknown_globals, None, stored
    return TorchFile(path, file.version(), True, *contents)


def _check_byte_order(path: Path, is_little: bool) -> None:
    if not is_little:
        raise UnsupportedError("numbers are not little-endian", path=path)


def read_directory(file: InputFile, path: Path, stop: int) -> dict[str, ZipEntry]:
    """Return the records with content, by name, of the zip file that ends at byte ``stop``."""
    begin, nbytes, base = _find_directory(file, path, stop)
    data = file.read_at(begin, nbytes)
    rows = []
    at = 0
    while at < len(data):
        if len(data) - at < _CENTRAL.size:
            raise _broken(path, "a directory that ends early")
        row = _CENTRAL.unpack_from(data, at)
        signature, flags, method, crc32, stored, size, *lengths, offset = row
        name_nbytes, extra_nbytes, comment_nbytes = lengths
        name_end = at + _CENTRAL.size + name_nbytes
        name = data[at + _CENTRAL.size : name_end]
        at = name_end + extra_nbytes + comment_nbytes
        if signature != b"PK\x01\x02":
            raise _broken(path, "invalid bytes in the directory")
        if flags & _ENCRYPTED:
            raise UnsupportedError("zip file is encrypted", path=path)
        if _IN_ZIP64 in (size, stored, offset):
            extra = data[name_end : name_end + extra_nbytes]
            size, stored, offset = _from_zip64((size, stored, offset), extra)
        rows.append((base + offset, name, size, stored, crc32, method))
    rows.sort()
    if len({name for _, name, *_ in rows}) < len(rows):
        raise damaged(path, "zip file has two records with the same name")
    found: dict[str, ZipEntry] = {}
    limits = [*(offset for offset, *_ in rows[1:]), begin]
    for (offset, name, size, stored, crc32, method), limit in zip(rows, limits, strict=False):
        is_long = offset + _LOCAL.size + len(name) + stored > limit
        if is_long or (method == _STORED and stored != size):
            raise damaged(path, "zip records overlap", name.decode(errors="replace"))
        if size:
            entry = ZipEntry(name, offset, size, stored, crc32, method, limit)
            found[entry.name] = entry
    return found


def _find_directory(file: InputFile, path: Path, stop: int) -> tuple[int, int, int]:
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
            "zip directory is too large",
            path=path,
            found=f"{nbytes} bytes",
            expected=f"at most {DIRECTORY_NBYTES_MAX}",
            hint="Save fewer tensors in one file",
        )
    if offset + nbytes > end:
        raise _broken(path, "a directory beyond its end")
    return end - nbytes, nbytes, end - nbytes - offset


def _from_zip64(numbers: tuple[int, ...], extra: bytes) -> list[int]:
    """Return numbers, those that do not fit into 32 bits from the zip64 extra field."""
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


def data_offset(file: InputFile, path: Path, entry: ZipEntry) -> int:
    """Return the place of a record's first byte; its header must match the directory."""
    name, begin = entry.raw_name, entry.header_offset
    raw = file.read_at(begin, _LOCAL.size + len(name)).ljust(_LOCAL.size)
    signature, name_nbytes, extra_nbytes = _LOCAL.unpack_from(raw)
    offset: int = begin + len(raw) + extra_nbytes
    is_same = signature == _ZIP_START and name_nbytes == len(name) and raw.endswith(name)
    if not is_same or offset + entry.stored_nbytes > entry.limit:
        raise damaged(path, f"header of record {entry.name} does not match the zip directory")
    return offset


def read_record(
    file: InputFile, path: Path, entries: Mapping[str, ZipEntry], name: str, limit: int
) -> bytes:
    """Return the bytes of a record, size and CRC-32 checked."""
    entry = entries.get(name)
    if entry is None or max(entry.nbytes, entry.stored_nbytes) > limit:
        problem = f"record {name} is missing or too large; torch.save did not write this file"
        found = "no record" if entry is None else f"{entry.nbytes} bytes"
        raise damaged(path, problem, found, f"at most {limit} bytes")
    _check_stored(entry, path)
    data = file.read_at(data_offset(file, path, entry), entry.nbytes)
    if len(data) != entry.nbytes or zlib.crc32(data) != entry.crc32:
        problem = f"record {name} ends early, or its CRC-32 differs"
        raise damaged(path, problem, f"{len(data)} bytes", f"{entry.nbytes} bytes")
    return data


def _check_stored(entry: ZipEntry, path: Path) -> None:
    if not entry.is_stored:
        raise UnsupportedError(
            f"record {entry.name} is compressed",
            path=path,
            expected="a stored record, as torch.save writes it",
            hint="In an empty folder: `unzip FILE`, then `zip -0 -r NEW "
            f"{entry.name.partition('/')[0]}`; put NEW in its place",
        )


def damaged(
    path: Path, problem: str, found: object = None, expected: object = None
) -> DamagedCheckpointError:
    return DamagedCheckpointError(problem, path=path, found=found, expected=expected, hint=_COPY)


def _broken(path: Path, found: object) -> DamagedCheckpointError:
    return damaged(path, "zip file is incomplete or damaged", found)
