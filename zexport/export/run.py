"""Run a job: one process, one part of several, or only what is left to finish."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from zexport.errors import OutputError
from zexport.export.destination import abandon, destination
from zexport.export.job import (
    ALONE_SECONDS,
    TURN_SECONDS,
    Job,
    OnProgress,
    Reader,
    begin,
    finish,
    load,
    write,
)
from zexport.export.overwrite import check_content, is_complete, real_path
from zexport.export.plan import ExportPlan
from zexport.export.plan_file import Request, seal, unseal
from zexport.export.report import ExportReport, PartReport
from zexport.export.stream import read_plainly
from zexport.export.write import VerifyMode
from zexport.filenames import MANIFEST_NAME
from zexport.options import Share
from zexport.storage.files import exists, is_file
from zexport.text import some


def export(
    plan: ExportPlan,
    request: Request,
    *,
    reader: Reader = read_plainly,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
    confirm: Callable[[], object] = lambda: None,
) -> ExportReport:
    """Write a complete output folder in this process, or nothing.

    ``confirm`` is called once all sources are read; if it raises, nothing is published.
    """
    began = time.monotonic()
    job = Job.of(unseal(seal(plan, request), plan.out_dir, plan.out_dir), verify, progress)
    with job.place.alone(ALONE_SECONDS):
        begin(job)
        left = {one.filename: job.journal.find(one.filename) for one in job.sealed.sizes}
        try:
            part = write(job, reader=reader)
            confirm()
            resumed = tuple(n for n, r in left.items() if r and job.journal.find(n) == r)
            done = finish(job, began)
        except BaseException as error:  # Ctrl-C too
            if exists(job.place.plan_path) and not job.place.parts_running():
                abandon(job.place.folder, error)
            raise
    return replace(done, nbytes_read=done.nbytes_read + part.nbytes_read, resumed=resumed)


def export_part(job: Job, share: Share) -> ExportReport | PartReport:
    """Write one part; begin the job if it is the first, finish it if it is the last.

    On failure nothing is removed, since other parts use the folder.
    """
    began, plan, place = time.monotonic(), job.plan, job.place
    nothing = PartReport(
        plan.out_dir, share.number, share.count, (), plan.origin, 0, 0, 0.0, (), plan.warnings
    )
    with place.alone(TURN_SECONDS):
        if not begin(job, share):
            return nothing
    try:
        done = write(job, share)
    except OutputError:  # a second process with this part may have finished the job
        with place.alone(TURN_SECONDS):
            if exists(place.plan_path) or not is_complete(plan, place.target):
                raise
        return nothing
    with place.alone(TURN_SECONDS):
        seconds = time.monotonic() - began
        if not exists(place.plan_path) and is_complete(plan, place.target):
            return replace(done, seconds=seconds)
        # A part still running was started twice, and will come here too.
        running = tuple(int(one.partition("/")[0]) for one in place.parts_running())
        if missing := job.parts_missing(share.count) or running:
            return replace(done, missing=missing, seconds=seconds)
        finished = finish(job, began)
    return replace(finished, nbytes_read=finished.nbytes_read + done.nbytes_read)


def finish_left(
    out_dir: Path,
    *,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport:
    """Finish a folder whose parts are all written but whose last process died.

    Raises:
        OutputError: there is nothing to finish, a part is running, or files are missing.
    """
    began = time.monotonic()
    target = real_path(out_dir)
    place = destination(target)
    with place.alone(TURN_SECONDS):
        if (sealed := load(out_dir)) is None:
            is_done = is_file(target / MANIFEST_NAME)
            raise OutputError(
                "has no parts to finish",
                path=target,
                found="a complete folder" if is_done else "no sealed plan",
                expected="an unfinished folder of consolidate --part or reshard --part",
                hint="Nothing is left to do" if is_done else "Pass the OUT of the parts",
            )
        if running := place.parts_running():
            raise OutputError(
                "parts are still being written",
                path=target,
                found=f"parts {some([*running])}",
                hint="Wait for them: the last one publishes it",
            )
        plan = sealed.plan
        if place.is_renamed:
            is_checkpoint = plan.form.is_checkpoint
            check_content(target, overwrite=plan.overwrite, is_checkpoint=is_checkpoint)
        return finish(Job.of(sealed, verify, progress), began)
