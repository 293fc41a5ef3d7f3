"""Begin, write and finish an export: one job for one process, parts, and Ray.

One process does all three. With ``--part``, the first process begins and the last one finishes;
with Ray, the driver does both. They share only the unfinished folder with its sealed plan and
receipts, so a process that died is simply started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct, structs

from zexport import __version__
from zexport.errors import DamagedCheckpointError, OutputError, UnsafeError
from zexport.export.checked_reader import WeightReader
from zexport.export.destination import Destination, abandon, destination
from zexport.export.journal import Journal, Receipt
from zexport.export.lost_updates import compare_roundings
from zexport.export.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    check_inside,
    source_entries,
)
from zexport.export.overwrite import check_content, check_place, is_complete, real_path
from zexport.export.plan import ExportPlan, TensorPlan
from zexport.export.plan_file import FileSize, Request, SealedPlan, unseal
from zexport.export.report import (
    ExportReport,
    Meter,
    OnProgress,
    VerifyMode,
)
from zexport.export.write import (
    READBACK_THREADS,
    check_small,
    check_unchanged,
    still_holds,
    write_files,
    write_small,
)
from zexport.filenames import MANIFEST_NAME
from zexport.findings import Finding, FindingKind, Findings
from zexport.options import Share
from zexport.ranges.cast import Statistics
from zexport.ranges.dtypes import DType
from zexport.storage.files import is_file, is_folder, read_whole, remove, write_durably
from zexport.storage.os_errors import reading, writing
from zexport.text import shown, some

Reader = Callable[[ExportPlan], WeightReader]

_NOTES_NBYTES, _NOTES_RATIO = 128 << 10, 8
"""Upper bound of plan, receipts and manifest: bytes, plus a multiple of the unpacked plan."""

TURN_SECONDS, LOCK_SECONDS = 3600.0, 0.1
"""How long a part waits while another begins or finishes; how long one process waits."""

_OVERFLOW = {
    DType.F32: FindingKind.FP32_OVERFLOW,
    DType.F16: FindingKind.FP16_OVERFLOW,
    DType.BF16: FindingKind.BF16_OVERFLOW,
}
_UNDERFLOW_SHARE = 100
"""One in 100 elements may underflow in fp16: of normal weights one in a million does, of an
embedding its rarely used rows."""


WHOLE = Share()


class Written(Struct, frozen=True):
    """What one process did: bytes read, names of the files written, findings of replicas."""

    nbytes_read: int = 0
    files: tuple[str, ...] = ()
    findings: Findings = ()


class Job(Struct, frozen=True):
    """A sealed plan and where it is carried out."""

    sealed: SealedPlan
    place: Destination
    journal: Journal
    verify: VerifyMode
    meter: Meter
    began: float

    @classmethod
    def of(cls, sealed: SealedPlan, verify: VerifyMode, progress: OnProgress | None) -> Job:
        """Return the job of a plan.

        Raises:
            UnsafeError: the plan names a file outside the output folder.
            OutputError: the output would contain its sources or the working directory.
        """
        plan = sealed.plan
        try:
            for name in sealed.filenames:
                check_inside(name)
        except ValueError as cause:
            raise UnsafeError(
                "a planned file would be written outside the output folder",
                path=plan.out_dir,
                found=cause,
                hint="Do not trust this checkpoint: its names were made to escape",
            ) from cause
        place = destination(real_path(plan.out_dir))
        sources = [one.path for one in plan.sources]
        sources += [side.origin for side in plan.side_files if side.origin is not None]
        for folder in {place.target, place.folder}:
            check_place(folder, sources)
        journal = Journal(place.folder, sealed.digest, (one.path for one in plan.sources))
        meter = Meter(progress, reads_again=verify is not VerifyMode.NONE)
        return cls(sealed, place, journal, verify, meter, time.monotonic())

    @property
    def plan(self) -> ExportPlan:
        return self.sealed.plan

    def missing(self) -> list[FileSize]:
        return [one for one in self.sealed.sizes if self.journal.find(one.filename) is None]

    def parts_missing(self, count: int) -> tuple[int, ...]:
        """Return the numbers of the parts, of ``count``, that are not written."""
        sizes, missing = self.sealed.sizes, {*self.missing()}
        every = [one.data_nbytes for one in sizes]
        is_compared = self.journal.compared() is not None
        return tuple(
            number
            for number in range(1, count + 1)
            if not missing.isdisjoint(sizes[one] for one in Share(number, count).select(every))
            or (number == 1 and not is_compared)
        )


def load(out_dir: Path, request: Request | None = None) -> SealedPlan | None:
    """Return the sealed plan in an unfinished folder; ``None`` without one.

    ``request`` is that of this process: equal choices, possibly other paths.

    Raises:
        OutputError: the plan is damaged, of another zexport, or of another request.
    """
    path = destination(real_path(out_dir)).plan_path
    with reading(path, OutputError):
        try:
            content = read_whole(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    sealed = unseal(content, path, out_dir, request)
    if request is None or request.choices == sealed.request.choices:
        return sealed
    if not sealed.request.choices:  # of one process, which was interrupted
        return None
    raise _other_plan(out_dir, sealed.request, request)


def _other_plan(out_dir: Path, begun: Request, own: Request) -> OutputError:
    was = [f"{n} {shown(begun.choices.get(n))}" for n, one in own.choices.items()]
    now = [f"{n} {shown(one)}" for n, one in own.choices.items()]
    return OutputError(
        "was started with other options, another checkpoint or another transformers",
        path=out_dir,
        found=some([one for one in was if one not in now]) or "the same options",
        expected=some([one for one in now if one not in was]) or "also the same files",
        hint="Run the same command on the same checkpoint; or stop all parts and "
        "remove the folder to start over",
    )


def begin(job: Job, share: Share = WHOLE) -> bool:
    """Prepare the folder so that writing cannot fail for lack of space or permission.

    Call it with ``place.lock``. It continues an interrupted job of the same plan. Return whether
    there is anything to do: for a part, the output may be complete.

    Raises:
        OutputError: something is in the way, there is no space, or another plan is being written.
    """
    plan, place, is_shared = job.plan, job.place, share.count > 1
    found = _begun(place, plan.out_dir)
    continues = found is not None and found.digest == job.sealed.digest
    if not (continues and is_shared) and (running := place.parts_running()):
        raise OutputError(
            "another export is writing this folder",
            path=place.target,
            found=f"parts {some([*running])}",
            hint="Wait for them, or choose another name",
        )
    if found is not None and not continues and is_shared:
        raise _other_plan(plan.out_dir, found.request, job.sealed.request)
    if is_shared and not plan.overwrite and is_complete(plan, place.target):
        return False
    with writing(place.target):
        is_begun = not place.is_renamed and (found is not None or is_folder(place.journal))
    if not is_begun:
        may_replace = plan.overwrite and (place.is_renamed or not is_shared)
        check_content(place.target, overwrite=may_replace, is_checkpoint=plan.form.is_checkpoint)
    for source in plan.sources:
        check_unchanged(source.path, source.version, error=DamagedCheckpointError)
    for side in plan.side_files:
        if side.origin is not None and side.version is not None:
            check_unchanged(side.origin, side.version)
    others = set() if found is None else found.filenames
    place.prepare(job.sealed.filenames | others, resumes=continues)
    notes = _NOTES_NBYTES + _NOTES_RATIO * job.sealed.nbytes
    try:
        place.reserve(job.sealed.sizes, sum(one.nbytes for one in plan.side_files) + notes)
        with writing(place.plan_path):
            try:
                write_durably(place.plan_path, job.sealed.content, is_new=not place.is_renamed)
            except FileExistsError:  # in a bucket, another part began at this moment
                other = load(plan.out_dir)
                if other is None or other.digest != job.sealed.digest:
                    raise
    except BaseException as error:  # a full disk, Ctrl-C
        if place.is_renamed and not continues:
            abandon(place.folder, error)
        raise
    return True


def _begun(place: Destination, out_dir: Path) -> SealedPlan | None:
    """Return the plan of an unfinished folder; ``None`` if complete, or unreadable and unused."""
    with writing(place.target):
        if not place.is_renamed and is_file(place.target / MANIFEST_NAME):
            if is_folder(place.journal):
                remove(place.journal)
            return None
    try:
        return load(out_dir)
    except (OutputError, UnsafeError):
        if place.parts_running() or not place.is_renamed:
            raise
        return None


def write(job: Job, share: Share = WHOLE, reader: Reader = WeightReader.of_plan) -> Written:
    """Write a part: each of its files is on the disk, read back, and has a receipt.

    Part 1 also compares replicas.

    Raises:
        OutputError: another process writes this part, or the system refuses to write.
        CheckpointError: a source is damaged, or changed.
    """
    plan, journal = job.plan, job.journal
    findings: Findings = ()
    with job.place.lock_part(str(share)), reader(plan) as sources:
        rest = _find_unwritten(job, share)
        files = (plan.shards[number] for number in rest)  # each is decoded when its turn comes
        if share.number == 1 and journal.compared() is None:
            findings = _compare(plan, sources)
            journal.add_compared(findings, sources.compared)
        sources.prepare()
        write_files(plan, files, job.place.folder, journal, sources, job.verify, job.meter)
        sources.check_unchanged()
        names = tuple(job.sealed.sizes[number].filename for number in rest)
        return Written(sources.nbytes_read, names, findings)


def _compare(plan: ExportPlan, sources: WeightReader) -> Findings:
    roundings = compare_roundings(plan, sources)
    if not (found := sources.compare()):
        return roundings
    names = {tensor.stored_name: tensor.name for file in plan.shards for tensor in file.tensors}
    renamed = (structs.replace(one, tensor=names.get(one.tensor, one.tensor)) for one in found)
    return (*renamed, *roundings)


def _find_unwritten(job: Job, share: Share) -> list[int]:
    """Return the numbers of files without a receipt, or whose content differs from it."""
    sizes, meter = job.sealed.sizes, job.meter
    rest = share.select([one.data_nbytes for one in sizes])
    receipts = {number: job.journal.find(sizes[number].filename) for number in rest}
    meter.expect((), left=[sizes[number] for number in rest if receipts[number]])
    with ThreadPoolExecutor(READBACK_THREADS) as readers:
        for number, receipt in receipts.items():
            path, file = job.place.folder / sizes[number].filename, job.plan.shards[number]
            if receipt and still_holds(path, file, receipt, readers, meter.compared):
                meter.resumed(sizes[number].data_nbytes)
                rest.remove(number)
    meter.expect([sizes[number] for number in rest])
    return rest


def finish(job: Job, nbytes_read: int = 0) -> ExportReport:
    """Publish the output of all parts. Call it with ``place.lock``.

    ``nbytes_read`` were read to write them, by this process and its tasks.

    Every file has a receipt and is unchanged, every record that was read has the right checksum,
    and the small files are read back.

    Raises:
        OutputError: a file is missing or was changed.
        CheckpointError: a source is damaged.
    """
    plan, folder, journal, place = job.plan, job.place.folder, job.journal, job.place
    compared = journal.compared()
    receipts = _receipts(job)
    if compared is None:
        raise _lacks(job, {"the comparison of replicas, by part 1"})
    files = write_small(plan.side_files, folder)
    tensors: dict[str, TensorEntry] = {}
    findings = [*plan.findings, *compared.findings]
    with WeightReader.of_plan(plan) as sources:
        sources.take_compared(journal.ranges(compared))
        for file, receipt in zip(plan.shards, receipts, strict=True):
            sources.take(journal.ranges(receipt))
            files[file.filename] = FileEntry(file.nbytes, receipt.digests.whole)
            for number, tensor in enumerate(file.tensors):
                digest = receipt.digests.hex(number)
                entry = TensorEntry(tensor.dtype, tensor.shape, file.filename, digest)
                tensors[tensor.name] = entry
                if (seen := receipt.remarkable.get(tensor.name)) is not None:
                    findings += _findings(tensor, seen, plan.allow)
        digests = sources.finish()
        nbytes_read += sources.nbytes_read
    entries = source_entries(plan, digests)
    manifest = Manifest(__version__, entries, tensors, {**files}, tuple(findings), plan.provenance)
    for side in plan.side_files:
        check_small(folder / side.filename, files[side.filename].blake3, job.verify)
    if plan.overwrite and place.is_renamed:  # the old folder may have changed since the beginning
        check_content(place.target, overwrite=True, is_checkpoint=plan.form.is_checkpoint)
    content = manifest.encode()
    files[MANIFEST_NAME] = FileEntry.of(content)
    with writing(path := folder / MANIFEST_NAME):
        write_durably(path, content, is_new=not place.is_renamed)
    if place.is_renamed:  # in a bucket the output exists now: nothing may fail any more
        check_small(path, files[MANIFEST_NAME].blake3, job.verify)
    warnings = [*plan.warnings]
    place.publish(overwrite=plan.overwrite, warn=warnings.append)
    return ExportReport(
        out_dir=plan.out_dir,
        origin=plan.origin,
        form=plan.form,
        files=tuple(sorted(files)),
        tensors=len(tensors),
        nbytes_read=nbytes_read,
        nbytes_written=sum(entry.nbytes for entry in files.values()),
        seconds=time.monotonic() - job.began,
        findings=tuple(findings),
        warnings=tuple(warnings),
        notes=plan.notes,
        verified=job.verify,
        left_out=plan.left_out,
        base=plan.base,
    )


def _receipts(job: Job) -> list[Receipt]:
    """Return the receipt of each file; read a file again that was touched since."""
    receipts, missing = [], set()
    with ThreadPoolExecutor(READBACK_THREADS) as readers:
        for file in job.plan.shards:
            receipt = job.journal.find(file.filename)
            if receipt is not None and (
                job.journal.is_unchanged(file.filename, receipt)
                or still_holds(job.place.folder / file.filename, file, receipt, readers)
            ):
                receipts.append(receipt)
            else:
                missing.add(file.filename)
    if missing:
        raise _lacks(job, missing)
    return receipts


def _lacks(job: Job, names: Set[str]) -> OutputError:
    return OutputError(
        "parts are missing",
        path=job.place.target,
        found=f"no valid {some(sorted(names), 8)}",
        hint="Run the same command again, or all of its parts; finished files are reused",
    )


def _findings(tensor: TensorPlan, seen: Statistics, allow: Set[FindingKind]) -> Iterator[Finding]:
    counts = {FindingKind.NAN: seen.nan, FindingKind.INF: seen.inf}
    if seen.overflow:
        counts[_OVERFLOW[tensor.dtype]] = seen.overflow
    if seen.underflow * _UNDERFLOW_SHARE > tensor.numel:
        counts[FindingKind.FP16_UNDERFLOW] = seen.underflow
    if seen.all_zero:
        counts[FindingKind.ALL_ZERO] = tensor.numel
    for kind, count in counts.items():
        if count:
            yield Finding(kind, tensor.name, count, accepted=kind in allow)
