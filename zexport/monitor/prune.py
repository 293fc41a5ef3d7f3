"""The optimizer states of one checkpoint removed, once an export of it is proved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from blake3 import blake3

from zexport import __version__
from zexport.api.verify import verify_export
from zexport.checkpoint.open import Checkpoint, open_checkpoint
from zexport.checkpoint.resolve import original_name
from zexport.checkpoint.state import raise_problems
from zexport.errors import OutputError, VerificationError
from zexport.export.job import OnProgress
from zexport.export.manifest import read_manifest
from zexport.filenames import MANIFEST_NAME
from zexport.monitor.hollowing import (
    check_as_noted,
    hollow_out,
    of_a_resume,
    prove,
    rename,
    stage,
    unstage,
)
from zexport.monitor.prunable import (
    Place,
    check_apart,
    check_prunable,
    check_stands_for,
    place_of,
)
from zexport.monitor.pruned_note import Note, Sizes, read_note
from zexport.options import CheckMode, checks_arguments
from zexport.resharding.without_moments import DELETE_BY_HAND, without_moments
from zexport.storage.contents import read_whole
from zexport.storage.files import absolute, is_local, version
from zexport.storage.json import JsonObject, Natural, form_of
from zexport.storage.location import place
from zexport.storage.locks import locked
from zexport.storage.os_errors import reading
from zexport.text import brief, some


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was removed of a checkpoint, or would be.

    Attributes:
        checkpoint: its folder, as it was called.
        pruned: what that is called now; null where nothing was done yet.
        step: optimizer steps taken.
        export: the folder that was held against it.
        tensors: tensors that were held against the export, and against the files written again.
        is_dry_run: whether nothing was done, though all was held against the export.
        rewritten: optimizer files that are written again without the optimizer's states.
        removed: files that go whole.
        left_out: keys of optimizer files that cannot be written again, and are left out.
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

    __repr__ = brief

    def to_json(self) -> JsonObject:
        """The report as JSON values, with a ``schema`` number."""
        return form_of(self)


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
    """Remove the optimizer states of a checkpoint whose export is proved.

    The masters stay: the folder, ``pruned-checkpoint-N`` now, exports as before, bit for bit. That
    is proved, and ``export`` is held against the checkpoint byte by byte, before anything goes.
    When this is ended at any moment, the next call goes on.

    Args:
        checkpoint: any level of the checkpoint's folders; several where nodes kept their own parts.
        export: a folder that ``consolidate`` made of it.
        even_newest: also if a training would resume from this checkpoint.
        dry_run: prove the export, say how much it is, and do nothing.
        tag: which checkpoint, where there are several.
        base: the base model, where the export was given one.
        adapter_config: the adapter's configuration, where the export was given one.
        check: how much of the masters is held against the module's own copy of them.
        progress: told of every step.

    Raises:
        UsageError: a training would resume from it.
        OutputError: it is being written, the export lacks something of it, or the disk refuses.
        VerificationError: the export is damaged, or of another checkpoint.
        CheckpointError: the checkpoint is incomplete, damaged or gone.
        UnsupportedError: the optimizer's states lie where they cannot be removed apart.
    """
    began = time.monotonic()
    out = absolute(place(export))
    paths = _local(checkpoint)
    job = _Job(paths, out, tag, even_newest=even_newest)
    tensors = job.verify(base, adapter_config, check, progress)
    if dry_run:
        job.check()
        return job.report(tensors, began, is_dry_run=True)
    with ExitStack() as stack:
        for one in job.places:
            stack.enter_context(locked(one.target))
        job.run(tensors, progress)
    return job.report(tensors, began)


def _check_told(places: Sequence[Place], out: Path) -> None:
    """Refuse names that the note in the pruned checkpoint cannot record."""
    for path in (out, *(one.folder for one in places)):
        try:
            str(path).encode()
        except UnicodeEncodeError as cause:
            raise OutputError(
                "has a name that is not UTF-8, which the note of what is removed cannot record",
                path=path,
                hint="Give it another name first",
            ) from cause


def _local(checkpoint: Checkpoint) -> list[Path]:
    """The folders of a checkpoint from the root on; one in object storage is refused."""
    listed = [checkpoint] if isinstance(checkpoint, Path | str) else checkpoint
    paths = [absolute(place(one)) for one in listed]
    far = next((one for one in paths if not is_local(one)), None)
    if far is not None:
        raise OutputError(
            "lies in object storage, where nothing is pruned",
            path=far,
            hint=DELETE_BY_HAND,
        )
    return paths


class _Job:
    """One pruning: what is to go, as far as it can be known before anything is done."""

    def __init__(
        self, paths: Sequence[Path], out: Path, tag: str | None, *, even_newest: bool
    ) -> None:
        """What is to be done, unless it is refused."""
        self._out = out
        self._even_newest = even_newest
        with reading(paths[0], hint="Check its permissions"):
            self.places = places = [place_of(path, tag) for path in paths]
            self._noted = [one.versions() for one in places]
            self._opened = opened = open_checkpoint([one.tag_dir for one in places])
            raise_problems(opened)
            self._check_all(is_last=False)
            check_apart(places, out)
            _check_told(places, out)
            check_stands_for(out, read_manifest(out), opened)
            self._rewritings = without_moments(opened)
            resume = [path for one in places for path in of_a_resume(one)]
            freed = sum(version(path).nbytes for path in resume)
        freed += sum(one.nbytes_before - one.file.nbytes for one in self._rewritings)
        self._before = sum(file.nbytes for one in self._noted for file in one.values())
        self._freed = max(freed, 0)
        self._removed = tuple(path.name for path in resume)
        left_out = (key for one in self._rewritings for key in one.left_out)
        self._left_out = tuple(dict.fromkeys(left_out))

    def verify(
        self,
        base: Path | str | None,
        adapter_config: Path | str | None,
        check: CheckMode,
        progress: OnProgress | None,
    ) -> int:
        """Hold the export against the checkpoint; how many tensors are equal."""
        found = verify_export(
            self._out,
            against=[one.tag_dir for one in self.places],
            base=base,
            adapter_config=adapter_config,
            check=check,
            progress=progress,
        )
        if not found.ok:
            told = [" ".join(filter(None, (p.file, p.tensor, p.problem))) for p in found.problems]
            raise VerificationError(
                "is not what the checkpoint gives, which is left as it is",
                path=self._out,
                found=some(told, 3),
                hint="Export the checkpoint again",
            )
        return found.tensors

    def check(self) -> None:
        """Refuse what has changed since: the proof may have taken an hour."""
        self._check_all(is_last=True)
        for one, known in zip(self.places, self._noted, strict=True):
            check_as_noted(one, one, known)

    def _check_all(self, *, is_last: bool) -> None:
        """Refuse a checkpoint that a resume needs, whichever of its nodes' folders says so."""
        for one in self.places:
            others = (other for other in self.places if other is not one)
            check_prunable(
                one,
                *others,
                opened=self._opened,
                even_newest=self._even_newest,
                is_last=is_last,
            )

    def run(self, tensors: int, progress: OnProgress | None) -> None:
        """Do it: first what takes nothing away, then the rest.

        The proof may have taken an hour, in which another checkpoint became the newest or went.
        """
        try:
            staged = [stage(self._opened, one, self._rewritings, progress) for one in self.places]
            prove(self._opened, self.places)
            self._check_all(is_last=True)
            renamed = rename(self.places, self._noted)
        except BaseException as error:  # Ctrl-C too: then finished files stay
            for one in self.places:
                unstage(one, error)
            raise
        sizes = {
            Path(one.file.filename).name: Sizes(one.nbytes_before, one.file.nbytes)
            for one in self._rewritings
        }
        for one, names in zip(renamed, staged, strict=True):
            note = self._note(one, tensors, {name: sizes[name] for name in names})
            hollow_out(one, names, note)

    def _note(self, one: Place, tensors: int, rewritten: dict[str, Sizes]) -> Note:
        earlier = read_note(one.tag_dir)
        return Note(
            zexport_version=__version__,
            checkpoint=original_name(one.folder.name),
            step=self._opened.global_steps,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            export=str(self._out),
            export_manifest=blake3(read_whole(self._out / MANIFEST_NAME)).hexdigest(),
            tensors=tensors,
            rewritten={**(earlier.rewritten if earlier else {}), **rewritten},
            removed=tuple(dict.fromkeys((*(earlier.removed if earlier else ()), *self._removed))),
            left_out=self._left_out,
        )

    def report(self, tensors: int, began: float, *, is_dry_run: bool = False) -> PruneReport:
        """What was done, or would be."""
        first = self.places[0]
        return PruneReport(
            checkpoint=first.folder.with_name(original_name(first.folder.name)),
            pruned=None if is_dry_run else first.target,
            step=self._opened.global_steps,
            export=self._out,
            tensors=tensors,
            is_dry_run=is_dry_run,
            rewritten=tuple(Path(one.file.filename).name for one in self._rewritings),
            removed=self._removed,
            left_out=self._left_out,
            nbytes_before=self._before,
            nbytes_freed=self._freed,
            seconds=time.monotonic() - began,
        )
