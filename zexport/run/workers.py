"""An export by several workers, on one machine or many: each writes its share of one plan.

None needs another to be there at the same time. They meet in the unfinished folder beside the
output: who comes first begins it, who leaves last completes it and gives it its name. A worker that
died is started again and goes on from its receipts.

In object storage the unfinished folder is the output itself, where no lock says who is first: what
is written there once is written only where it is not, and what twice is the same both times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from zexport.errors import OutputError
from zexport.export.plan import ExportPlan
from zexport.export.plan_digest import PlanDigest
from zexport.export.proof import WeightReader
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.findings import Finding
from zexport.printable import some
from zexport.run.against_checkpoint import holds_share, looks_made
from zexport.run.begin import Workplace, begin_together, check_sides, without_written
from zexport.run.execute import ExportReport, PartReport, compare, report_of_part
from zexport.run.finish import finish
from zexport.run.part import write_part
from zexport.run.pieces import FileReader
from zexport.run.progress import Meter, Progress
from zexport.run.readback import VerifyMode
from zexport.run.receipts import Compared, clear_receipts, read_request
from zexport.run.shares import Share, shares_of
from zexport.run.staging import check_content, check_place, real_path
from zexport.run.unpublished import publish_made
from zexport.store.address import Address, local_path
from zexport.store.files import changed_ns, writing
from zexport.store.folders import children, exists, is_file, is_folder, make_folder
from zexport.store.json import JsonObject
from zexport.store.publish import (
    locked,
    locked_part,
    locked_parts,
    parents,
    parts_at_work,
    publish,
    restore,
    unfinished_work,
    workplaces,
)

_TURN_SECONDS = 3600.0
"""How long a worker waits while another begins or completes the folder."""

_PROBE_SECONDS = 2.0
"""How long a worker waits for the lock of its part, which others take to see whether it is held."""

_LEASE_SECONDS = 150.0
"""How long a network file system may hold the lock of a machine that was lost (NFS: 90 s)."""


def run_part(
    plan: ExportPlan,
    share: Share,
    *,
    request: JsonObject | None = None,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: Callable[[Progress], None] | None = None,
) -> ExportReport | PartReport:
    """Write one share of a plan; whoever completes the set publishes the folder.

    The folder is byte for byte that of ``run_plan``. What this worker had finished before it was
    stopped is taken over; nothing is removed when it fails, since others work in the same folder.
    Where the folder is complete already, and holds what this worker would write, it stays as it is.
    ``request`` is what the plan was made of, for ``requested``.

    Raises:
        OutputError: the folder was begun for another plan or another number of workers, another
            process writes this part, or the system refuses to write.
    """
    began = time.monotonic()
    target, digest = real_path(plan.out_dir), PlanDigest(plan)  # seconds, where no other waits
    meter = Meter(progress, reads_again=verify is not VerifyMode.NONE)
    with parents(target.parent):
        with locked_part(target, share.number, seconds=_PROBE_SECONDS):
            with _alone(target):
                work = None
                if not _is_made(plan, target):
                    work = _workplace(plan, target, verify, meter, digest)
                    others = [one for one in parts_at_work(target) if one != share.number]
                    begin_together(work, share.count, request or {}, at_work=others)
            if work is None:
                nbytes_read = _compared(plan, share, target, meter)
                return report_of_part(plan, share, began, (), (nbytes_read, 0, ()))
            done = _write(work, share)
        with locked(target, seconds=_TURN_SECONDS):
            # By another, who came to the end of it first, or died there.
            is_published = _is_published(work) or publish_made(target, plan) is not None
            # Who is still at work was started again, and will come here, too.
            missing = () if is_published else _missing(work, share.count) or parts_at_work(target)
            if not (missing or is_published):
                _check_content(plan, target)
                try:
                    return _published(work, share.count, target, began, done[0])
                except OutputError:
                    if not (isinstance(target, Address) and looks_made(plan, target)):
                        raise
    return report_of_part(plan, share, began, missing, done)


@contextmanager
def begun_parts(plan: ExportPlan, count: int, request: JsonObject) -> Iterator[int]:
    """A block in which others write the parts of a folder, which this process has begun.

    Of how many parts it is: ``count``, unless it was begun for another number before.

    Raises:
        OutputError: it was begun for another plan, another process has it written, or something
            is in its way.
    """
    target = real_path(local_path(plan.out_dir))
    with parents(target.parent), locked_parts(target):
        with _alone(target):
            meter = Meter(None, reads_again=False)
            work = _workplace(plan, target, VerifyMode.NONE, meter, PlanDigest(plan))
            begun = work.receipts.begun()
            parts = begun.parts if begun is not None and begun.parts > 1 else count
            begin_together(work, parts, request, at_work=parts_at_work(target))
        try:
            yield parts
        except BaseException as error:  # Ctrl-C too
            error.add_note(f"What is finished stays in {work.folder}: the same command goes on.")
            raise


def write_share(
    plan: ExportPlan,
    share: Share,
    *,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: Callable[[Progress], None] | None = None,
) -> PartReport:
    """Write one share into a folder that another process has begun, and will complete.

    Raises:
        OutputError: this machine does not see that folder, or it was begun for another plan.
    """
    began = time.monotonic()
    target = real_path(local_path(plan.out_dir))
    partial, _ = workplaces(target)
    if not exists(partial):
        raise OutputError(
            "was begun on another machine, and is not there on this one",
            path=partial,
            hint="Choose a folder that all machines see under one path",
        )
    meter = Meter(progress, reads_again=verify is not VerifyMode.NONE)
    with locked_part(target, share.number, seconds=_LEASE_SECONDS):
        done = _write(Workplace.of(plan, partial, verify, meter), share)
    return report_of_part(plan, share, began, (), done)


def _is_made(plan: ExportPlan, target: Path) -> bool:
    """Whether the folder is complete; in object storage no part replaces one that is.

    A worker may have died just before it would have given it its name, or had removed its receipts.
    Who comes first gives it its name then, though others were started again with it: where there is
    a manifest, none writes any more.
    """
    if publish_made(target, plan) is not None:
        return True
    return not plan.overwrite and not isinstance(target, Address) and looks_made(plan, target)


def _is_published(work: Workplace) -> bool:
    is_far = isinstance(work.folder, Address)
    return looks_made(work.plan, work.folder) if is_far else not exists(work.folder)


def finish_parts(
    plan: ExportPlan,
    *,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: Callable[[Progress], None] | None = None,
) -> ExportReport:
    """Complete the folder that several workers have filled, all of whose parts are done.

    Raises:
        OutputError: it was begun for another plan, or parts are missing.
    """
    began = time.monotonic()
    target = real_path(plan.out_dir)
    partial, _ = workplaces(target)
    meter = Meter(progress, reads_again=verify is not VerifyMode.NONE)
    if not is_folder(partial / RECEIPTS):
        raise _no_parts(target)
    with _alone(target):
        if at_work := parts_at_work(target):
            raise OutputError(
                "is still written to by other processes",
                path=target,
                found=f"parts {some([*map(str, at_work)])}",
                hint="Wait for them: the last one publishes it",
            )
        if (done := publish_made(target, plan, progress)) is not None:
            return done
        _check_content(plan, target)
        work = Workplace.of(plan, partial, verify, meter)
        begun = work.receipts.need_begun()
        check_sides(work, begun.side_files)
        parts = begun.parts
        if missing := _missing(work, parts):
            raise OutputError(
                "lacks parts",
                path=target,
                found=f"{parts - len(missing)} of {parts}",
                expected=f"also {some([f'{number}/{parts}' for number in missing])}",
                hint="Run them again with --part",
            )
        return _published(work, parts, target, began, 0)


def finish_left(
    out_dir: Path, progress: Callable[[Progress], None] | None = None
) -> ExportReport | None:
    """Publish a folder that lacks its name alone; ``None`` where something else is lacking."""
    target = real_path(out_dir)
    partial, _ = workplaces(target)
    with writing(target):
        is_complete = is_file(partial / MANIFEST_NAME)
    if not is_complete or read_request(partial) is not None:
        return None
    with parents(target.parent), _alone(target):
        return None if isinstance(target, Address) else publish_made(target, None, progress)


def requested(out_dir: Path) -> JsonObject:
    """What the plan was made of whose parts were written for a folder.

    Raises:
        OutputError: there are no parts for it.
    """
    target = real_path(out_dir)
    partial, _ = workplaces(target)
    if (request := read_request(partial)) is None:
        raise _no_parts(target)
    return request


def _no_parts(target: Path) -> OutputError:
    found, hint = "no receipts of parts", "Name the OUT that the parts were given"
    if unfinished_work(target) is not None:
        found = "unfinished work of one process"
        hint = "Run the command that makes it again, without --part: it goes on from there"
    elif is_file(target / MANIFEST_NAME):
        found, hint = "a complete folder", "It needs nothing more"
    expected = "what consolidate --part or reshard --part has left"
    problem = "has no parts that are to be finished"
    return OutputError(problem, path=target, found=found, expected=expected, hint=hint)


def _check_content(plan: ExportPlan, target: Path) -> None:
    """Refuse what lies at ``target`` and would be mixed with the parts, or replaced by them."""
    if not isinstance(target, Address):
        check_content(target, overwrite=plan.overwrite, is_checkpoint=plan.form.is_checkpoint)
        return
    with writing(target):
        is_free = unfinished_work(target) is not None or not exists(target)
        names = [path.name for path in ([] if is_free else children(target))]
    if names:
        raise OutputError(
            "is not empty, and in object storage no part of an export may empty it",
            path=target,
            found=some(names),
            expected="nothing, or what parts of this export have left",
            hint="Choose another name for the output; or run the command once without --part, and "
            "with --overwrite, which replaces an older model",
        )


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One worker at a time, of those that begin or complete the folder."""
    with locked(target, seconds=_TURN_SECONDS):
        restore(target)
        yield


