"""Remove optimizer states from a checkpoint in crash-safe steps.

The pruned folder is built next to the checkpoint: optimizer states files are rewritten, everything
else is hard-linked. It is compared with the checkpoint bit for bit and flushed to the disk. Then it
gets its name, the checkpoint's folder loses its own, and only a folder without a name is removed.
At every moment, one of the two is complete under its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.resolve import original_name, pruned_name
from zexport.checkpoint.state import TrainingState, source_of
from zexport.errors import (
    CheckpointError,
    OutputError,
    UnsupportedError,
    ZexportError,
)
from zexport.export.checked_reader import WeightReader
from zexport.export.journal import Journal
from zexport.export.plan import ExportPlan, FilePlan, Form, Origin, SourceFile, share_memory
from zexport.export.plan_file import Request, seal, unseal
from zexport.export.report import Meter, Progress, VerifyMode
from zexport.export.write import write_files
from zexport.monitor.snapshot import NOTE, digest_of_versions
from zexport.options import ReshardOptions
from zexport.ranges.compare import Replica
from zexport.ranges.source import paths_of
from zexport.resharding.plan import DELETE_BY_HAND
from zexport.storage.files import (
    children,
    exists,
    is_file,
    is_folder,
    is_link,
    leaves,
    make_folder,
    remove_durably,
    subfolders,
    sync_path,
    version,
    write_durably,
)
from zexport.storage.json import JsonObject, read_json_object
from zexport.storage.local import copy_attributes, link_or_copy, rename
from zexport.storage.location import is_mount
from zexport.storage.locks import workplaces
from zexport.storage.os_errors import reading, writing
from zexport.storage.storage import Version

_FOR_RESUME = re.compile(
    r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl|(scheduler|sampler|optimizer)(_\d+)?\.(pt|bin)"
    r"|scaler\.pt"
)
"""Files next to the rank files that only a resume reads.

Source: transformers 5.23, ``trainer.py`` (``_save_rng_state``, ``_save_optimizer_and_scheduler``),
accelerate 1.15, ``checkpointing.py``.
"""


class Place(Struct, frozen=True):
    """A checkpoint's own folder, whole or what one node has of it.

    Attributes:
        folder: the folder of only this checkpoint.
        tag_dir: the folder with the rank files; may be the same.
    """

    folder: Path
    tag_dir: Path

    @property
    def target(self) -> Path:
        """The folder once it is pruned."""
        return pruned_name(self.folder)

    @property
    def original(self) -> Path:
        """The folder before it is pruned."""
        return self.folder.with_name(original_name(self.folder.name))

    @property
    def is_pruned(self) -> bool:
        return self.folder == self.target

    @property
    def work(self) -> Path:
        """The folder that pruning works in; nothing else looks there."""
        return workplaces(self.target)[0]

    @property
    def new(self) -> Path:
        return self.work / "new" / self.original.name

    @property
    def old(self) -> Path:
        return self.work / "old"

    @property
    def gone(self) -> Path:
        return self.work / "gone"

    def tag_in(self, folder: Path) -> Path:
        return folder / self.tag_dir.relative_to(self.folder)

    def for_resume(self) -> list[Path]:
        """Return the files that only a resume reads."""
        found = {path for above in (self.folder, self.tag_dir) for path in children(above)}
        return sorted(path for path in found if is_file(path) and _FOR_RESUME.fullmatch(path.name))


def versions_of(folder: Path) -> dict[str, Version]:
    """Return the versions of all files below a folder, by their paths in it."""
    with reading(folder):
        files = [path for path in leaves(folder) if not is_folder(path)]
        return {path.relative_to(folder).as_posix(): version(path) for path in files}


def check_own_files(folder: Path) -> None:
    """Raise if a folder is, or contains, a link or a mount point."""
    with reading(folder):
        inside = [path for path in leaves(folder) if is_link(path)]
        inside += [path for path, _ in subfolders(folder) if is_mount(path)]
    if is_link(folder) or inside:
        raise OutputError(
            "is not pruned: it is or contains a link or a mount point",
            path=folder,
            found=inside[0].relative_to(folder) if inside else None,
            hint="Replace the link by the file or folder, and pass the real path",
        )


def build(
    opened: TrainingState,
    place: Place,
    files: Mapping[Path, FilePlan],
    note: JsonObject,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Write the pruned folder as ``place.new``, with these files rewritten."""
    written, new = place.work / "written", place.new
    discard(place)
    with writing(place.work):
        make_folder(written)
        if exists(place.target):  # of an interrupted call
            rename(place.target, place.work / "earlier")
    _write(_plan(opened, place, [*files.values()]), written, progress)
    omitted = {*files, *place.for_resume()}
    with writing(place.work):
        for path in leaves(place.folder):
            to = new / path.relative_to(place.folder)
            make_folder(to if is_folder(path) else to.parent)
            if path in files:
                copy_attributes(written / files[path].filename, path)
                rename(written / files[path].filename, to)
            elif path not in omitted and not is_folder(path) and not link_or_copy(path, to):
                sync_path(to)
        write_durably(place.tag_in(new) / NOTE, json.dumps(note, indent=2).encode())
        for folder, _ in subfolders(new):
            copy_attributes(folder, place.folder / folder.relative_to(new))
            sync_path(folder)


