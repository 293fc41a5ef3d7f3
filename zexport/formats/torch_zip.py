"""Where records lie in the zip file that ``torch.save`` writes, and what makes such a file unfit.

The central directory says what there is; a record's own header is looked at when its bytes are
asked for, since that costs one small read a record.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from zexport.errors import CheckpointError, DamagedCheckpointError, UnsupportedError
from zexport.formats.inert import ExcessError, ForeignStorage, StorageRef
from zexport.formats.pickles import MAX_PICKLE_NBYTES, Pickle, load
from zexport.formats.zip_directory import Entry, data_offset, plain_entries, read_entry
from zexport.ranges.extents import Member
from zexport.store.files import OpenFile, open_regular

COPY_AGAIN = "Copy the file again from where it was written"
_SAVE_AGAIN = "Load it with torch.load and write it with torch.save where it was made"
_LITTLE = b"little"
_ENCRYPTED = 0x1
_UTF8 = 0x800
_NO_END = "File is not a zip file"  # what zipfile says of one that ends early
# What zipfile raises on input that is not a zip archive, or one beyond its means.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    NotImplementedError,  # a later version of the format, or encryption
    EOFError,
    OverflowError,
    ValueError,
    struct.error,
    zlib.error,
)
DIRECTORY_NBYTES_MAX = 12 << 20
"""Room for 120,000 records with the long names of rank files. Read, a directory takes ten times as
much memory."""


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """The file, open for reading; what the system refuses becomes a ``CheckpointError``."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        hint = "Check that it is a file that you may read"
        raise CheckpointError(
            "cannot be read", path=path, found=error.strerror, hint=hint
        ) from error


_Found: TypeAlias = tuple[str, bytes, dict[str, Entry]]
"""The folder in a file, its ``data.pkl``, and its records by their names in the folder."""


class ZipRecords:
    """The records of one zip file that hold tensor bytes.

    Empty ones are not kept: under ZeRO-3 each rank's model file has one for every parameter. All
    are in the folder ``root``: the file's name when it was written, without ``.pt``, or ``archive``
    when it was written to a stream.
    """

    __slots__ = ("_entries", "_members", "_path", "root")

    def __init__(self, path: Path, root: str, entries: dict[str, Entry]) -> None:
        self.root = root
        self._path = path
        self._entries = entries
        self._members: dict[str, Member] = {}

    def members(self) -> tuple[Member, ...]:
        """The stored records that are not empty, by ascending offset."""
        wanted = [key for key, entry in self._entries.items() if entry.is_stored and entry.nbytes]
        with opened(self._path) as file:
            found = [self._member(file, key) for key in wanted]
        return tuple(sorted(found, key=lambda member: member.offset))

    def checksum(self, storage: StorageRef | ForeignStorage) -> int:
        """Return the CRC-32 that the zip's directory has of the storage's bytes."""
        entry = self._entries.get(storage.key)
        return 0 if entry is None else entry.crc32

    def place(self, storage: StorageRef) -> int:
        """Byte of the file where the storage begins."""
        entry = self._entries.get(storage.key)
        if (0 if entry is None else entry.nbytes) != storage.nbytes:
            raise DamagedCheckpointError(
                f"the record of storage {storage.key!r} is not of the size the tensors claim",
                path=self._path,
                found="no record, or an empty one" if entry is None else f"{entry.nbytes} bytes",
                expected=f"{storage.nbytes} bytes",
                hint=COPY_AGAIN,
            )
        if entry is None:
            return 0
        if not entry.is_stored:
            raise UnsupportedError(
                f"the record {entry.name} is compressed: no part of it can be read alone",
                path=self._path,
                found=f"{entry.compressed_nbytes} bytes for {entry.nbytes}",
                expected="a stored record, as torch.save writes it",
                hint=f"In an empty folder: `unzip FILE`, then `zip -0 -r NEW {self.root}`; put NEW "
                "in its place",
            )
        if (member := self._members.get(storage.key)) is not None:
            return member.offset
        with opened(self._path) as file:
            return self._member(file, storage.key).offset

    def _member(self, file: OpenFile, key: str) -> Member:
        if key not in self._members:
            entry = self._entries[key]
            offset = data_offset(file, entry)
            if offset is None:
                problem = f"the record {entry.name} is not where the zip's directory puts it"
                raise DamagedCheckpointError(problem, path=self._path, hint=COPY_AGAIN)
            self._members[key] = Member(entry.name, offset, entry.nbytes, entry.crc32)
        return self._members[key]


def _damaged(path: Path, problem: str, found: object = None) -> DamagedCheckpointError:
    return DamagedCheckpointError(problem, path=path, found=found, hint=COPY_AGAIN)


def _entries(archive: zipfile.ZipFile, path: Path) -> Iterator[Entry]:
    """Every record, none of another's name, and none reaching into another or out of the file."""
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    limits = [*(info.header_offset for info in infos[1:]), archive.start_dir]
    for info, limit in zip(infos, limits, strict=False):
        entry = _entry(info, limit)
        least = entry.header_offset + entry.header_nbytes + entry.compressed_nbytes
        if info.flag_bits & _ENCRYPTED:
            raise UnsupportedError("the zip archive is encrypted", path=path, hint=_SAVE_AGAIN)
        if archive.NameToInfo[entry.name] is not info:
            raise _damaged(path, "the zip archive has two records of one name", entry.name)
        if least > limit or (entry.is_stored and entry.compressed_nbytes != entry.nbytes):
            raise _damaged(path, "a record reaches into the next one", entry.name)
        yield entry


