"""Remove the optimizer states of one checkpoint, after proof that an export matches it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from msgspec import Struct
from msgspec.structs import replace as changed

from zexport import __version__
from zexport.api.verify import verify_export
from zexport.checkpoint.open import Checkpoint, open_checkpoint
from zexport.checkpoint.resolve import (
    LATEST,
    locate,
    original_name,
    pruned_name,
    read_latest,
)
from zexport.checkpoint.state import TrainingState, raise_problems
from zexport.errors import (
    OutputError,
    UnsupportedError,
    UsageError,
    VerificationError,
)
from zexport.export.job import OnProgress
from zexport.export.manifest import read_manifest
from zexport.export.overwrite import real_path
from zexport.filenames import MANIFEST_NAME
from zexport.monitor.policy import waits_for
from zexport.monitor.snapshot import (
    TRAINER_STATE,
    RunCheckpoint,
    best_names,
    checkpoint_at,
    digest_of_manifest,
    digest_of_versions,
    find_missing,
    is_one_checkpoint,
    link_to,
    list_checkpoints,
    model_of,
    open_complete,
)
from zexport.monitor.strip import (
    Note,
    Place,
    Sizes,
    build,
    changed_meanwhile,
    check_own_files,
    check_target,
    discard,
    finish,
    prove,
    swap,
    versions_of,
)
from zexport.options import CheckMode, ExportOptions, checks_arguments
from zexport.resharding.plan import DELETE_BY_HAND, StrippedFile, strip_optimizer_states
from zexport.storage.files import absolute, exists, is_file, is_link, is_local, version
from zexport.storage.json import JsonReport, Natural, as_table, read_json_object
from zexport.storage.location import place
from zexport.storage.locks import locked
from zexport.storage.os_errors import reading
from zexport.storage.storage import Version
from zexport.storage.symlink_policy import Boundary
from zexport.text import printable, some


@dataclass(frozen=True, slots=True, repr=False)
class PruneReport(JsonReport):
    """What was removed of a checkpoint, or would be.

    Attributes:
        checkpoint: its folder before.
        pruned: its folder now; null if nothing was done yet.
        step: optimizer steps taken.
        export: the folder that was compared with it.
        tensors: number of tensors that are equal in checkpoint and export.
        is_dry_run: whether only the proof was done.
        rewritten: optimizer states files that are rewritten without optimizer states.
        removed: files that are removed as a whole.
        left_out: keys of optimizer states files that cannot be rewritten.
        nbytes_before: bytes of the checkpoint.
        nbytes_freed: bytes of it that are free again.
        seconds: how long it took.
    """

    checkpoint: Path
    pruned: Path | None
    step: Natural | None
    export: Path
    tensors: Natural
    is_dry_run: bool
    rewritten: tuple[str, ...]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]
    nbytes_before: Natural
    nbytes_freed: Natural
    seconds: float


@checks_arguments
def prune(
    checkpoint: Checkpoint,
    export: Path | str,
    *,
    even_newest: bool = False,
    dry_run: bool = False,
    tag: str | None = None,
    base: Path | str | None = None,
    adapter_config: Path | str | None = None,
    check: CheckMode = CheckMode.SAMPLED,
    progress: OnProgress | None = None,
) -> PruneReport:
    """Remove the optimizer states of a checkpoint, after proof that an export matches it.

    The fp32 master weights stay: the folder, then ``pruned-checkpoint-N``, exports as before, bit
    for bit. That is proved, and ``export`` is compared with the checkpoint, before anything is
    removed. If it is interrupted, the checkpoint is complete under its old or its new name, and the
    next call continues.

    Args:
        checkpoint: any level of the checkpoint's folders; several if each node has a part.
        export: a folder that ``consolidate`` made from it.
        even_newest: also if training would resume from this checkpoint.
        dry_run: only prove, and report what would be freed.
        tag: which checkpoint, if there are several.
        base: the base model, if the export was given one.
        adapter_config: the adapter's configuration, if the export was given one.
        check: how much of the fp32 master weights is compared with the module weights.
        progress: called with every step.

    Raises:
        UsageError: training would resume from it.
        OutputError: it is being written, contains links, or the export lacks something of it.
        VerificationError: the export is damaged, or of another checkpoint.
        CheckpointError: the checkpoint is incomplete, damaged or was removed.
        UnsupportedError: the optimizer states are not in files of their own.
    """
    began, out = time.monotonic(), absolute(place(export))
    given = [checkpoint] if isinstance(checkpoint, Path | str) else checkpoint
    paths = [absolute(place(one)) for one in given]
    if (remote := next((one for one in paths if not is_local(one)), None)) is not None:
        problem = "is in object storage, where zexport does not prune"
        raise OutputError(problem, path=remote, hint=DELETE_BY_HAND)
    with reading(paths[0], hint="Check its permissions"):
        places = [_place_of(path, tag) for path in paths]
    with ExitStack() as stack:
        if not dry_run:
            for one in places:
                stack.enter_context(locked(one.target))
            finish([one for one in places if one.is_pruned])
        known = {one.folder: versions_of(one.folder) for one in places}
        whole = [one for one in places if not one.is_pruned]
        for one in places:
            check_own_files(one.folder)
            if real_path(out).is_relative_to(real_path(one.folder)):
                hint = "Move it out of there first"
                raise OutputError("is in the checkpoint", path=out, hint=hint)
        for one in whole:
            check_target(one, known[one.folder])
        opened = open_checkpoint([one.tag_dir for one in places])
        raise_problems(opened)
        is_begun = whole != places  # an interrupted call has pruned another node's part
        for one in [] if is_begun else whole:
            _check_settled(one, places)
        checked = [] if is_begun or even_newest else places
        for one in checked:
            _check_not_resumed(one, places, opened)
        _check_made_from(out, opened)
        stripped = strip_optimizer_states(opened)
        verified = verify_export(
            out,
            against=[one.tag_dir for one in places],
            base=base,
            adapter_config=adapter_config,
            check=check,
            progress=progress,
        )
        if not verified.ok:
            problems = [
                " ".join(filter(None, (p.file, p.tensor, p.problem))) for p in verified.problems
            ]
            raise VerificationError(
                "does not match the checkpoint, which is unchanged",
                path=out,
                found=some(problems, 3),
                hint="Export the checkpoint again",
            )
        removed = [path for one in whole for path in one.for_resume()]
        freed = sum(one.nbytes_before - one.file.nbytes for one in stripped)
        report = PruneReport(
            checkpoint=places[0].original,
            pruned=None if dry_run else places[0].target,
            step=opened.global_steps,
            export=out,
            tensors=verified.tensors,
            is_dry_run=dry_run,
            rewritten=tuple(Path(one.file.filename).name for one in stripped),
            removed=tuple(path.name for path in removed),
            left_out=tuple(dict.fromkeys(key for one in stripped for key in one.left_out)),
            nbytes_before=sum(one.nbytes for files in known.values() for one in files.values()),
            nbytes_freed=max(freed + sum(version(path).nbytes for path in removed), 0),
            seconds=0.0,
        )
        try:
            if not dry_run:
                for one in whole:
                    _build(one, report, opened, stripped, known[one.folder], progress)
                prove(
                    opened,
                    [one.tag_in(one.new) if one in whole else one.tag_dir for one in places],
                )
            for one in checked:  # again: the proof may have taken an hour
                _check_not_resumed(one, places, opened, reads_next=True)
            for one in places:
                if versions_of(one.folder) != known[one.folder]:
                    raise changed_meanwhile(one.folder)
            if not dry_run:
                swap(whole)
        finally:  # after Ctrl-C, too
            for one in whole:
                if not dry_run and not exists(one.old):
                    discard(one)
        return replace(report, seconds=time.monotonic() - began)


def _build(
    one: Place,
    report: PruneReport,
    opened: TrainingState,
    stripped: Sequence[StrippedFile],
    known: Mapping[str, Version],
    progress: OnProgress | None,
) -> None:
    """Write one node's pruned folder, with a note of what was removed."""
    own = {one.tag_dir / Path(each.file.filename).name: each for each in stripped}
    own = {path: each for path, each in own.items() if is_file(path)}
    note = Note(
        zexport_version=__version__,
        checkpoint=printable(one.original.name),
        step=report.step,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        export=printable(str(report.export)),
        export_manifest=digest_of_manifest(report.export),
        tensors=report.tensors,
        rewritten={
            path.name: Sizes(each.nbytes_before, each.file.nbytes) for path, each in own.items()
        },
        removed=tuple(path.name for path in one.for_resume()),
        left_out=report.left_out,
        source=digest_of_versions(known),
    )
    build(opened, one, {path: each.file for path, each in own.items()}, note, progress)


