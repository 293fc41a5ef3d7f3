"""Receipts: what was written of each file and read for it, kept in the unfinished folder.

A receipt is made when its file is on the disk and reads back as it was written; it appears whole or
not at all. It names what it belongs to by the plan's digest. So a rerun goes on from it, and who
completes the folder need not be who wrote the file.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3
from msgspec import Struct, convert, to_builtins
from msgspec.structs import astuple

from zexport import __version__
from zexport.errors import OutputError
from zexport.export.plan import ExportPlan
from zexport.export.plan_digest import PlanDigest
from zexport.filenames import RECEIPTS
from zexport.findings import Finding
from zexport.printable import shown, some
from zexport.ranges.casts import Statistics
from zexport.ranges.ledger import Ranges
from zexport.run.manifest import FileEntry
from zexport.run.shares import Stretch
from zexport.store.address import Address
from zexport.store.contents import read_whole, write_durably
from zexport.store.files import changed_ns, reading, version, writing
from zexport.store.folders import (
    children,
    exists,
    is_file,
    is_folder,
    leaves,
    make_folder,
    real,
    remove,
    remove_all,
)
from zexport.store.json import JsonObject

DIGEST_NBYTES = 32
_ENTRY = ".json"
_PLAN = "plan"
_PART = "part "
_TOLD = ("checkpoint", "options", "settings", "universal")
"""What a manifest says of the checkpoint, and of what was chosen for an export or a resharding."""


class Receipt(Struct, frozen=True):
    """What was written of one stretch of a file, which is all of it or a part.

    The digests of its tensors end to end in file order, their CRC-32, what was remarkable of them,
    and what was read for them. The CRC-32 of each range is part of the proof that the whole record
    is what was saved. ``blake3`` is the file's, where that is whole; ``changed_ns`` is when it last
    changed in any way before this was noted.
    """

    digests: bytes
    crc32s: tuple[int, ...]
    remarkable: Mapping[str, Statistics]
    ranges: Mapping[Path, Ranges]
    blake3: str = ""
    changed_ns: int | None = None

    def tensor_digests(self, first: int = 0, last: int | None = None) -> Iterator[str]:
        """The digests of the tensors, in file order: of all, or from one's place to another's."""
        stop = len(self.digests) if last is None else last * DIGEST_NBYTES
        for at in range(first * DIGEST_NBYTES, stop, DIGEST_NBYTES):
            yield self.digests[at : at + DIGEST_NBYTES].hex()


class Compared(Struct, frozen=True):
    """What was found where copies in the checkpoint were compared, and what was read for that."""

    findings: tuple[Finding, ...]
    ranges: Mapping[Path, Ranges]


class Begun(Struct, frozen=True):
    """What a folder was begun with.

    Its small files, how many workers fill it, what the plan was made of, so that it can be made
    again, and the names of all files that it is to hold.
    """

    side_files: Mapping[str, FileEntry]
    parts: int = 1
    request: Mapping[str, Any] = {}
    files: tuple[str, ...] = ()


class Receipts:
    """The receipts for a plan, which has this digest, in the folder that it fills."""

    def __init__(self, folder: Path, plan: ExportPlan, digest: PlanDigest) -> None:
        self._folder = folder / RECEIPTS
        self._paths = [source.path for source in plan.sources]
        self._digest = digest
        self._unproven = _unproven(plan)
        self._choices = _choices(plan)
        self._side_names = {side.filename for side in plan.side_files}
        with writing(self._folder):
            make_folder(self._folder)

    def begin(self, begun: Begun) -> None:
        """Say which plan the folder is being filled for."""
        self._write(self._folder / _PLAN, self._of_plan(begun))

    def begin_together(self, begun: Begun, *, is_new: bool) -> Begun:
        """The same where others may do so at this moment; what the first has said counts."""
        path = self._folder / _PLAN
        with writing(path), suppress(FileExistsError):
            write_durably(path, _sealed(self._of_plan(begun)), is_new=is_new)
        return self.need_begun()

    def _of_plan(self, begun: Begun) -> dict[str, object]:
        table = {"plan": self._digest.whole, "unproven": self._unproven}
        return table | {"choices": self._choices, **to_builtins(begun)}

    @property
    def is_noted(self) -> bool:
        """Whether anything says what the folder was begun for, be it whole or not."""
        return is_file(self._folder / _PLAN)

    def begun(self) -> Begun | None:
        """What the folder was begun with, for this very plan; ``None`` where it is not begun."""
        if (table := _read(self._folder / _PLAN)) is None:
            return None
        is_same = (table["plan"], table["unproven"]) == (self._digest.whole, self._unproven)
        if not (is_same and table["side_files"].keys() <= self._side_names):
            raise self._other(table.get("choices", {}))
        return convert(table, Begun)

    def _other(self, begun: Mapping[str, str]) -> OutputError:
        """A refusal that names what the folder was begun with, and this plan has otherwise."""
        own = self._choices
        names = [name for name in own if begun.get(name, own[name]) != own[name]]
        by = f"zexport {begun['zexport']}" if "zexport" in names else "the same versions"
        return OutputError(
            "was begun for another plan",
            path=self._folder.parent,
            found=some([f"{name} {begun[name]}" for name in names]) or "the same options",
            expected=some([f"{name} {own[name]}" for name in names])
            or "also the same files, and what this transformers says of them",
            hint=f"Run the same command, with {by}, on the same checkpoint; or remove the folder "
            "to begin anew",
        )

    def need_begun(self) -> Begun:
        """The same; the folder has to be begun."""
        if (begun := self.begun()) is None:
            raise OutputError(
                "was not begun for this plan",
                path=self._folder.parent,
                hint="Run the same command, with the same versions, on the same checkpoint; or "
                "remove the folder to begin anew",
            )
        return begun

    def add(self, stretch: Stretch, receipt: Receipt) -> None:
        """Note a stretch that is on the disk."""
        table = {
            "plan": self._digest.of_file(stretch.file),
            "unproven": self._unproven,
            "blake3": receipt.blake3,
            "changed_ns": changed_ns(self._folder.parent / stretch.file.filename),
            "digests": receipt.digests.hex(),
            "crc32s": receipt.crc32s,
            "remarkable": {name: astuple(seen) for name, seen in receipt.remarkable.items()},
            "ranges": self._listed(receipt.ranges),
            "object": self._object(stretch),
        }
        self._write(self._entry(stretch.name), table)

    def drop(self, stretch: Stretch, number: int) -> None:
        """Forget a stretch of this part: it is to be written again, and the part is not done."""
        for name in (f"{_PART}{number}", stretch.name):
            with writing(self._entry(name)), suppress(FileNotFoundError):
                remove(self._entry(name))

    def of(self, stretch: Stretch) -> Receipt:
        """What was noted of a stretch, which has to be there."""
        if (receipt := self.find(stretch)) is None:
            raise OutputError(
                f"has no receipt for {stretch.name}",
                path=self._folder.parent,
                hint="Run the same command again, where there are several parts each of them: it "
                "goes on from what is there",
            )
        return receipt

    def find(self, stretch: Stretch) -> Receipt | None:
        """What was noted of a stretch; ``None`` where nothing was, or something of another plan.

        Nor does a receipt count for an object that was replaced since.
        """
        table = _read(self._entry(stretch.name))
        expected = (self._digest.of_file(stretch.file), self._unproven)
        if table is None or (table["plan"], table["unproven"]) != expected:
            return None
        if table["object"] != self._object(stretch):
            return None
        return Receipt(
            bytes.fromhex(table["digests"]),
            tuple(table["crc32s"]),
            {name: Statistics(*seen) for name, seen in table["remarkable"].items()},
            self._found(table["ranges"]),
            table["blake3"],
            table["changed_ns"],
        )

    def add_part(self, number: int, compared: Compared) -> None:
        """Note a part all of whose stretches are noted, and what it compared."""
        findings = to_builtins(compared.findings)
        table = {
            "plan": self._digest.whole,
            "unproven": self._unproven,
            "findings": findings,
            "ranges": self._listed(compared.ranges),
        }
        self._write(self._entry(f"{_PART}{number}"), table)

    def part(self, number: int) -> Compared | None:
        """What a part compared; ``None`` where it is not done, or was of another plan."""
        table = _read(self._entry(f"{_PART}{number}"))
        expected = (self._digest.whole, self._unproven)
        if table is None or (table["plan"], table["unproven"]) != expected:
            return None
        findings = convert(table["findings"], tuple[Finding, ...])
        return Compared(findings, self._found(table["ranges"]))

    def keep_only(self, stretches: Collection[str]) -> None:
        """Clear everything out of the folder but these stretches' files, and their receipts."""
        folder = self._folder.parent
        entries = {f"{RECEIPTS}/{name}{_ENTRY}" for name in stretches}
        with writing(folder):
            _clear(folder, lambda name: name in stretches or name in entries)

    def _object(self, stretch: Stretch) -> str:
        """What tells an object from another in its place; nobody else has a file on a disk."""
        path = self._folder.parent / stretch.file.filename
        with reading(path, OutputError):
            try:
                return str(version(path)) if isinstance(path, Address) else ""
            except FileNotFoundError:
                return "none"

    def _listed(self, ranges: Mapping[Path, Ranges]) -> list[str]:
        """Ranges by the number of their file."""
        return [_packed(ranges.get(path, Ranges())) for path in self._paths]

    def _found(self, listed: list[str]) -> dict[Path, Ranges]:
        numbered = zip(self._paths, listed, strict=True)
        return {path: _unpacked(text) for path, text in numbered if text}

    def _write(self, path: Path, table: Mapping[str, object]) -> None:
        with writing(path):
            write_durably(path, _sealed(table))

    def _entry(self, name: str) -> Path:
        return self._folder / f"{name}{_ENTRY}"


