"""The records of a zip file that ``torch.save`` wrote.

The directory lists them; a record's own header is read only when its bytes are asked for, because
that costs one small read per record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from zexport.errors import CheckpointError, DamagedCheckpointError, UnsupportedError
from zexport.formats.pickle_reader import MAX_PICKLE_NBYTES, Pickle, load
from zexport.formats.pickle_values import ForeignStorage, Global, StorageRef, TensorRef
from zexport.formats.zip_directory import (
    COPY_AGAIN,
    Entry,
    damaged,
    data_offset,
    read_directory,
    read_record,
)
from zexport.ranges.source import ByteSource, Extent, Member, Mosaic, Tile
from zexport.storage.contents import LFS_POINTER, FileBytes, read_range
from zexport.storage.files import open_input
from zexport.storage.storage import InputFile, Version

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


_ZIP_START = b"PK\x03\x04"
_PICKLE_START = b"\x80"
_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT_NBYTES = 8

_Storage: TypeAlias = StorageRef | ForeignStorage


class Container(Enum):
    """The two file layouts of ``torch.save``."""

    ZIP = "zip"
    LEGACY = "legacy"


class TorchFile(Struct, frozen=True):
    """A file written by ``torch.save``, read without its tensor data.

    ``value`` and ``unknown_globals`` are those of its ``Pickle``; ``version`` is what the file was
    when it was read.
    """

    path: Path
    version: Version
    container: Container
    value: object
    unknown_globals: tuple[Global, ...]
    _records: ZipRecords | LegacyRecords

    @property
    def root(self) -> str | None:
        """The top folder of the zip: the file's name, less ``.pt``, when it was written.

        ``archive`` when it was written to a stream, ``None`` for the old container.
        """
        return self._records.root

    @property
    def members(self) -> tuple[Member, ...]:
        """The records that hold tensor bytes, by offset; the old container has no CRCs."""
        return self._records.members()

    def checksum(self, storage: _Storage) -> int | bytes:
        """Return what differs if the storage's bytes do: its CRC-32, or all of them without one."""
        return self._records.checksum(storage)

    def source(self, tensor: TensorRef) -> ByteSource:
        """Where the elements are, in row-major order; an ``Extent`` if they lie densely."""
        return located(self.path, tensor, self._records.place(tensor.storage))