def _place_of(path: Path, tag: str | None) -> Place:
    """Return the checkpoint that a path and a tag mean; a pruned one also by its old name."""
    if is_link(path):
        raise OutputError("is not pruned: it is a link", path=path, hint="Pass the real path")
    if not exists(path):
        renamed = (pruned_name(path), pruned_name(path.parent) / path.name)
        path = next(filter(exists, renamed), path)
    location = locate(path, tag)
    folder = location.root if is_one_checkpoint(location) else location.tag_dir
    if folder == location.root and len(location.tags) > 1:
        raise UnsupportedError(
            "contains several tags, and zexport cannot prune only one of them",
            path=folder,
            found=some(location.tags),
            hint="Move those that you do not need elsewhere",
        )
    return Place(folder, location.tag_dir)


def _check_made_from(out: Path, opened: TrainingState) -> None:
    """Raise unless an export was made from all of this checkpoint, without accepted findings.

    Raises:
        OutputError: it lacks something.
        VerificationError: it was made from another tag or step, or has no manifest.
    """
    manifest = read_manifest(out)
    try:
        options = ExportOptions.from_recorded(manifest.provenance.get("options"))
    except ValueError as cause:
        raise VerificationError(
            "is not the manifest of an export", path=out / MANIFEST_NAME, found=cause
        ) from cause
    record = as_table(manifest.provenance.get("checkpoint"))
    made_from = f"tag {original_name(str(record.get('tag')))}, step {record.get('global_steps')}"
    own = f"tag {original_name(opened.location.tag)}, step {opened.global_steps}"
    if made_from != own:
        raise VerificationError(
            "was made from another checkpoint",
            path=out,
            found=made_from,
            expected=own,
            hint="Export this checkpoint",
        )
    is_incomplete = options.exclude_frozen
    if is_incomplete or options.allow or any(one.accepted for one in manifest.findings):
        option = "--exclude-frozen" if is_incomplete else "--allow"
        raise OutputError(
            f"was exported with {option}, so it cannot replace the checkpoint",
            path=out,
            hint=f"Export it again without {option}",
        )