def _packed(ranges: Ranges) -> str:
    columns = (ranges.starts, ranges.stops, ranges.crcs)
    return b64encode(b"".join(map(array.tobytes, columns))).decode()


def _unpacked(text: str) -> Ranges:
    numbers = array("Q", b64decode(text))
    size = len(numbers) // 3
    return Ranges(zip(*(numbers[at : at + size] for at in (0, size, 2 * size)), strict=True))


def _sealed(table: Mapping[str, object]) -> bytes:
    """What is noted, after a digest of it."""
    text = json.dumps(table).encode()
    return _seal(text) + b"\n" + text


def _seal(text: bytes) -> bytes:
    """Of what this form of receipts says: one of another form counts for none."""
    return blake3(text, derive_key_context="zexport receipts 2").hexdigest().encode()


def read_request(folder: Path) -> JsonObject | None:
    """What the plan was made of that several workers fill an unfinished folder for."""
    table = _read(folder / RECEIPTS / _PLAN)
    return None if table is None else table["request"] or None


def begun_names(folder: Path) -> tuple[str, ...]:
    """The names of the files that an unfinished folder was begun for, whatever plan that was."""
    table = _read(folder / RECEIPTS / _PLAN) or {}
    return tuple(table.get("files", ()))


def _unproven(plan: ExportPlan) -> list[list[str | int | None]]:
    """The sources that no checksum stands for, each with where it is and when it last changed.

    Two base models may be alike in names, sizes and times, as where times are all set to one.
    """
    return [
        [str(real(source.path)), changed_ns(source.path)]
        for source in plan.sources
        if not source.members or any(member.crc32 is None for member in source.members)
    ]


