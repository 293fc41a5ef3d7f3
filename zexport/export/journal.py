"""Receipts of finished files, in the unfinished folder.

A receipt is written atomically once its file is on the disk and was read back, and names its plan.
So a rerun reuses the file, and any process can finish the export.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from errno import ENOENT
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec
from blake3 import blake3
from msgspec import Struct

from zexport.errors import OutputError
from zexport.filenames import RECEIPTS
from zexport.findings import Finding
from zexport.ranges.cast import Statistics
from zexport.ranges.coverage import Ranges
from zexport.ranges.digest import DIGEST_NBYTES, FileDigests
from zexport.storage.files import (
    children,
    exists,
    identity,
    is_file,
    is_folder,
    read_whole,
    write_durably,
)
from zexport.storage.os_errors import reading, writing

_FORMAT = "zexport receipt 2"
_COMPARED = "compared"


class _Entry(Struct, frozen=True):
    plan: str
    ranges: Mapping[int, bytes]


class Receipt(_Entry, frozen=True):
    """A finished file.

    Attributes:
        plan: digest of the plan.
        ranges: what was read for it, with CRC-32, by number of the source.
        digests: of the bytes written.
        remarkable: statistics of tensors with NaN, overflow and the like.
        identity: differs once the file is touched.
    """

    digests: FileDigests
    remarkable: Mapping[str, Statistics]
    identity: str


class Compared(_Entry, frozen=True):
    """The findings of comparing replicas, and what was read for that."""

    findings: tuple[Finding, ...]


_E = TypeVar("_E", Receipt, Compared)


def receipt_name(filename: str) -> str:
    """Return the name of a file's receipt; all are in one folder."""
    return f"{quote(filename, safe='')}.receipt"


def finished_files(folder: Path) -> tuple[str, ...]:
    """Return the files in an unfinished folder that have receipts, of any plan."""
    receipts = folder / RECEIPTS
    found = children(receipts) if is_folder(receipts) else ()
    names = (
        unquote(one.name.removesuffix(".receipt")) for one in found if one.suffix == ".receipt"
    )
    return tuple(name for name in names if is_file(folder / name))


class Journal:
    """The receipts of one plan, given by its digest and sources, in an unfinished folder."""

    def __init__(self, folder: Path, digest: str, sources: Iterable[Path]) -> None:
        self._work = folder
        self.folder = folder / RECEIPTS
        self._digest = digest
        self._sources = [*sources]

    def add(
        self,
        filename: str,
        digests: FileDigests,
        remarkable: Mapping[str, Statistics],
        ranges: Mapping[Path, Ranges],
    ) -> None:
        """Write the receipt of a file that is on the disk and was read back."""
        path = self._work / filename
        with writing(path):
            now = identity(path)
        receipt = Receipt(self._digest, self._packed(ranges), digests, remarkable, now)
        self._write(receipt_name(filename), receipt)

    def find(self, filename: str) -> Receipt | None:
        """Return the receipt of a file, if it is of this plan."""
        return self._read(receipt_name(filename), Receipt)

    def is_unchanged(self, filename: str, receipt: Receipt) -> bool:
        """Whether the file was not touched since its receipt."""
        with reading(path := self._work / filename, OutputError):
            return is_file(path) and identity(path) == receipt.identity

    def add_compared(self, findings: tuple[Finding, ...], ranges: Mapping[Path, Ranges]) -> None:
        """Record that replicas were compared."""
        self._write(_COMPARED, Compared(self._digest, self._packed(ranges), findings))

    def compared(self) -> Compared | None:
        """Return the result of comparing replicas, if that was done."""
        return self._read(_COMPARED, Compared)

    def ranges(self, entry: Receipt | Compared) -> dict[Path, Ranges]:
        """Return what was read, by file."""
        found = {}
        for number, packed in entry.ranges.items():
            numbers = array("Q", packed)
            size = len(numbers) // 3
            columns = (numbers[at : at + size] for at in (0, size, 2 * size))
            found[self._sources[number]] = Ranges(zip(*columns, strict=True))
        return found

    def _packed(self, ranges: Mapping[Path, Ranges]) -> dict[int, bytes]:
        numbers = {path: number for number, path in enumerate(self._sources)}
        return {
            numbers[path]: b"".join(map(array.tobytes, (one.starts, one.stops, one.crcs)))
            for path, one in ranges.items()
        }

    def _write(self, name: str, entry: Struct) -> None:
        path = self.folder / name
        data = msgspec.msgpack.encode(entry)
        with writing(path):
            if not exists(self.folder):
                raise FileNotFoundError(ENOENT, "another process finished or removed it", str(path))
            write_durably(path, blake3(data, derive_key_context=_FORMAT).digest() + data)

    def _read(self, name: str, kind: type[_E]) -> _E | None:
        """Return an entry; one that is damaged, or of another format or plan, is ignored."""
        path = self.folder / name
        with reading(path, OutputError):
            try:
                content = read_whole(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        seal, data = content[:DIGEST_NBYTES], content[DIGEST_NBYTES:]
        if blake3(data, derive_key_context=_FORMAT).digest() != seal:
            return None
        entry = msgspec.msgpack.decode(data, type=kind)
        return entry if entry.plan == self._digest else None
