"""Beginning an export: what a stopped one has left, all the room needed, and the small files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from blake3 import blake3
from msgspec import Struct, structs

from zexport.errors import CheckpointError, OutputError, UnsafeError
from zexport.export.plan import ExportPlan, FilePlan, SideFile
from zexport.export.plan_digest import PlanDigest
from zexport.export.summary import side_nbytes
from zexport.filenames import MANIFEST_NAME
from zexport.printable import some
from zexport.ranges.digests import digest_file
from zexport.run.manifest import FileEntry, check_inside
from zexport.run.progress import Meter
from zexport.run.readback import Checks, VerifyMode
from zexport.run.receipts import Begun, Receipts
from zexport.run.shares import Stretch, whole
from zexport.store.address import Address
from zexport.store.contents import blocks
from zexport.store.files import (
    check_space,
    open_output,
    open_regular,
    reading,
    sync_path,
    version,
    writing,
)
from zexport.store.folders import children, is_file, remove
from zexport.store.json import JsonObject
from zexport.store.retries import steadily
from zexport.store.versions import Version


class Workplace(Struct, frozen=True):
    """An unfinished folder and what is to be in it: what begin, parts and finish share."""

    plan: ExportPlan
    folder: Path
    receipts: Receipts
    verify: VerifyMode
    meter: Meter

    @classmethod
    def of(
        cls,
        plan: ExportPlan,
        folder: Path,
        verify: VerifyMode,
        meter: Meter,
        digest: PlanDigest | None = None,
    ) -> Workplace:
        """The workplace in a folder that exists; who has the plan's digest already gives it.

        Raises:
            UnsafeError: the plan names a file outside the folder.
        """
        receipts = Receipts(folder, plan, digest or PlanDigest(plan))
        work = cls(plan, folder, receipts, verify, meter)
        for name in work.names:
            _check_inside(name, plan.out_dir)
        return work

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files that are to be in it, but the manifest's."""
        shards = (file.filename for file in self.plan.shards)
        return (*shards, *(side.filename for side in self.plan.side_files))

    @property
    def first_sides(self) -> tuple[SideFile, ...]:
        """The small files that are written before all others."""
        return () if isinstance(self.folder, Address) else self.plan.side_files

    @property
    def last_sides(self) -> tuple[SideFile, ...]:
        """The small files that are written when all others are there; what a loader needs, last.

        In object storage these are all: a folder has its name from the beginning there.
        """
        far = self.plan.side_files if isinstance(self.folder, Address) else ()
        return tuple(sorted(far, key=lambda side: side.filename.endswith(_FIRST_LOOKED_FOR)))

    def checks(self) -> Checks:
        """Reading again what was written."""
        return Checks(self.folder, self.verify, self.meter)


def _check_inside(name: str, out_dir: Path) -> None:
    """Refuse the name of a file that would not lie in the folder."""
    try:
        check_inside(name)
    except ValueError as cause:
        raise UnsafeError(
            "would be left by a file that the plan names",
            path=out_dir,
            found=name,
            expected="names of files in it",
            hint="Do not trust this checkpoint: its names were made to lead elsewhere",
        ) from cause


_FIRST_LOOKED_FOR = ("config.json", ".index.json", "latest", "latest_universal")
"""How the names end of what loaders look for first."""

_COPY_NBYTES = 1 << 20

_TENSOR_NBYTES = 260
"""A tensor's line in the manifest, less its name, shape and file; in a receipt it is less."""

_SOURCE_NBYTES = 400
_FIXED_NBYTES = 1 << 16


def begin(work: Workplace) -> list[Stretch]:
    """Make a folder ready, so that all that is left to do can go well: what that is.

    What a stopped export had finished and holds what it should is left as it is.
    """
    files = [whole(file) for file in work.plan.shards]
    rest = without_written(work, files)
    work.receipts.keep_only({one.name for one in files} - {one.name for one in rest})
    _make_ready(work, [one.file for one in rest], 1, {})
    return rest