def _write(plan: ExportPlan, folder: Path, progress: Callable[[Progress], None] | None) -> None:
    """Write the files of a plan with proof: every record that is read has its checksum."""
    sealed = unseal(seal(plan, Request((), {})), folder, folder)
    journal = Journal(folder, sealed.digest, (one.path for one in plan.sources))
    meter = Meter(progress, reads_again=False)
    meter.expect(sealed.sizes)
    for path in {journal.folder, *((folder / one.filename).parent for one in plan.shards)}:
        make_folder(path)
    with WeightReader.of_plan(plan) as sources:
        sources.compare()
        write_files(plan, plan.shards, folder, journal, sources, VerifyMode.NONE, meter)
        for receipt in filter(None, (journal.find(one.filename) for one in plan.shards)):
            sources.take(journal.ranges(receipt))
        sources.finish()


def _plan(opened: TrainingState, place: Place, files: Sequence[FilePlan]) -> ExportPlan:
    read = paths_of(tensor.source for file in files for tensor in file.tensors)
    jobs, chunk_nbytes = share_memory(ReshardOptions(), files)
    return ExportPlan(
        out_dir=place.target,
        origin=Origin.of(opened),
        form=Form((), "checkpoint", weights_only=False),
        shards=tuple(files),
        side_files=(),
        sources=tuple(SourceFile.of(file) for file in opened.torch_files if file.path in read),
        provenance={},
        warnings=(),
        overwrite=False,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
    )


def prove(opened: TrainingState, pruned: Sequence[Path]) -> None:
    """Compare pruned tag folders with the checkpoint: all tensors are equal, bit for bit.

    Raises:
        UnsupportedError: without optimizer states, the checkpoint would be read differently.
        CheckpointError: a tensor differs.
    """
    again = open_checkpoint(pruned)
    if again.problems or _what_exports_use(again) != _what_exports_use(opened):
        raise UnsupportedError(
            "cannot be pruned: without optimizer states it would be read differently",
            path=opened.location.tag_dir,
            found=again.problems[0].statement() if again.problems else None,
            hint=f"Report this layout. {DELETE_BY_HAND}",
        )
    pairs = [
        Replica(one.name, source_of(one), source_of(other))
        for one, other in zip(opened.tensors, again.tensors, strict=True)
    ]
    files = {file.path: file for file in (*opened.torch_files, *again.torch_files)}
    with WeightReader(map(SourceFile.of, files.values()), pairs) as reader:
        reader.compare()
        reader.finish()


_of_state = attrgetter(
    *("layout", "parallelism", "stage", "world_size", "ds_version", "structure"),
    *("global_steps", "skipped_steps", "optimizer", "lr_step"),
    *("module_dtype", "cast_dtype", "master_dtype", "aliases", "left_out", "frozen_left_out"),
)
_of_tensor = attrgetter("name", "shape", "dtype", "role", "fp32_under", "module_dtype", "numel")
_of_flat = attrgetter("numel", "dtype", "padding")


def _what_exports_use(checkpoint: TrainingState) -> tuple[object, ...]:
    """Return everything that an export depends on except the values of tensors."""
    tensors, flats = map(_of_tensor, checkpoint.tensors), map(_of_flat, checkpoint.flats)
    return _of_state(checkpoint), [*tensors], [*flats], len(checkpoint.replicas)


def swap(places: Sequence[Place]) -> None:
    """Put the pruned folders in place of the checkpoint's.

    Raises:
        CheckpointError: the run has changed the checkpoint since; it stays.
    """
    for place in places:
        _move(place.new, place.target)
    for place in places:
        _move(place.folder, place.old)
    finish(places)


def finish(places: Sequence[Place]) -> None:
    """Remove what has lost its name, unless the run has changed it; then it gets its name back.

    Files that both folders share by hard links may have changed in both.
    """
    there = [place for place in places if exists(place.old)]
    is_changed = not all(_is_made_from(place, versions_of(place.old)) for place in there)
    for place in there:
        if is_changed:
            _move(place.old, place.original)
            _move(place.target, place.gone)
        else:
            _move(place.old, place.gone)  # a part of it must not be taken for all of it
    for place in places:
        discard(place)
    if is_changed:
        raise changed_meanwhile(there[0].original)


def _move(folder: Path, name: Path) -> None:
    with writing(name):
        rename(folder, name)
        sync_path(name.parent)
        sync_path(folder.parent)


def discard(place: Place) -> None:
    """Remove the working folder."""
    with writing(place.work):
        if exists(place.work):
            remove_durably(place.work)


def changed_meanwhile(path: Path) -> CheckpointError:
    """Return the error for a checkpoint that something else has changed."""
    return CheckpointError(
        "changed during pruning", path=path, hint="Nothing was removed. Run the command again"
    )


def check_target(place: Place, known: Mapping[str, Version]) -> None:
    """Raise if ``target`` exists, unless an interrupted call made it from this very checkpoint."""
    if exists(place.target) and not _is_made_from(place, known):
        raise OutputError(
            f"is not pruned: {place.target.name} exists, and is another checkpoint",
            path=place.folder,
            hint="Remove that folder, or move it away",
        )


def _is_made_from(place: Place, known: Mapping[str, Version]) -> bool:
    """Whether the pruned folder was made from files of these versions."""
    path = place.tag_in(place.target) / NOTE
    with suppress(ZexportError):
        return is_file(path) and read_json_object(path).get("source") == digest_of_versions(known)
    return False
