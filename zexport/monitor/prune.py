"""Remove the optimizer states of one checkpoint, after proof that an export matches it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from zipfile import ZipFile, is_zipfile

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
from zexport.export.manifest import read_manifest
from zexport.export.report import OnProgress
from zexport.monitor.policy import newest, waits_for
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
    Place,
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
from zexport.options import CheckMode, checks_arguments
from zexport.resharding.plan import DELETE_BY_HAND, StrippedFile, strip_optimizer_states
from zexport.storage.files import absolute, exists, is_file, is_local, version
from zexport.storage.json import JsonReport, Natural, as_table, form_of, read_json_object
from zexport.storage.location import place
from zexport.storage.locks import locked
from zexport.storage.os_errors import reading
from zexport.storage.storage import Version
from zexport.storage.symlink_policy import Boundary
from zexport.text import some


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
        new = [] if dry_run else whole
        for one in places:
            check_own_files(one.folder)
        for one in whole:
            check_target(one, known[one.folder])
        opened = open_checkpoint([one.tag_dir for one in places])
        raise_problems(opened)
        is_begun = whole != places  # an interrupted call has pruned another node's part
        for one in [] if is_begun else whole:
            _check_settled(one)
        checked = [] if is_begun or even_newest else places
        for one in checked:
            _check_not_resumed(one, places, opened, reads_next=True)
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
            raise VerificationError(
                "does not match the checkpoint, which is unchanged",
                path=out,
                found=f"{verified.problems[0].file}: {verified.problems[0].problem}",
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
            for one in new:
                _build(one, report, opened, stripped, known[one.folder], progress)
            if not dry_run:
                prove(opened, [one.tag_in(one.new if one in new else one.folder) for one in places])
            for one in checked:  # again: the proof may have taken an hour
                _check_not_resumed(one, places, opened, reads_next=False)
            for one in places:
                if versions_of(one.folder) != known[one.folder]:
                    raise changed_meanwhile(one.folder)
            if not dry_run:
                swap(whole)
        finally:  # after Ctrl-C, too
            for one in new:
                if not exists(one.old):
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
    files = ((one.tag_dir / Path(each.file.filename).name, each.file) for each in stripped)
    own = {path: file for path, file in files if is_file(path)}
    more = {
        "zexport_version": __version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "export_manifest": digest_of_manifest(report.export),
        "source": digest_of_versions(known),
    }
    build(opened, one, own, form_of(more, report), progress)


def _place_of(path: Path, tag: str | None) -> Place:
    """Return the checkpoint that a path and a tag mean; a pruned one also by its old name."""
    if not exists(path):
        renamed = (pruned_name(path), pruned_name(path.parent) / path.name)
        path = next(filter(exists, renamed), path)
    location = locate(path, tag)
    if not location.is_zero:
        raise UnsupportedError(
            "only checkpoints of DeepSpeed can be pruned",
            path=location.tag_dir,
            hint=DELETE_BY_HAND,
        )
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
    provenance = read_manifest(out).provenance
    options, record = (as_table(provenance.get(key)) for key in ("options", "checkpoint"))
    made_from = f"tag {original_name(str(record.get('tag')))}, step {record.get('global_steps')}"
    own = f"tag {original_name(opened.location.tag)}, step {opened.global_steps}"
    if made_from != own or not options:
        raise VerificationError(
            "was made from another checkpoint",
            path=out,
            found=made_from,
            expected=own,
            hint="Export this checkpoint",
        )
    for name, option in (("exclude_frozen", "--exclude-frozen"), ("allow", "--allow")):
        if options.get(name):
            raise OutputError(
                f"was exported with {option}, so it cannot replace the checkpoint",
                path=out,
                hint=f"Export it again without {option}",
            )


def _check_settled(own: Place) -> None:
    """Raise if a checkpoint, which is known to be complete, is being saved again."""
    seen = checkpoint_at(own.folder, Boundary.of(own.folder.parent))
    seen = changed(seen, missing=find_missing(seen) if seen.is_trainers else "")
    if exists(own.work):  # hard links of an interrupted call are changes, too
        seen = changed(seen, changed_ns=seen.written_ns)
    if why := waits_for(seen, time.time_ns()):
        raise OutputError(
            "is not pruned, because the run may still be writing it",
            path=own.folder,
            found=why,
            hint="Wait until it is complete",
        )


def _with_step(seen: RunCheckpoint, opened: TrainingState) -> RunCheckpoint:
    """Return a checkpoint with the step in its Trainer's state, or else in its rank files."""
    path = seen.folder / TRAINER_STATE
    of_trainer = read_json_object(path).get("global_step") if is_file(path) else None
    return changed(seen, step=of_trainer if isinstance(of_trainer, int) else opened.global_steps)


def _check_not_resumed(
    own: Place, places: Sequence[Place], opened: TrainingState, *, reads_next: bool
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
    run, nodes = own.folder.parent, [one.folder.parent for one in places if one is not own]
    latest = {read_latest(run, name) for name in LATEST}
    if own.folder.name in latest:
        yield "`latest` names it"
    if link := link_to(own.folder):
        yield f"the link `{link}` leads to it"
    this = _with_step(checkpoint_at(own.folder, Boundary.of(run)), opened)
    usable: dict[str, RunCheckpoint] = {}
    states: dict[str, TrainingState] = {}
    for name, seen in list_checkpoints(run, Boundary.of(run)).items():
        found = open_complete(seen, nodes) if name != this.name else None
        if isinstance(found, TrainingState) and not found.pruned_files:
            usable[name], states[name] = _with_step(seen, found), found
    if this.name in newest([this, *usable.values()], 1):
        yield "it is the newest complete checkpoint of its model, by step or by time"
    heads = [usable[name] for name in newest(usable.values(), 1)]
    if this.name in best_names(run, heads):
        yield "it is the best checkpoint of its run"
    if not reads_next:
        return
    model = model_of(this.name, {this.step})
    same = [one for one in heads if model_of(one.name, {one.step}) == model]
    next_name = max(same, key=lambda one: one.step or 0).name
    if own.folder == own.tag_dir:  # DeepSpeed resumes from the tag that `latest` names
        next_name = next((tag for tag in latest if tag and exists(run / tag)), next_name)
        if next_name not in usable:
            yield f"`latest` names {next_name}, from which no training can resume"
    if damaged := _damaged_file(states[next_name]):
        yield f"training would resume from {next_name}, and {damaged} is damaged"


def _damaged_file(opened: TrainingState) -> Path | None:
    """Return a file with a record whose CRC-32 is wrong, which ``torch.load`` would not notice."""
    for path in (one.path for one in opened.torch_files):
        with reading(path):
            if is_zipfile(path):
                with ZipFile(path) as content:
                    if content.testzip() is not None:
                        return path
    return None