def begin_together(
    work: Workplace, parts: int, request: JsonObject, *, at_work: Collection[int] = ()
) -> None:
    """Make a folder ready for several workers, unless another of them has done so.

    ``at_work`` are the others of them that may be writing to it now, or wait for their turn.
    """
    begun = work.receipts.begun()
    goes_on = begun is not None and (begun.parts > 1 or (parts == 1 and bool(begun.request)))
    if begun is None or not goes_on:  # or one process alone has stopped, which has no request
        if isinstance(work.folder, Address):  # where others may be writing already
            copied = (side for side in work.plan.side_files if side.origin is not None)
            entries = {side.filename: entry_of(side) for side in copied}
            first = Begun(entries, parts, request, work.names)
            begun = work.receipts.begin_together(first, is_new=begun is None)
        else:
            if begun is None and at_work and work.receipts.is_noted:
                raise OutputError(
                    "is written to by other parts, and its note of what it was begun for is damaged"
                    ", or of another zexport",
                    path=work.folder,
                    found=f"parts {some([*map(str, at_work)])} at work",
                    hint="Run all parts with one zexport; or end them, and remove the folder to "
                    "begin anew",
                )
            work.receipts.keep_only(())
            _make_ready(work, work.plan.shards, parts, request)
            return
    if begun.parts != parts:
        raise OutputError(
            "was begun by another number of workers",
            path=work.folder,
            found=begun.parts,
            expected=parts,
            hint="Give every worker the same n in --part i/n, or remove the folder to begin anew",
        )
    if not isinstance(work.folder, Address) and is_file(work.folder / MANIFEST_NAME):
        remove(work.folder / MANIFEST_NAME)  # the folder is not as it says
    check_sides(work, begun.side_files)


def check_sides(work: Workplace, begun: Mapping[str, FileEntry]) -> None:
    """Have small files that were written first hold what the folder was begun with.

    Those that are gone or hold something else, as after a power cut, are written again.
    """
    _check_copied(work, begun)
    for side in work.first_sides:
        path, entry = work.folder / side.filename, begun.get(side.filename)
        if entry is None:
            continue
        with writing(path):
            is_there = is_file(path)
            if is_there and digest_file(path) == entry.blake3:
                continue
            if is_there:
                remove(path)
        write_sides(work, [side])


def _check_copied(work: Workplace, begun: Mapping[str, FileEntry]) -> None:
    """Refuse files beside the weights that are no longer what the folder was begun with."""
    copied = [side for side in work.plan.side_files if side.origin and side.filename in begun]
    changed = [side for side in copied if begun[side.filename] != entry_of(side)]
    if changed:
        raise OutputError(
            "was begun with other files beside the weights",
            path=work.folder,
            found=some([f"another {side.filename}" for side in changed], 4),
            hint="Put them back as they were, or remove the folder to begin anew",
        )


def entry_of(side: SideFile) -> FileEntry:
    """What a manifest says of a small file."""
    digest, nbytes = blake3(), 0
    for data in side_content(side):
        digest.update(data)
        nbytes += len(data)
    return FileEntry(nbytes, digest.hexdigest())


def _make_ready(work: Workplace, rest: Sequence[FilePlan], parts: int, request: JsonObject) -> None:
    """Take all the room, write the small files, and say what the folder was begun for."""
    plan, folder = work.plan, work.folder
    sides = sum(side_nbytes(plan).values())
    check_space(folder, sum(file.nbytes for file in rest) + sides + _notes_nbytes(plan))
    entries = write_sides(work, work.first_sides)
    _reserve(rest, folder)
    with writing(folder):
        sync_path(folder)
    work.receipts.begin(Begun(entries, parts, request, work.names))