def _entry(info: zipfile.ZipInfo, limit: int) -> Entry:
    return Entry(
        name=info.filename,
        raw_name=info.orig_filename,
        encoding="utf-8" if info.flag_bits & _UTF8 else "cp437",
        header_offset=info.header_offset,
        nbytes=info.file_size,
        compressed_nbytes=info.compress_size,
        crc32=info.CRC,
        is_stored=info.compress_type == zipfile.ZIP_STORED,
        limit=limit,
    )


def _root(names: Iterable[str], path: Path) -> str:
    roots = {name.partition("/")[0] for name in names}
    if len(roots) != 1:
        raise _damaged(path, "the zip archive does not have one folder at its top", len(roots))
    return roots.pop()


def _check_byte_order(archive: zipfile.ZipFile, root: str, path: Path) -> None:
    """Refuse big-endian data; a file without the record is little-endian (torch before 2.1)."""
    name = f"{root}/byteorder"
    if name not in archive.NameToInfo:
        return
    order = _read(archive, name, limit=16, path=path)
    if order != _LITTLE:
        problem = "its numbers are not in little-endian byte order"
        raise UnsupportedError(problem, path=path, found=order, expected=_LITTLE)


class _Bounded:
    """A zip file whose directory is not read where it is larger than any checkpoint's.

    ``zipfile`` reads it at once, before anything else of that size.
    """

    limit = DIRECTORY_NBYTES_MAX

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self.seek = file.seek
        self.tell = file.tell
        self.seekable = file.seekable

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, as a file gives them."""
        if size > self.limit:
            raise ExcessError(f"a zip directory of {size} bytes, more than the {self.limit} it may")
        return self._file.read(size) or b""


def _read(archive: zipfile.ZipFile, name: str, *, limit: int, path: Path) -> bytes:
    """A whole record, its size and CRC checked."""
    info = archive.NameToInfo.get(name)
    if info is None or info.file_size > limit:
        found = "no record" if info is None else f"{info.file_size} bytes"
        problem = f"the zip archive has no {name} of a fit size, so torch.save did not write it"
        raise DamagedCheckpointError(problem, path=path, found=found, expected=f"at most {limit}")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        problem = f"the record {name} is compressed in a way that torch.load does not read"
        hint = "Take the file as torch.save wrote it"
        raise UnsupportedError(problem, path=path, hint=hint)
    with archive.open(info) as record:
        data = record.read(info.file_size + 1)
    if len(data) != info.file_size:
        raise _damaged(path, f"the record {name} ends early", f"{len(data)} bytes")
    return data


def read_zip(
    file: OpenFile, path: Path, known: dict[bytes, Pickle] | None = None
) -> tuple[Pickle, ZipRecords]:
    """The object in a zip file and its records; reads the central directory and ``data.pkl``."""
    try:
        root, data, entries = _read_plain(file) or _read_any(file, path)
    except ExcessError as error:
        hint = "Save fewer tensors in one file"
        raise UnsupportedError(f"holds {error}", path=path, hint=hint) from error
    except _ZIP_ERRORS as error:
        problem = "is not a whole zip archive: it ends early, or its bytes were changed"
        found = "no directory at its end" if str(error) == _NO_END else error
        raise _damaged(path, problem, found) from error
    known = {} if known is None else known
    if data not in known:
        known[data] = load(data, path=path)
    storages = {n.removeprefix("data/"): e for n, e in entries.items() if n.startswith("data/")}
    return known[data], ZipRecords(path, root, storages)


def _read_plain(file: OpenFile) -> _Found | None:
    """What is in a little-endian file as ``torch.save`` writes it; ``None`` for every other."""
    plain = plain_entries(file, _Bounded.limit)
    pickle = None if plain is None else plain[1].get("data.pkl")
    if plain is None or pickle is None or pickle.nbytes > MAX_PICKLE_NBYTES:
        return None
    root, entries = plain
    order = entries.get("byteorder")
    if order is not None and (order.nbytes != len(_LITTLE) or read_entry(file, order) != _LITTLE):
        return None
    data = read_entry(file, pickle)
    return None if data is None else (root, data, entries)


def _read_any(file: OpenFile, path: Path) -> _Found:
    """What is in any zip file; what ``zipfile`` holds is let go."""
    bounded = _Bounded(file)
    with zipfile.ZipFile(bounded) as archive:
        bounded.limit = MAX_PICKLE_NBYTES + 1
        entries = [e for e in _entries(archive, path) if e.nbytes or not e.is_stored]
        root = _root(archive.namelist(), path)
        _check_byte_order(archive, root, path)
        data = _read(archive, f"{root}/data.pkl", limit=MAX_PICKLE_NBYTES, path=path)
    return root, data, {e.name.removeprefix(f"{root}/"): e for e in entries}