def _compared(plan: ExportPlan, share: Share, target: Path, meter: Meter) -> int:
    """Bytes read to see that a folder that is complete holds this worker's share."""
    with WeightReader.of_plan(plan) as sources:
        if not holds_share(target, plan, share, FileReader(sources), meter):
            raise OutputError(
                "is complete, and holds other weights than this part would write",
                path=target,
                hint="It was made of another checkpoint: choose another name, or pass --overwrite",
            )
        return sources.nbytes_read


def _workplace(
    plan: ExportPlan, target: Path, verify: VerifyMode, meter: Meter, digest: PlanDigest
) -> Workplace:
    """The folder that all workers fill, where nothing is in its way."""
    _check_content(plan, target)
    paths = [source.path for source in plan.sources]
    paths += [side.origin for side in plan.side_files if side.origin is not None]
    for place in (target, *workplaces(target)):
        check_place(place, paths)
    partial, _ = workplaces(target)
    with writing(partial):
        make_folder(partial)
    return Workplace.of(plan, partial, verify, meter, digest)


def _write(work: Workplace, share: Share) -> tuple[int, int, tuple[Finding, ...]]:
    """Write a share and note it: bytes read, bytes written, and what was found.

    The first worker compares everything: which elements are looked at depends on how many copies,
    and how many updated weights, there are.
    """
    plan, is_first = work.plan, share.number == 1
    stretches = shares_of(plan, share.count)[share.number - 1]
    _forget_changed(work, share)
    rest = without_written(work, stretches)
    own = plan if is_first else replace(plan, replicas=(), gathered=())
    with WeightReader.of_plan(own) as sources:
        findings = compare(own, sources) if is_first else sources.compare()
        write_part(work, rest, FileReader(sources))
        work.receipts.add_part(share.number, Compared(findings, sources.compared))
        return sources.nbytes_read, sum(stretch.nbytes for stretch in rest), findings


