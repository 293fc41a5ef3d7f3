"""Beginning an export: what a stopped one has left, all the room needed, and the small files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3
from msgspec import Struct

from zexport.errors import CheckpointError
from zexport.plan.plan import ExportPlan, FilePlan, SideFile
from zexport.run.manifest import FileEntry
from zexport.run.progress import Meter
from zexport.run.readback import Checks, VerifyMode
from zexport.run.receipts import Receipts
from zexport.store.files import (
    OutputFile,
    blocks,
    check_space,
    open_regular,
    sync_path,
    version,
    writing,
)
from zexport.store.retries import steadily


class Workplace(Struct, frozen=True):
    """An unfinished folder and what is to be in it: what begin, parts and finish share."""

    plan: ExportPlan
    folder: Path
    receipts: Receipts
    verify: VerifyMode
    meter: Meter

    @classmethod
    def of(cls, plan: ExportPlan, folder: Path, verify: VerifyMode, meter: Meter) -> Workplace:
        """The workplace in a folder that exists."""
        return cls(plan, folder, Receipts(folder, plan), verify, meter)

    def checks(self) -> Checks:
        """Reading again what was written."""
        return Checks(self.folder, self.verify, self.meter)


_COPY_NBYTES = 1 << 20

_TENSOR_NBYTES = 260
"""A tensor's line in the manifest, less its name, shape and file; in a receipt it is less."""

_SOURCE_NBYTES = 400
_FIXED_NBYTES = 1 << 16


class Begun(Struct, frozen=True):
    """A folder in which the plan's files can be written.

    Those that a stopped export had finished hold what they should, and the small files are there.
    """

    resumed: tuple[str, ...]
    side_files: Mapping[str, FileEntry]


def begin(work: Workplace) -> Begun:
    """Make a folder ready: then all that is left to do can go well."""
    plan, folder = work.plan, work.folder
    resumed = _take_over(work)
    work.receipts.keep_only(resumed)
    work.receipts.begin()
    rest = [file for file in plan.shards if file.filename not in resumed]
    sides = sum(map(_side_nbytes, plan.side_files))
    check_space(folder, sum(file.nbytes for file in rest) + sides + _notes_nbytes(plan))
    entries = {
        side.filename: write_file(folder / side.filename, _side_content(side))
        for side in plan.side_files
    }
    _reserve(rest, folder)
    with writing(folder):
        sync_path(folder)
    work.meter.expect(to_write=sum(file.data_nbytes for file in rest))
    return Begun(resumed, entries)


def _take_over(work: Workplace) -> tuple[str, ...]:
    """The files that have receipts, and hold what was noted when they are read again."""
    files, meter = work.plan.shards, work.meter
    noted = {file.filename for file in files if work.receipts.find(file) is not None}
    left = sum(file.data_nbytes for file in files if file.filename in noted)
    meter.expect(to_write=sum(file.data_nbytes for file in files) - left, left=left)
    resumed = []
    with work.checks() as checks:
        for file in files:
            receipt = work.receipts.find(file)
            if receipt is not None and checks.holds(file, receipt):
                resumed.append(file.filename)
                meter.resumed(file.data_nbytes)
    return tuple(resumed)


def _reserve(files: Sequence[FilePlan], folder: Path) -> None:
    """Make every file and take its room: a full disk shows here, before any byte is read."""
    for file in files:
        with OutputFile(folder / file.filename, is_new=True) as output:
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


def _side_nbytes(side: SideFile) -> int:
    if side.origin is None:
        return len(side.content or b"")
    with _reading(side.origin):
        return version(side.origin).nbytes


def _side_content(side: SideFile) -> Iterator[bytes]:
    """The bytes of a small file, in pieces."""
    if side.origin is None:
        yield side.content or b""
        return
    with _reading(side.origin), open_regular(side.origin) as file:
        while data := steadily(lambda: file.read(_COPY_NBYTES)):
            yield data


def write_file(path: Path, content: Iterable[bytes]) -> FileEntry:
    """Write a file; what a manifest says of it. It is not yet on the disk."""
    digest = blake3()
    nbytes = 0
    with OutputFile(path, is_new=True) as file:
        for offset, data in blocks(content):
            file.write(data, offset)
            digest.update(data)
            nbytes = offset + len(data)
    return FileEntry(nbytes, digest.hexdigest())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise CheckpointError(f"cannot be read: {cause.strerror}", path=path) from cause
