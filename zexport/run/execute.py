"""Running a plan: from nothing to a complete, checked folder, or to nothing again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from zexport.export.plan import ExportPlan, Form, Origin
from zexport.export.proof import WeightReader
from zexport.findings import Finding
from zexport.model.hub_cache import GivenBase
from zexport.printable import brief
from zexport.run.begin import Workplace, begin
from zexport.run.finish import Finished, finish
from zexport.run.lost_updates import compare_roundings
from zexport.run.part import write_part
from zexport.run.pieces import FileReader, TensorReader
from zexport.run.progress import Meter, Phase, Progress
from zexport.run.readback import VerifyMode
from zexport.run.shares import Share, Stretch
from zexport.run.staging import staged_folder
from zexport.store.json import JsonObject, Natural, form_of

__all__ = [
    "ExportReport",
    "Finding",
    "PartReport",
    "Phase",
    "Progress",
    "TensorReader",
    "VerifyMode",
    "run_plan",
]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did.

    Attributes:
        out_dir: the folder that now exists.
        origin: the checkpoint that it was made from.
        form: what it was made as.
        files: its files, sorted, the manifest among them.
        tensors: tensors written.
        nbytes_read: bytes read from the checkpoint's tensors.
        nbytes_written: bytes of all its files.
        seconds: how long it took.
        findings: what was remarkable, and exported all the same.
        warnings: what should be known before the export is used; it stands.
        notes: what may be of interest.
        left_out: entries of the checkpoint that were not exported: no tensors, or without values.
        verified: how the folder was read again before it got its name.
        resumed: the shards that a stopped export had finished, read again and taken over.
        base: the model that was given for what the checkpoint lacks; null without one.
    """

    out_dir: Path
    origin: Origin
    form: Form
    files: tuple[str, ...]
    tensors: Natural
    nbytes_read: Natural
    nbytes_written: Natural
    seconds: float
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    verified: VerifyMode
    left_out: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    base: GivenBase | None = None

    __repr__ = brief

    @classmethod
    def of(
        cls,
        work: Workplace,
        finished: Finished,
        *,
        nbytes_read: int,
        seconds: float,
        warnings: tuple[str, ...],
        resumed: tuple[str, ...] = (),
    ) -> ExportReport:
        """The report of a folder that was completed."""
        plan = work.plan
        return cls(
            out_dir=plan.out_dir,
            origin=plan.origin,
            form=plan.form,
            files=tuple(sorted(finished.files)),
            tensors=sum(len(file.tensors) for file in plan.shards),
            nbytes_read=nbytes_read,
            nbytes_written=sum(entry.nbytes for entry in finished.files.values()),
            seconds=seconds,
            findings=finished.findings,
            warnings=warnings,
            notes=plan.notes,
            verified=work.verify,
            left_out=plan.left_out,
            resumed=resumed,
            base=plan.base,
        )

    def to_json(self) -> JsonObject:
        """The report as JSON values, with a ``schema`` number."""
        return form_of(self)


@dataclass(frozen=True, slots=True)
class PartReport:
    """What one of several workers did, while others are still to come.

    Attributes:
        out_dir: the folder that will exist when all are done.
        part: which part it was, from 1.
        parts: how many there are.
        missing: those that were not done yet; none where the folder is complete.
        origin: the checkpoint.
        nbytes_read: bytes read from the checkpoint's tensors.
        nbytes_written: bytes of tensors that were written.
        seconds: how long it took.
        findings: what was remarkable where copies in the checkpoint were compared.
        warnings: what should be known of it.
    """

    out_dir: Path
    part: Natural
    parts: Natural
    missing: tuple[Natural, ...]
    origin: Origin
    nbytes_read: Natural
    nbytes_written: Natural
    seconds: float
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]

    __repr__ = brief

    def to_json(self) -> JsonObject:
        """The report as JSON values, with a ``schema`` number."""
        return form_of(self)


def report_of_part(
    plan: ExportPlan,
    share: Share,
    began: float,
    missing: tuple[int, ...],
    done: tuple[int, int, tuple[Finding, ...]],
) -> PartReport:
    """What a worker did that began at a time: bytes read, bytes written, and what was found."""
    nbytes_read, nbytes_written, findings = done
    return PartReport(
        out_dir=plan.out_dir,
        part=share.number,
        parts=share.count,
        missing=missing,
        origin=plan.origin,
        nbytes_read=nbytes_read,
        nbytes_written=nbytes_written,
        seconds=time.monotonic() - began,
        findings=findings,
        warnings=plan.warnings,
    )


def run_plan(
    plan: ExportPlan,
    *,
    reader: TensorReader | None = None,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: Callable[[Progress], None] | None = None,
    confirm: Callable[[], object] = lambda: None,
) -> ExportReport:
    """Make the plan's output folder, complete, checked and on the disk, or nothing at all.

    What a stopped export of the same plan had finished is taken over; the folder is the same, byte
    for byte. ``progress`` is told from one thread at a time, but not always from the same one.
    ``confirm`` is called once all of the sources is read; the folder gets no name if it raises.
    """
    began = time.monotonic()
    warnings = list(plan.warnings)
    meter = Meter(progress, reads_again=verify is not VerifyMode.NONE)
    with ExitStack() as stack:
        sources = stack.enter_context(WeightReader.of_plan(plan))
        reader = FileReader(sources) if reader is None else reader
        paths = [source.path for source in plan.sources]
        paths += [side.origin for side in plan.side_files if side.origin is not None]
        names = [file.filename for file in plan.shards] + [s.filename for s in plan.side_files]
        folder = stack.enter_context(
            staged_folder(
                plan.out_dir,
                overwrite=plan.overwrite,
                is_checkpoint=plan.form.is_checkpoint,
                sources=paths,
                own=names,
                warn=warnings.append,
            )
        )
        work = Workplace.of(plan, folder, verify, meter)
        finished, rest = _filled(work, sources, reader, confirm)
    written = {stretch.file.filename for stretch in rest}
    return ExportReport.of(
        work,
        finished,
        nbytes_read=reader.nbytes_read,
        seconds=time.monotonic() - began,
        warnings=tuple(warnings),
        resumed=tuple(f.filename for f in plan.shards if f.filename not in written),
    )


def fill(
    plan: ExportPlan, folder: Path, progress: Callable[[Progress], None] | None = None
) -> Finished:
    """Write a plan's files into a folder that is there and gets no name; what was written.

    They are on the disk, and not read again. A rerun takes over what a stopped one had finished.
    """
    meter = Meter(progress, reads_again=False)
    with WeightReader.of_plan(plan) as sources:
        work = Workplace.of(plan, folder, VerifyMode.NONE, meter)
        return _filled(work, sources, FileReader(sources), lambda: None)[0]


def _filled(
    work: Workplace,
    sources: WeightReader,
    reader: TensorReader,
    confirm: Callable[[], object],
) -> tuple[Finished, list[Stretch]]:
    """A folder with all that is planned, and the stretches that were not there before."""
    rest = begin(work)
    findings = work.plan.findings + compare(work.plan, sources)
    write_part(work, rest, reader)
    confirm()
    return finish(work, reader, findings), rest


def compare(plan: ExportPlan, sources: WeightReader) -> tuple[Finding, ...]:
    """Hold second copies in the checkpoint, and bases of updates, against what is exported."""
    roundings = compare_roundings(plan, sources)
    if not (found := sources.compare()):
        return roundings
    names = {tensor.stored_name: tensor.name for file in plan.shards for tensor in file.tensors}
    renamed = (replace(one, tensor=names.get(one.tensor, one.tensor)) for one in found)
    return (*renamed, *roundings)