def _forget_changed(work: Workplace, share: Share) -> None:
    """Forget what others wrote into this worker's files where somebody has changed it since.

    Afterwards the times of a file tell nothing of that: this worker changes it, too. So what others
    write to at this moment is not looked at.
    """
    shares = [*enumerate(shares_of(work.plan, share.count), 1)]
    own = {one.file.filename for one in shares[share.number - 1][1] if not one.is_whole}
    at_work = {*parts_at_work(real_path(work.plan.out_dir))}
    others = [(number, one) for number, found in shares if number != share.number for one in found]
    near = [(number, one) for number, one in others if one.file.filename in own]
    if isinstance(work.folder, Address) or at_work & {number for number, _ in near}:
        return
    noted = [(n, one, found) for n, one in near if (found := work.receipts.find(one)) is not None]
    times = {(one.file.filename, found.changed_ns) for _, one, found in noted}
    with work.checks() as checks:
        for number, one, found in noted:
            name = one.file.filename
            is_same = (name, changed_ns(work.folder / name)) in times
            if not (is_same or checks.holds(one, found)):
                work.receipts.drop(one, number)


def _missing(work: Workplace, parts: int) -> tuple[int, ...]:
    numbers = range(1, parts + 1)
    return tuple(number for number in numbers if work.receipts.part(number) is None)


def _published(
    work: Workplace, parts: int, target: Path, began: float, nbytes_read: int
) -> ExportReport:
    """Complete the folder, and give it its name; this worker read ``nbytes_read`` before."""
    plan, warnings = work.plan, [*work.plan.warnings]
    compared = [found for n in range(1, parts + 1) if (found := work.receipts.part(n))]
    findings = chain.from_iterable(one.findings for one in compared)
    with WeightReader.of_plan(plan) as sources:
        sources.take_compared(one.ranges for one in compared)
        finished = finish(work, FileReader(sources), (*plan.findings, *findings))
    with writing(work.folder):
        clear_receipts(work.folder, warnings.append)
        publish(work.folder, target, overwrite=plan.overwrite, warn=warnings.append)
    return ExportReport.of(
        work,
        finished,
        nbytes_read=nbytes_read + sources.nbytes_read,
        seconds=time.monotonic() - began,
        warnings=tuple(warnings),
    )
