"""What a run's folder holds at one moment, and what says that a checkpoint there is complete.

``latest`` says nothing: rank 0 writes it before the other ranks are done (DeepSpeed 0.19.8,
``runtime/engine.py``: ``save_checkpoint``).
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from blake3 import blake3
from msgspec import Struct

from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.resolve import (
    PRUNED,
    checkpoints_of_one_run,
    is_checkpoint_name,
    is_tag_dir,
    list_run_checkpoints,
    list_tags,
    locate,
    original_name,
    recorded_step,
    run_folder,
)
from zexport.checkpoint.state import TrainingState
from zexport.errors import CheckpointError, ZexportError
from zexport.monitor.pruned_note import NOTE
from zexport.storage.contents import read_json_object
from zexport.storage.files import (
    changed_ns,
    child_folders,
    exists,
    is_folder,
    leaves,
    listed_version,
    refresh,
)
from zexport.storage.os_errors import reading
from zexport.storage.storage import Version
from zexport.storage.symlink_policy import Boundary

STILL_S = 600
"""What has not changed for so long will not change: an export says what is wrong with it."""

_SETTLED_S = 60
"""What has not changed for so long is not being written, if nothing is missing."""

_TRAINERS = re.compile(r"checkpoint-\d{1,18}", re.ASCII)
TRAINER_STATE = "trainer_state.json"
_BEING_SAVED = "checkpoint-is-incomplete.txt"


class Sighting(Struct, frozen=True):
    """A checkpoint of a run, as it was at one moment.

    Attributes:
        name: of its folder: the tag's, or that of the folder which a framework makes around it.
        run: the folder with the run's checkpoints.
        tag_dir: the folder with the rank files.
        versions: of every file in that, by its name there.
        changed_ns: when one of them last changed, by the clock of their file system.
    """

    name: str
    run: Path
    tag_dir: Path
    versions: Mapping[str, Version]
    changed_ns: int

    @property
    def folder(self) -> Path:
        """The folder that is this checkpoint alone."""
        return self.run / self.name

    @property
    def mark(self) -> str:
        """A digest of its files' names, sizes and times: another save has another."""
        told = "\n".join(f"{name} {one}" for name, one in sorted(self.versions.items()))
        return blake3(told.encode(errors="surrogateescape")).hexdigest()

    @property
    def written_ns(self) -> int:
        """When the last of its files was written."""
        return max((one.mtime_ns for one in self.versions.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(one.nbytes for one in self.versions.values())

    @property
    def age_s(self) -> float:
        """Seconds since one of its files last changed."""
        return (time.time_ns() - self.changed_ns) / 1e9

    def step(self, boundary: Boundary) -> int | None:
        """The optimizer steps that it records; ``None`` also where it was removed meanwhile."""
        try:
            return recorded_step(self.tag_dir, boundary)
        except FileNotFoundError:
            return None

    def lacks(self, earlier: Sighting | None, *others: Path) -> str:
        """What is still to come, in words; empty for a complete checkpoint.

        Args:
            earlier: the same checkpoint as it was seen before; ``None`` where that says nothing.
            others: the folders of the same run on other nodes, which hold their parts of it.

        A Trainer's has its state, which is written when every rank has closed its files
        (transformers 5.23, ``trainer.py``: ``_save_checkpoint``); where files are newer than that,
        they are being saved anew, and settle first. Any other has all files of every rank, each
        with its zip's end record, and does not change. One that has not changed for ten minutes
        counts as complete: exporting it tells what is wrong.
        """
        if self.age_s > STILL_S:
            return ""
        if self._is_trainers:
            if lacks := self._lacks_of_trainer():
                return lacks
            if self._is_state_newest():
                return ""
            earlier = None
        if missing := _missing(self._parts(others)):
            return missing
        is_still = self.age_s > _SETTLED_S or (earlier is not None and earlier.mark == self.mark)
        return "" if is_still else "files changed in the last minute"

    def opened_to_resume(self, *others: Path) -> TrainingState | None:
        """Return the opened checkpoint, or ``None`` if no training can resume from it.

        Args:
            others: the folders of the same run on other nodes, which hold their parts of it.
        """
        if self._is_trainers and self._lacks_of_trainer():
            return None
        try:
            opened = open_checkpoint(self._parts(others))
        except (ZexportError, FileNotFoundError):
            return None
        return None if opened.problems or opened.pruned_files else opened

    def _parts(self, others: Sequence[Path]) -> list[Path]:
        return [run / self.tag_dir.relative_to(self.run) for run in (self.run, *others)]

    def _is_state_newest(self) -> bool:
        """Whether no rank's file was written after the Trainer's state."""
        try:
            return listed_version(self.folder / TRAINER_STATE).mtime_ns >= self.written_ns
        except FileNotFoundError:
            return False

    def _lacks_of_trainer(self) -> str:
        if exists(self.folder / _BEING_SAVED):
            return f"{_BEING_SAVED} is there"
        try:
            read_json_object(self.folder / TRAINER_STATE)
        except ZexportError:
            return f"{TRAINER_STATE} is not written yet"
        return ""

    @property
    def is_unproved(self) -> bool:
        """Whether it is a Trainer's without the file that says it is complete."""
        return self._is_trainers and not exists(self.folder / TRAINER_STATE)

    @property
    def _is_trainers(self) -> bool:
        is_named = _TRAINERS.fullmatch(original_name(self.name)) is not None
        return is_named and self.folder != self.tag_dir


def look(run: Path, boundary: Boundary) -> tuple[Sighting, ...]:
    """The checkpoints in a run's folder, oldest first; none where there is no folder yet.

    One that is removed meanwhile is left out, and so is what was pruned.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        refresh(run, below=True)
        run = run_folder(run)
        found = [*_sightings(run, boundary)]
    except FileNotFoundError:
        return ()
    except OSError as cause:
        raise CheckpointError(f"cannot be read: {cause.strerror or cause}", path=run) from cause
    return tuple(sorted(found, key=lambda one: (one.written_ns, one.name)))


def _sightings(run: Path, boundary: Boundary) -> Iterator[Sighting]:
    tags = list_tags(run)
    checkpoints = checkpoints_of_one_run(run) if tags else list_run_checkpoints(run)
    for name in filter(str.isprintable, (*checkpoints, *tags)):
        if name.startswith(PRUNED):
            continue
        try:
            yield sighting(run, name, boundary)
        except (CheckpointError, FileNotFoundError):  # it is going, or not there yet
            continue


def out_of_reach(run: Path, seen: Container[str]) -> Iterator[tuple[str, CheckpointError]]:
    """What is no sighting though it is a checkpoint, as far as this user can see; and why."""
    try:
        folders = [path for path, is_link in child_folders(run_folder(run)) if not is_link]
    except OSError:
        return  # that is told by who looks for sightings
    for path in folders:
        if path.name in seen or path.name.startswith(PRUNED):
            continue
        try:
            if not path.name.isprintable() and (is_tag_dir(path) or list_tags(path)):
                problem, hint = "holds a checkpoint whose name cannot be printed", "Rename it"
                yield path.name, CheckpointError(problem, path=run, found=path.name, hint=hint)
            elif is_checkpoint_name(path.name):
                deque(leaves(path), maxlen=0)
        except PermissionError as cause:
            problem, hint = f"cannot be read: {cause.strerror}", "Check its permissions"
            yield path.name, CheckpointError(problem, path=path, hint=hint)
        except OSError:
            continue  # it is going, or not there yet


def sighting(run: Path, name: str, boundary: Boundary) -> Sighting:
    """The checkpoint of that name in a run, as its framework saved it."""
    located = locate(run / name, follow_symlinks=boundary.follow)
    saved = (path for path in leaves(located.tag_dir) if NOTE not in path.name)
    files = [path for path in saved if boundary.holds(path) and not is_folder(path)]
    versions = {str(path.relative_to(located.tag_dir)): listed_version(path) for path in files}
    changed = max((changed_ns(path) or 0 for path in files), default=0)
    return Sighting(name, run, located.tag_dir, versions, changed)


def check_as_seen(folder: Path, mark: str, *, follow: bool) -> None:
    """Refuse a checkpoint whose files are not those that a sighting had the mark of.

    Raises:
        CheckpointError: it was saved anew, or removed.
    """
    refresh(folder)
    within = Boundary.of(folder.parent, follow=follow)
    with reading(folder):
        found = sighting(folder.parent, folder.name, within).mark
    if found != mark:
        raise CheckpointError(
            "was saved anew while it was exported",
            path=folder,
            hint="Export it when nothing writes there",
        )


def _missing(tag_dirs: Sequence[Path]) -> str:
    """What is not there yet, or not whole; what is wrong for good is for the export to tell."""
    try:
        problems = open_checkpoint(tag_dirs).problems
    except ZexportError as error:
        problems = (error,)
    found = (one.statement() for one in problems if isinstance(one, CheckpointError))
    return next(found, "")
