"""Run a job: one process, one part of several, or only what is left to finish."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from zexport.errors import OutputError
from zexport.export.checked_reader import WeightReader
from zexport.export.destination import abandon, destination
from zexport.export.job import (
    LOCK_SECONDS,
    TURN_SECONDS,
    Job,
    Reader,
    Written,
    begin,
    finish,
    load,
    write,
)
from zexport.export.overwrite import check_content, is_complete, real_path
from zexport.export.plan import ExportPlan
from zexport.export.plan_file import Request, seal, unseal
from zexport.export.report import (
    ExportReport,
    OnProgress,
    PartReport,
    VerifyMode,
)
from zexport.filenames import MANIFEST_NAME
from zexport.options import Share, chosen
from zexport.storage.files import exists, is_file
from zexport.storage.location import place
from zexport.text import some


def run_export(
    plan: ExportPlan,
    *,
    verify: VerifyMode | str = VerifyMode.READBACK,
    progress: OnProgress | None = None,
    confirm: Callable[[], object] | None = None,
) -> ExportReport:
    """Write the plan's output folder, complete and on the disk, or nothing.

    Args:
        plan: from ``plan_export`` or ``plan_reshard``.
        verify: how files are read back before publishing.
        progress: called at every step.
        confirm: called once all sources are read; if it raises, nothing is published.

    Raises:
        OutputError: the folder cannot be written.
        CheckpointError: a source cannot be read, is damaged, or changed after planning.
        UnsupportedError: the deepspeed engine cannot rebuild this checkpoint.
        UnsafeError: the deepspeed engine would run unknown code.
        VerificationError: a file does not read back as written.
    """
    reader: Reader = WeightReader.of_plan
    if plan.reference is not None:
        from zexport.export.deepspeed_engine import DeepSpeedReader  # noqa: PLC0415 - is slow

        reader = lambda _: DeepSpeedReader.of_plan(plan)  # noqa: E731 - a sealed plan lacks it
    request = Request((str(place(plan.origin.folder).parent),), {}, follow_symlinks=True)
    sealed = unseal(seal(plan, request), plan.out_dir, plan.out_dir)
    job = Job.of(sealed, chosen("verify", VerifyMode, verify), progress)
    with job.place.lock(LOCK_SECONDS):
        begin(job)
        try:
            written = write(job, reader=reader)
            if confirm is not None:
                confirm()
            done = finish(job, written.nbytes_read)
        except BaseException as error:  # Ctrl-C too
            with suppress(OSError):
                if exists(job.place.plan_path) and not job.place.parts_running():
                    abandon(job.place.folder, error)
            raise
    resumed = tuple(one.filename for one in job.sealed.sizes if one.filename not in written.files)
    return replace(done, resumed=resumed)


def export_part(job: Job, share: Share) -> ExportReport | PartReport:
    """Write one part; begin the job if it is the first, finish it if it is the last.

    On failure nothing is removed, since other parts use the folder.
    """
    work, written, missing = job.place, Written(), tuple[int, ...]()
    with work.lock(TURN_SECONDS):
        is_begun = begin(job, share)
    try:
        if is_begun:
            written = write(job, share)
    except OutputError:  # a second process with this part may have finished the job
        with work.lock(TURN_SECONDS):
            if not _is_published(job):
                raise
    with work.lock(TURN_SECONDS):
        if is_begun and not _is_published(job):
            # A part still running was started twice, and will come here too.
            running = tuple(int(one.partition("/")[0]) for one in work.parts_running())
            missing = job.parts_missing(share.count) or running
            if not missing:
                return finish(job, written.nbytes_read)
    sizes = job.sealed.sizes
    return PartReport(
        out_dir=job.plan.out_dir,
        part=share.number,
        parts=share.count,
        missing=missing,
        origin=job.plan.origin,
        nbytes_read=written.nbytes_read,
        nbytes_written=sum(one.data_nbytes for one in sizes if one.filename in written.files),
        seconds=time.monotonic() - job.began,
        findings=written.findings,
        warnings=job.plan.warnings,
    )


def _is_published(job: Job) -> bool:
    return not exists(job.place.plan_path) and is_complete(job.plan, job.place.target)


def finish_export(
    out_dir: Path | str,
    *,
    verify: VerifyMode | str = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport:
    """Publish an output whose parts are all written but whose last process died.

    Raises:
        OutputError: ``out_dir`` has no parts, or some are running or missing.
        ZexportError: as ``consolidate`` or ``reshard``.
    """
    out_dir = place(out_dir)
    target = real_path(out_dir)
    work = destination(target)
    with work.lock(TURN_SECONDS):
        if (sealed := load(out_dir)) is None:
            is_done = is_file(target / MANIFEST_NAME)
            raise OutputError(
                "nothing to finish",
                path=target,
                found="a complete folder" if is_done else "no sealed plan",
                expected="an unfinished folder of consolidate --part or reshard --part",
                hint="Verify it with zexport verify" if is_done else "Pass the OUT of the parts",
            )
        if running := work.parts_running():
            raise OutputError(
                "parts are still being written",
                path=target,
                found=f"parts {some([*running])}",
                hint="Wait for them: the last one publishes it",
            )
        plan = sealed.plan
        if work.is_renamed:
            is_checkpoint = plan.form.is_checkpoint
            check_content(target, overwrite=plan.overwrite, is_checkpoint=is_checkpoint)
        return finish(Job.of(sealed, chosen("verify", VerifyMode, verify), progress))