def _check_settled(own: Place, places: Sequence[Place]) -> None:
    """Raise if a checkpoint is being saved."""
    seen = checkpoint_at(own.folder, Boundary.of(own.folder.parent))
    seen = changed(seen, missing=find_missing(seen, _other_runs(own, places)))
    if exists(own.work):  # hard links of an interrupted call are changes, too
        seen = changed(seen, changed_ns=seen.written_ns)
    if why := waits_for(seen, time.time_ns()):
        problem = f"is not pruned: it may still be being written: {why}"
        raise OutputError(problem, path=own.folder, hint="Wait until it is complete")


def _other_runs(own: Place, places: Sequence[Place]) -> list[Path]:
    """Return the run's folders on other nodes."""
    return [one.folder.parent for one in places if one is not own]


class _Candidate(Struct, frozen=True):
    """A checkpoint that training could resume from.

    Attributes:
        seen: its files.
        opened: their metadata.
        step: the step that its Trainer's state records, or else its rank files.
        model: the part of its name that all checkpoints of its model share.
    """

    seen: RunCheckpoint
    opened: TrainingState
    step: int
    model: str

    @classmethod
    def of(cls, seen: RunCheckpoint, opened: TrainingState) -> _Candidate:
        path = seen.folder / TRAINER_STATE
        of_trainer = read_json_object(path).get("global_step") if is_file(path) else None
        step = of_trainer if isinstance(of_trainer, int) else opened.global_steps or 0
        return cls(seen, opened, step, model_of(seen.name, {step, opened.global_steps}))


def _check_not_resumed(
    own: Place, places: Sequence[Place], opened: TrainingState, *, reads_next: bool = False
) -> None:
    """Raise if training would resume from a checkpoint.

    Args:
        own: the checkpoint, or a node's part of it.
        places: all parts.
        opened: their metadata.
        reads_next: check every CRC-32 of the checkpoint that a resume would use instead.
    """
    if why := next(_resume_reasons(own, places, opened, reads_next=reads_next), ""):
        raise UsageError(
            f"is not pruned: {why}",
            path=own.folder,
            hint="If no training will resume from it, pass --even-newest",
        )


def _resume_reasons(
    own: Place, places: Sequence[Place], opened: TrainingState, *, reads_next: bool
) -> Iterator[str]:
    """Yield why training would resume from a checkpoint; each holds only if none before does."""
    run, nodes = own.folder.parent, _other_runs(own, places)
    latest = {read_latest(run, name) for name in LATEST}
    if own.folder.name in latest:
        yield "`latest` names it"
    if link := link_to(own.folder):
        yield f"the link `{link}` leads to it"
    this = _Candidate.of(checkpoint_at(own.folder, Boundary.of(run)), opened)
    usable: dict[str, _Candidate] = {}
    for name, seen in list_checkpoints(run, Boundary.of(run)).items():
        found = open_complete(seen, nodes) if name != this.seen.name else None
        if isinstance(found, TrainingState) and not found.pruned_files:
            usable[name] = _Candidate.of(seen, found)
    same = [one for one in usable.values() if one.model == this.model]
    same.sort(key=lambda one: (one.step, one.seen.written_ns))
    if not same or this.step >= same[-1].step:
        yield "it is the newest complete checkpoint of its model"
    by_time = [max(ones, key=lambda one: one.seen.written_ns) for ones in (same, usable.values())]
    if this.seen.written_ns >= by_time[0].seen.written_ns:
        yield "it is the newest complete checkpoint of its model by the time of its files"
    next_one = same[-1]
    if own.folder.name in best_names(run, [one.seen for one in (next_one, *by_time)]):
        yield "it is the best checkpoint of its run"
    if not reads_next:
        return
    if own.folder == own.tag_dir:  # DeepSpeed resumes from the tag that `latest` names
        named = next((tag for tag in latest if tag is not None and exists(run / tag)), None)
        next_one = usable.get(named, next_one) if named is not None else next_one
        if named not in (None, *usable):
            yield f"`latest` names {named}, from which no training can resume"
    if damaged := _damaged_file(next_one.opened):
        yield f"training would resume from {next_one.seen.name}, and {damaged} is damaged"


def _damaged_file(opened: TrainingState) -> Path | None:
    """Return a file with a record whose CRC-32 is wrong, which ``torch.load`` would not notice."""
    for path in (one.path for one in opened.torch_files):
        with reading(path):
            if is_zipfile(path):
                with ZipFile(path) as content:
                    if content.testzip() is not None:
                        return path
    return None