def write_sides(work: Workplace, sides: Iterable[SideFile]) -> dict[str, FileEntry]:
    """Write small files; what a manifest says of each.

    Objects may be there already: another worker, too, may have come to the end.
    """
    is_new = not isinstance(work.folder, Address)
    return {
        side.filename: write_file(work.folder / side.filename, side_content(side), is_new=is_new)
        for side in sides
    }


def without_written(work: Workplace, stretches: Iterable[Stretch]) -> list[Stretch]:
    """Those that have no receipt, or hold something else than noted when they are read again."""
    found = [(stretch, work.receipts.find(stretch)) for stretch in stretches]
    left = sum(stretch.nbytes for stretch, receipt in found if receipt is not None)
    whole_nbytes = sum(stretch.nbytes for stretch, _ in found)
    work.meter.expect(to_write=whole_nbytes - left, left=left)
    rest = []
    with work.checks() as checks:
        for stretch, receipt in found:
            if receipt is not None and checks.holds(stretch, receipt):
                work.meter.resumed(stretch.nbytes)
            else:
                rest.append(stretch)
    work.meter.expect(to_write=sum(stretch.nbytes for stretch in rest))
    return rest


def _reserve(files: Sequence[FilePlan], folder: Path) -> None:
    """Make every file and take its room: a full disk shows here, before any byte is read."""
    for file in files:
        with open_output(folder / file.filename, is_new=True) as output:
            output.reserve(file.nbytes)


def _notes_nbytes(plan: ExportPlan) -> int:
    """No less than what the manifest and the receipts of a plan take together."""
    tensors = sum(
        _TENSOR_NBYTES + len(json.dumps(tensor.name)) + len(str(tensor.shape))
        for file in plan.shards
        for tensor in file.tensors
    )
    provenance = len(json.dumps(dict(plan.provenance)))
    return 2 * (tensors + provenance + _SOURCE_NBYTES * len(plan.sources) + _FIXED_NBYTES)


def versions_in(folders: Iterable[Path]) -> dict[Path, Version]:
    """The versions of the files in folders of this machine, to be noted before any is read."""
    found: dict[Path, Version] = {}
    for folder in folders:
        local: Iterable[Path] = ()
        with suppress(OSError):  # what is not there, or refuses, is told of by who needs it
            local = () if isinstance(folder, Address) else children(folder)
        for path in local:
            with suppress(OSError):
                if is_file(path):
                    found[path] = version(path)
    return found


def noted(plan: ExportPlan, known: Mapping[Path, Version]) -> ExportPlan:
    """The plan with the versions of the files that it copies, as ``known``, or else as now."""
    return replace(plan, side_files=tuple(_noted(side, known) for side in plan.side_files))


def _noted(side: SideFile, known: Mapping[Path, Version]) -> SideFile:
    if side.origin is None:
        return side
    with reading(side.origin):
        return structs.replace(side, version=known.get(side.origin) or version(side.origin))


def side_content(side: SideFile) -> Iterator[bytes]:
    """The bytes of a small file, in pieces.

    Raises:
        CheckpointError: it is no longer what was planned.
    """
    if side.origin is None:
        yield side.content or b""
        return
    with reading(side.origin), open_regular(side.origin) as file:
        found = version(side.origin)
        if side.version is not None and found != side.version:
            raise CheckpointError(
                "was changed since the export was planned",
                path=side.origin,
                found=found,
                expected=side.version,
                hint="Plan it again",
            )
        while data := steadily(lambda: file.read(_COPY_NBYTES)):
            yield data


def write_file(path: Path, content: Iterable[bytes], *, is_new: bool = True) -> FileEntry:
    """Write a file; what a manifest says of it. It is not yet on the disk."""
    digest = blake3()
    nbytes = 0
    with open_output(path, is_new=is_new) as file, writing(path):
        for offset, data in blocks(content):
            file.write(data, offset)
            digest.update(data)
            nbytes = offset + len(data)
        file.complete()
    return FileEntry(nbytes, digest.hexdigest())