def _choices(plan: ExportPlan) -> dict[str, str]:
    """What a plan was made with and of, by which users know it from another."""
    told = {name: plan.provenance.get(name) or {} for name in _TOLD}
    given = (convert(one, dict[str, Any]).items() for one in told.values())
    choices = {"zexport": __version__} | {name: value for one in given for name, value in one}
    return {name: shown(value) for name, value in choices.items()}


def _read(path: Path) -> dict[str, Any] | None:
    """What was noted; ``None`` where nothing was, or it is not whole."""
    with reading(path, OutputError):
        try:
            seal, _, text = read_whole(path).partition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return None
    if _seal(text) != seal:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def finished_files(folder: Path) -> tuple[str, ...]:
    """Names of the files that a folder has receipts for, whatever plan they are of."""
    receipts = folder / RECEIPTS
    found = leaves(receipts) if is_folder(receipts) else ()
    entries = (path.relative_to(receipts).as_posix() for path in found)
    names = (name.removesuffix(_ENTRY) for name in entries if name.endswith(_ENTRY))
    return tuple(sorted(name for name in names if is_file(folder / name)))


def drop_unfinished(folder: Path) -> None:
    """Remove everything but finished files and their receipts."""
    finished = {*finished_files(folder)}
    receipts = f"{RECEIPTS}/"
    _clear(folder, lambda name: bool(finished) and (name in finished or name.startswith(receipts)))


def _clear(folder: Path, is_kept: Callable[[str], bool]) -> None:
    """Remove all below a folder that is not kept, and the folders that this leaves empty.

    Receipts go last: where this is stopped, the rest is known by them for an export's.
    """
    gone = [path for path in leaves(folder) if not is_kept(path.relative_to(folder).as_posix())]
    receipts = [path for path in gone if folder / RECEIPTS in path.parents]
    remove_all(path for path in gone if path not in receipts)
    remove_all(receipts)
    for path in gone:
        for above in path.parents:
            if above == folder or not exists(above) or children(above):
                break
            remove(above)


def note_older(folder: Path) -> None:
    """Note all that lies in a folder as an export's own, before that is removed.

    Who is stopped meanwhile leaves less than an export; it is told by this, and cleared away.
    """
    names = tuple(path.relative_to(folder).as_posix() for path in leaves(folder))
    nothing = {"plan": "", "unproven": [], "choices": {}}
    table = nothing | to_builtins(Begun({}, files=names))
    write_durably(folder / RECEIPTS / _PLAN, _sealed(table))


def drop_receipts(folder: Path) -> None:
    """Remove the receipts from a folder that is complete, as its manifest says.

    What the folder was begun for goes last: who was to give it its name can be told what it is.
    """
    receipts = folder / RECEIPTS
    if is_folder(receipts):
        remove_all(path for path in children(receipts) if path.name != _PLAN)
        remove(receipts)


def clear_receipts(folder: Path, warn: Callable[[str], None]) -> None:
    """The same; an address is complete by then, and told of what cannot be removed."""
    try:
        drop_receipts(folder)
    except OSError as cause:
        if not isinstance(folder, Address):
            raise
        warn(f"{folder / RECEIPTS} is of no use any more, and cannot be removed: {cause.strerror}")
