"""The records of a zip file that ``torch.save`` wrote.

The directory lists them; a record's own header is read only when its bytes are asked for, because
that costs one small read per record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from zexport.errors import CheckpointError, UnsupportedError
from zexport.formats.inert import ForeignStorage, StorageRef
from zexport.formats.pickles import MAX_PICKLE_NBYTES, Pickle, load
from zexport.formats.zip_directory import Entry, damaged, data_offset, read_directory, read_record
from zexport.ranges.extents import Member
from zexport.storage.files import open_input
from zexport.storage.storage import InputFile

_LITTLE = b"little"


@contextmanager
def opened(path: Path) -> Iterator[InputFile]:
    """The file, open for reading; what the system refuses becomes a ``CheckpointError``."""
    try:
        with open_input(path) as file:
            yield file
    except OSError as error:
        hint = "Check that it is a file that you may read"
        raise CheckpointError(
            "cannot be read", path=path, found=error.strerror, hint=hint
        ) from error


class ZipRecords:
    """The records of one zip file that contain tensor bytes.

    Empty ones are not kept: under ZeRO-3 each rank's model file has one for every parameter. All
    are in the folder ``root``: the file's name when it was written, without ``.pt``, or ``archive``
    when it was written to a stream.
    """

    __slots__ = ("_entries", "_members", "_path", "root")

    def __init__(self, path: Path, root: str, entries: Mapping[str, Entry]) -> None:
        self.root = root
        self._path = path
        self._entries = entries
        self._members: dict[str, Member] = {}

    def members(self) -> tuple[Member, ...]:
        """Return the records that are not compressed, by ascending offset."""
        wanted = [key for key, entry in self._entries.items() if entry.is_stored]
        with opened(self._path) as file:
            found = [self._member(file, key) for key in wanted]
        return tuple(sorted(found, key=lambda member: member.offset))

    def checksum(self, storage: StorageRef | ForeignStorage) -> int:
        """Return the CRC-32 that the zip's directory has of the storage's bytes."""
        entry = self._entries.get(storage.key)
        return 0 if entry is None else entry.crc32

    def place(self, storage: StorageRef) -> int:
        """Return the byte of the file where the storage begins."""
        entry = self._entries.get(storage.key)
        if (0 if entry is None else entry.nbytes) != storage.nbytes:
            raise damaged(
                self._path,
                f"the record of storage {storage.key!r} is not of the size the tensors claim",
                "no record, or an empty one" if entry is None else f"{entry.nbytes} bytes",
                f"{storage.nbytes} bytes",
            )
        if entry is None:
            return 0
        if not entry.is_stored:
            raise UnsupportedError(
                f"the record {entry.name} is compressed: no part of it can be read alone",
                path=self._path,
                found=f"{entry.stored_nbytes} bytes for {entry.nbytes}",
                expected="a stored record, as torch.save writes it",
                hint=f"In an empty folder: `unzip FILE`, then `zip -0 -r NEW {self.root}`; put NEW "
                "in its place",
            )
        if (member := self._members.get(storage.key)) is not None:
            return member.offset
        with opened(self._path) as file:
            return self._member(file, storage.key).offset

    def _member(self, file: InputFile, key: str) -> Member:
        if key not in self._members:
            entry = self._entries[key]
            offset = data_offset(file, self._path, entry)
            self._members[key] = Member(entry.name, offset, entry.nbytes, entry.crc32)
        return self._members[key]


def read_zip(
    file: InputFile, path: Path, known: dict[bytes, Pickle] | None = None
) -> tuple[Pickle, ZipRecords]:
    """Return the object in a zip file and its records; reads the directory and ``data.pkl``."""
    entries = read_directory(file, path, file.version().nbytes)
    roots = {name.partition("/")[0] for name in entries}
    if len(roots) != 1:
        raise damaged(path, "the zip archive does not have one folder at its top", len(roots))
    root = roots.pop()
    if f"{root}/byteorder" in entries:  # else torch before 2.1
        order = read_record(file, path, entries, f"{root}/byteorder", 16)
        if order != _LITTLE:
            problem = "its numbers are not in little-endian byte order"
            raise UnsupportedError(problem, path=path, found=order, expected=_LITTLE)
    data = read_record(file, path, entries, f"{root}/data.pkl", MAX_PICKLE_NBYTES)
    known = {} if known is None else known
    if data not in known:
        known[data] = load(data, path=path)
    start = f"{root}/data/"
    stored = {n[len(start) :]: entry for n, entry in entries.items() if n.startswith(start)}
    return known[data], ZipRecords(path, root, stored)
