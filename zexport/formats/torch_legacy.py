"""Where storages lie in the file that ``torch.save`` wrote before it used zip, and still can.

Five pickles in a row: a magic number, the version of the protocol, facts about the machine, the
object, and the list of storage keys. Then for each key an 8-byte element count and the elements,
and nothing after the last of them.

Source: torch 2.13, ``torch/serialization.py``, ``_legacy_save`` and ``_legacy_load``.
"""

from __future__ import annotations

from io import FileIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TypeAlias

from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.formats.inert import ForeignStorage, StorageRef
from zexport.formats.pickles import Pickle, load
from zexport.formats.torch_zip import COPY_AGAIN
from zexport.ranges.extents import Member

_Storage: TypeAlias = StorageRef | ForeignStorage

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT_NBYTES = 8


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

    def place(self, storage: StorageRef) -> int:
        """Byte of the file where the storage begins."""
        if storage not in self._offsets:
            problem = f"storage {storage.key!r} is not in the file"
            raise DamagedCheckpointError(problem, path=self._path, hint=COPY_AGAIN)
        return self._offsets[storage]


def read_legacy(file: FileIO, path: Path) -> tuple[Pickle, LegacyRecords]:
    """The object in a file of the old container and its storages; reads no tensor data."""
    with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        magic = load(data, path=path)
        if magic.value != _MAGIC:
            problem = "is a pickle, but not one that torch.save wrote"
            raise DamagedCheckpointError(problem, path=path, hint="Leave it out")
        version = load(data, path=path, start=magic.end)
        system = load(data, path=path, start=version.end)
        _check_origin(version.value, system.value, path)
        result = load(data, path=path, start=system.end)
        keys = load(data, path=path, start=result.end)
        offsets = _offsets(data, keys, result, path)
    return result, LegacyRecords(path, offsets)


def _check_origin(version: object, system: object, path: Path) -> None:
    if version != _PROTOCOL:
        problem = "follows another version of torch's old file layout"
        found = version if isinstance(version, int) else "no number"  # never print what may be deep
        raise UnsupportedError(problem, path=path, found=found, expected=_PROTOCOL)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise UnsupportedError("its numbers are not in little-endian byte order", path=path)


def _offsets(data: mmap, keys: Pickle, result: Pickle, path: Path) -> dict[_Storage, int]:
    """Where each storage's elements begin, from the counts between them."""
    offsets: dict[_Storage, int] = {}
    pos = keys.end
    for key in keys.value if isinstance(keys.value, list) else [keys.value]:
        storage = result.storages.get(key) if isinstance(key, str) else None
        if storage is None or storage in offsets:
            problem = "its list of storages does not fit the tensors in it"
            raise DamagedCheckpointError(problem, path=path, hint=COPY_AGAIN)
        count = int.from_bytes(data[pos : pos + _COUNT_NBYTES], "little")
        offsets[storage] = pos + _COUNT_NBYTES
        pos += _COUNT_NBYTES + storage.nbytes
        if count != storage.numel or pos > len(data):
            raise DamagedCheckpointError(
                f"ends early, or counts the elements of storage {key!r} in another way",
                path=path,
                found=f"{count} elements in a file of {len(data)} bytes",
                expected=f"{storage.numel} elements up to byte {pos}",
                hint=COPY_AGAIN,
            )
    if pos != len(data):
        raise DamagedCheckpointError(
            "goes on after its last storage, so that bytes were put in or appended",
            path=path,
            found=f"{len(data)} bytes",
            expected=f"{pos}",
            hint=COPY_AGAIN,
        )
    return offsets
