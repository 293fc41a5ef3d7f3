"""Receipts of finished files, in the unfinished folder.

A receipt is written atomically once its file is on the disk and was read back, and names its plan.
So a rerun reuses the file, and any process can finish the export.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from errno import ENOENT
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
from blake3 import blake3
from msgspec import Struct

from zexport.errors import OutputError
from zexport.filenames import RECEIPTS
from zexport.findings import Findings
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

_FORMAT = "zexport receipt 3"
_COMPARED = "compared"


class Receipt(Struct, frozen=True):
    """A finished file, or the comparison of replicas, which has ``findings`` and no digests.

    Attributes:
        plan: digest of the plan.
        ranges: what was read for it, with CRC-32, by number of the source.
        digests: of the bytes written.
        remarkable: statistics of tensors with NaN, overflow and the like.
        identity: differs once the file is touched.
    """

    plan: str
    ranges: Mapping[int, bytes]
    digests: FileDigests = FileDigests(b"", "", 0)
    remarkable: Mapping[str, Statistics] = {}
    identity: str = ""
    findings: Findings = ()


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
        return self._read(receipt_name(filename))

    def is_unchanged(self, filename: str, receipt: Receipt) -> bool:
        with reading(path := self._work / filename, OutputError):
            return is_file(path) and identity(path) == receipt.identity

    def add_compared(self, findings: Findings, ranges: Mapping[Path, Ranges]) -> None:
        self._write(_COMPARED, Receipt(self._digest, self._packed(ranges), findings=findings))

    def compared(self) -> Receipt | None:
        return self._read(_COMPARED)

    def ranges(self, entry: Receipt) -> dict[Path, Ranges]:
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

    def _write(self, name: str, entry: Receipt) -> None:
        path = self.folder / name
        data = msgspec.msgpack.encode(entry)
        with writing(path):
            if not exists(self.folder):
                raise FileNotFoundError(ENOENT, "another process finished or removed it", str(path))
            write_durably(path, blake3(data, derive_key_context=_FORMAT).digest() + data)

    def _read(self, name: str) -> Receipt | None:
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
        entry = msgspec.msgpack.decode(data, type=Receipt)
        return entry if entry.plan == self._digest else None