def located(path: Path, tensor: TensorRef, begin: int) -> ByteSource:
    """Return the elements of a tensor, row-major, whose storage is at byte ``begin`` of a file."""
    itemsize = tensor.dtype.itemsize
    if not tensor.numel:
        return Extent(path, begin, 0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    needed = (tensor.offset + last + 1) * itemsize
    if needed > tensor.storage.nbytes:
        raise DamagedCheckpointError(
            f"a tensor of shape {tensor.shape} reaches beyond its storage {tensor.storage.key!r}",
            path=path,
            found=f"{tensor.storage.nbytes} bytes",
            expected=f"at least {needed}",
            hint=COPY_AGAIN,
        )
    offset = begin + tensor.offset * itemsize
    if tensor.is_dense:
        return Extent(path, offset, tensor.nbytes)
    span = Extent(path, offset, (last + 1) * itemsize)
    start = (0,) * len(tensor.shape)
    return Mosaic(tensor.shape, itemsize, (Tile(start, tensor.shape, span, 0, tensor.stride),))


def read_torch_file(path: Path, known: dict[bytes, Pickle] | None = None) -> TorchFile:
    """What ``path`` holds, without its tensor data; no code in it runs.

    ``known`` are pickles of zip files that were read before, by their bytes, to which this one is
    added. The ranks of one save often write equal ones; those are read, and held in memory, once.
    """
    with opened(path) as file:
        version = file.version()
        start = file.read_at(0, len(_ZIP_START))
        container = _container(path, start, version.nbytes)
        records: ZipRecords | LegacyRecords
        if container is Container.ZIP:
            pickle, records = read_zip(file, path, known)
        else:
            pickle, records = _read_legacy(file, path)
    return TorchFile(path, version, container, pickle.value, pickle.unknown_globals, records)


def _container(path: Path, start: bytes, nbytes: int) -> Container:
    """The container whose first bytes these are."""
    if start == _ZIP_START:
        return Container.ZIP
    if start[:1] == _PICKLE_START:
        return Container.LEGACY
    if start and LFS_POINTER.startswith(start):
        problem = "is a git-lfs pointer, and not the file that it stands for"
        hint = "Fetch the file itself: git lfs pull"
        raise DamagedCheckpointError(problem, path=path, found=f"{nbytes} bytes", hint=hint)
    problem = "is not a file that torch.save wrote" if nbytes else "is empty"
    hint = f"{COPY_AGAIN}, or leave it out if it does not belong to the checkpoint"
    raise DamagedCheckpointError(problem, path=path, found=f"{nbytes} bytes", hint=hint)


class LegacyRecords:
    """The storages of one file of the old container, which names no folder and holds no CRC."""

    __slots__ = ("_offsets", "_path", "root")

    def __init__(self, path: Path, offsets: dict[_Storage, int]) -> None:
        self.root = None
        self._path = path
        self._offsets = offsets

    def members(self) -> tuple[Member, ...]:
        """The storages, by ascending offset; nothing covers their bytes with a CRC."""
        found = (
            Member(storage.key, offset, storage.nbytes, None)
            for storage, offset in self._offsets.items()
            if storage.nbytes
        )
        return tuple(sorted(found, key=lambda member: member.offset))

    def checksum(self, storage: _Storage) -> bytes:
        """Return the storage's bytes, of which the file has no CRC-32."""
        return read_range(self._path, self.place(storage), storage.nbytes)

    def place(self, storage: _Storage) -> int:
        """Byte of the file where the storage begins."""
        if storage not in self._offsets:
            problem = f"storage {storage.key!r} is not in the file"
            raise DamagedCheckpointError(problem, path=self._path, hint=COPY_AGAIN)
        return self._offsets[storage]


def _read_legacy(file: InputFile, path: Path) -> tuple[Pickle, LegacyRecords]:
    """The object in a file of the old container and its storages; reads no tensor data."""
    data = FileBytes(file)
    magic = load(data, path=path)
    if magic.value != _MAGIC:
        problem = "is a pickle, but not one that torch.save wrote"
        raise DamagedCheckpointError(problem, path=path, hint="Leave it out")
    version = load(data, path=path, start=magic.end)
    system = load(data, path=path, start=version.end)
    _check_origin(version.value, system.value, path)
    result = load(data, path=path, start=system.end)
    keys = load(data, path=path, start=result.end)
    return result, LegacyRecords(path, _offsets(file, keys, result, path))


def _check_origin(version: object, system: object, path: Path) -> None:
    if version != _PROTOCOL:
        problem = "follows another version of torch's old file layout"
        found = version if isinstance(version, int) else "no number"  # never print what may be deep
        raise UnsupportedError(problem, path=path, found=found, expected=_PROTOCOL)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise UnsupportedError("its numbers are not in little-endian byte order", path=path)


def _offsets(file: InputFile, keys: Pickle, result: Pickle, path: Path) -> dict[_Storage, int]:
    """Where each storage's elements begin, from the counts between them."""
    offsets: dict[_Storage, int] = {}
    pos, nbytes = keys.end, file.version().nbytes
    for key in keys.value if isinstance(keys.value, list) else [keys.value]:
        storage = result.storages.get(key) if isinstance(key, str) else None
        if storage is None or storage in offsets:
            problem = "its list of storages does not fit the tensors in it"
            raise DamagedCheckpointError(problem, path=path, hint=COPY_AGAIN)
        count = int.from_bytes(file.read_at(pos, _COUNT_NBYTES), "little")
        offsets[storage] = pos + _COUNT_NBYTES
        pos += _COUNT_NBYTES + storage.nbytes
        if count != storage.numel or pos > nbytes:
            raise DamagedCheckpointError(
                f"ends early, or counts the elements of storage {key!r} in another way",
                path=path,
                found=f"{count} elements in a file of {nbytes} bytes",
                expected=f"{storage.numel} elements up to byte {pos}",
                hint=COPY_AGAIN,
            )
    if pos != nbytes:
        raise DamagedCheckpointError(
            "goes on after its last storage, so that bytes were put in or appended",
            path=path,
            found=f"{nbytes} bytes",
            expected=f"{pos}",
            hint=COPY_AGAIN,
        )
    return offsets
