"""Receipts: what was written of each file and read for it, kept in the unfinished folder.

A receipt is made when its file is on the disk and reads back as it was written; it appears whole or
not at all. It names what it belongs to by the plan's digest. So a rerun goes on from it, and who
completes the folder need not be who wrote the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from blake3 import blake3
from msgspec import Struct
from msgspec.structs import astuple

from zexport.errors import OutputError
from zexport.plan.digest import PlanDigest
from zexport.plan.plan import ExportPlan, FilePlan
from zexport.ranges.casts import Statistics
from zexport.ranges.ledger import Range
from zexport.store.files import changed_ns, read_whole, write_durably, writing
from zexport.store.folders import (
    children,
    is_file,
    is_folder,
    leaves,
    make_folder,
    real,
    remove,
)

RECEIPTS_NAME = ".zexport_journal"
"""A folder within the unfinished folder; never part of the finished one."""

_DIGEST_NBYTES = 32
_ENTRY = ".json"
_PLAN = "plan"


class Receipt(Struct, frozen=True):
    """What was written of one file.

    The digests of its tensors end to end in file order, what was remarkable of them, and what was
    read for it. The CRC-32 of each range is part of the proof that the whole record is what was
    saved.
    """

    filename: str
    nbytes: int
    blake3: str
    digests: bytes
    remarkable: Mapping[str, Statistics]
    ranges: Mapping[Path, list[Range]]

    def tensor_digests(self) -> Iterator[str]:
        """The digests of the tensors, in file order."""
        for at in range(0, len(self.digests), _DIGEST_NBYTES):
            yield self.digests[at : at + _DIGEST_NBYTES].hex()


class Receipts:
    """The receipts for a plan's files, in the folder that it fills."""

    def __init__(self, folder: Path, plan: ExportPlan) -> None:
        self._folder = folder / RECEIPTS_NAME
        self._paths = [source.path for source in plan.sources]
        self._digest = PlanDigest(plan)
        self._unproven = _unproven(plan)
        with writing(self._folder):
            make_folder(self._folder)

    def begin(self) -> None:
        """Say which plan the folder is being filled for."""
        with writing(self._folder):
            write_durably(self._folder / _PLAN, self._whole.encode())

    @property
    def _whole(self) -> str:
        return "\n".join([self._digest.whole, json.dumps(self._unproven)])

    def check_plan(self) -> None:
        """Refuse a folder that was begun for another plan."""
        try:
            found = read_whole(self._folder / _PLAN).decode(errors="replace")
        except OSError:
            found = ""
        if found != self._whole:
            raise OutputError(
                "was begun for another plan",
                path=self._folder.parent,
                hint="Run the same command, with the same versions, on the same checkpoint",
            )

    def add(self, file: FilePlan, receipt: Receipt) -> None:
        """Note a file that is on the disk."""
        table = {
            "plan": self._digest.of_file(file),
            "unproven": self._unproven,
            "nbytes": receipt.nbytes,
            "blake3": receipt.blake3,
            "digests": receipt.digests.hex(),
            "remarkable": {name: astuple(seen) for name, seen in receipt.remarkable.items()},
            "ranges": [receipt.ranges.get(path, []) for path in self._paths],
        }
        text = json.dumps(table).encode()
        seal = blake3(text).hexdigest().encode()
        with writing(self._entry(file)):
            write_durably(self._entry(file), seal + b"\n" + text)

    def of(self, file: FilePlan) -> Receipt:
        """What was noted of a file, which has to be there."""
        if (receipt := self.find(file)) is None:
            raise OutputError(
                f"has no receipt for {file.filename}",
                path=self._folder.parent,
                hint="Run the same command again: it goes on from what is there",
            )
        return receipt

    def find(self, file: FilePlan) -> Receipt | None:
        """What was noted of a file; ``None`` where nothing was, or something of another plan."""
        try:
            seal, text = read_whole(self._entry(file)).split(b"\n", 1)
        except (OSError, ValueError):
            return None
        if blake3(text).hexdigest().encode() != seal:
            return None
        table = json.loads(text)
        if (table["plan"], table["unproven"]) != (self._digest.of_file(file), self._unproven):
            return None
        ranges = zip(self._paths, table["ranges"], strict=True)
        return Receipt(
            file.filename,
            table["nbytes"],
            table["blake3"],
            bytes.fromhex(table["digests"]),
            {name: Statistics(*seen) for name, seen in table["remarkable"].items()},
            {path: [(a, b, crc) for a, b, crc in found] for path, found in ranges if found},
        )

    def keep_only(self, filenames: Collection[str]) -> None:
        """Clear everything out of the folder but these files and their receipts."""
        folder = self._folder.parent
        entries = {f"{RECEIPTS_NAME}/{name}{_ENTRY}" for name in filenames}
        with writing(folder):
            _clear(folder, lambda name: name in filenames or name in entries)

    def _entry(self, file: FilePlan) -> Path:
        return self._folder / f"{file.filename}{_ENTRY}"


def _unproven(plan: ExportPlan) -> list[list[str | int | None]]:
    """The sources that no checksum stands for, each with where it is and when it last changed.

    Two base models may be alike in names, sizes and times, as where times are all set to one.
    """
    return [
        [str(real(source.path)), changed_ns(source.path)]
        for source in plan.sources
        if not source.members or any(member.crc32 is None for member in source.members)
    ]


def finished_files(folder: Path) -> tuple[str, ...]:
    """Names of the files that a folder has receipts for, whatever plan they are of."""
    receipts = folder / RECEIPTS_NAME
    found = leaves(receipts) if is_folder(receipts) else ()
    entries = (path.relative_to(receipts).as_posix() for path in found)
    names = (name.removesuffix(_ENTRY) for name in entries if name.endswith(_ENTRY))
    return tuple(sorted(name for name in names if is_file(folder / name)))


def drop_unfinished(folder: Path) -> None:
    """Remove everything but finished files and their receipts."""
    finished = {*finished_files(folder)}
    receipts = f"{RECEIPTS_NAME}/"
    _clear(folder, lambda name: bool(finished) and (name in finished or name.startswith(receipts)))


def _clear(folder: Path, is_kept: Callable[[str], bool]) -> None:
    """Remove all below a folder that is not kept, and the folders that this leaves empty."""
    for path in list(leaves(folder)):
        if is_kept(path.relative_to(folder).as_posix()):
            continue
        remove(path)
        for above in path.parents:
            if above == folder or children(above):
                break
            remove(above)


def drop_receipts(folder: Path) -> None:
    """Remove the receipts from a folder that is complete."""
    if is_folder(folder / RECEIPTS_NAME):
        remove(folder / RECEIPTS_NAME)
