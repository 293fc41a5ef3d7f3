"""Taking out of a checkpoint's folder what only a resume needs, in steps that hold.

Files are written again beside the folder, and read again through it, before anything is touched.
Then the folder gets another name and a note, and only then files are replaced, one by one, and
removed. So whatever ends this, the folder is whole, or is called pruned; and what is called pruned
exports as before at every moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.state import TrainingState, source_of
from zexport.errors import CheckpointError, UnsupportedError
from zexport.export.destination import abandon, keep_finished
from zexport.export.job import OnProgress, find_unwritten
from zexport.export.journal import Journal
from zexport.export.plan import ExportPlan, Form, Origin, SourceFile
from zexport.export.plan_file import Request, seal, unseal
from zexport.export.progress import Meter, Progress
from zexport.export.proof import WeightReader
from zexport.export.stream import read_plainly
from zexport.export.summary import share_memory
from zexport.export.write import VerifyMode, write_files
from zexport.monitor.prunable import OF_A_RESUME, Place
from zexport.monitor.pruned_note import NOTE, Note
from zexport.options import ReshardOptions
from zexport.ranges.compare import Replica
from zexport.ranges.source import paths_of
from zexport.resharding.without_moments import DELETE_BY_HAND, Rewriting
from zexport.storage.files import (
    children,
    exists,
    is_file,
    make_folder,
    real,
    remove,
    sync_path,
    write_durably,
)
from zexport.storage.local import rename as rename_folder
from zexport.storage.local import symlink, take_place, times_kept
from zexport.storage.locks import workplaces
from zexport.storage.os_errors import reading, writing
from zexport.storage.storage import Version


def of_a_resume(place: Place) -> list[Path]:
    """The files around the rank files that only a resume needs."""
    return [path for path in children(place.folder) if OF_A_RESUME.fullmatch(path.name)]


def stage(
    opened: TrainingState,
    place: Place,
    rewritings: Sequence[Rewriting],
    progress: Callable[[Progress], None] | None,
) -> list[str]:
    """Write a folder's optimizer files again beside it; their names.

    Beside them lie links to the other files of the tag, so that it opens as a checkpoint.
    """
    partial, _ = workplaces(place.target)
    own = [one for one in rewritings if is_file(place.tag_dir / Path(one.file.filename).name)]
    view = partial / place.original_tag
    with writing(partial):
        make_folder(partial)
        keep_finished(partial)
    if own:
        _fill(_plan(opened, place, own), partial, progress)
    with reading(place.tag_dir):
        links = {view / path.name: real(path) for path in children(place.tag_dir)}
    with writing(partial):
        make_folder(view)
        for link, path in links.items():
            if not exists(link):
                symlink(path, link)
    return [Path(one.file.filename).name for one in own]


def unstage(place: Place, error: BaseException) -> None:
    """Keep what was staged for the next call, or nothing where the run has removed the folder."""
    partial, _ = workplaces(place.target)
    if exists(place.folder):
        abandon(partial, error)
        return
    with suppress(OSError):  # as in the way of the error itself
        remove(partial)


def _fill(plan: ExportPlan, folder: Path, progress: OnProgress | None) -> None:
    """Write a plan's files into ``folder``; a rerun reuses what an interrupted one finished."""
    sealed = unseal(seal(plan, Request((), {})), folder, folder)
    journal = Journal(folder, sealed.digest, (one.path for one in plan.sources))
    meter = Meter(progress, reads_again=False)
    rest = find_unwritten(sealed, range(len(sealed.sizes)), folder, journal, meter)
    files = [plan.shards[number] for number in rest]
    for path in {journal.folder, *((folder / file.filename).parent for file in files)}:
        make_folder(path)
    with WeightReader.of_plan(plan) as sources:
        sources.compare()
        read = read_plainly(sources)
        write_files(plan, files, folder, journal, sources, VerifyMode.NONE, meter, read)
        for receipt in filter(None, (journal.find(one.filename) for one in sealed.sizes)):
            sources.take(journal.ranges(receipt))
        sources.finish()


def _plan(opened: TrainingState, place: Place, own: Sequence[Rewriting]) -> ExportPlan:
    files = tuple(one.file for one in own)
    read = paths_of(tensor.source for file in files for tensor in file.tensors)
    jobs, chunk_nbytes = share_memory(ReshardOptions(), files)
    return ExportPlan(
        out_dir=place.target,
        origin=Origin.of(opened),
        form=Form((), "checkpoint", weights_only=False),
        shards=files,
        side_files=(),
        sources=tuple(SourceFile.of(file) for file in opened.torch_files if file.path in read),
        provenance={},
        warnings=(),
        overwrite=False,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
    )


def prove(opened: TrainingState, places: Sequence[Place]) -> int:
    """Hold what was staged against the checkpoint: all tensors are there, bit for bit; how many.

    Raises:
        UnsupportedError: without the optimizer's states the checkpoint would say something else.
        CheckpointError: a tensor has other values.
    """
    views = [workplaces(one.target)[0] / one.original_tag for one in places]
    again = open_checkpoint(views, follow_symlinks=True)
    if again.problems or _told(again) != _told(opened):
        raise UnsupportedError(
            "cannot be pruned: without the optimizer's states it would be read otherwise",
            path=opened.location.tag_dir,
            found=again.problems[0].statement() if again.problems else None,
            hint=f"Report this layout. {DELETE_BY_HAND}",
        )
    copies = [
        Replica(one.name, source_of(one), source_of(other))
        for one, other in zip(opened.tensors, again.tensors, strict=True)
    ]
    files = {file.path: file for file in (*opened.torch_files, *again.torch_files)}
    with WeightReader(map(SourceFile.of, files.values()), copies) as reader:
        reader.compare()
        reader.finish()
    return len(copies)


def _told(checkpoint: TrainingState) -> tuple[object, ...]:
    """All that an export depends on but the values of tensors."""
    one = checkpoint
    return (
        (one.layout, one.parallelism, one.stage, one.world_size, one.ds_version, one.structure),
        (one.global_steps, one.skipped_steps, one.optimizer, one.lr_step),
        (one.module_dtype, one.cast_dtype, one.master_dtype),
        [
            (t.name, t.shape, t.dtype, t.role, t.fp32_under, t.module_dtype, t.numel)
            for t in one.tensors
        ],
        (one.aliases, one.left_out, one.frozen_left_out, len(one.replicas)),
        [(flat.numel, flat.dtype, flat.padding) for flat in one.flats],
    )


def rename(places: Sequence[Place], noted: Sequence[Mapping[Path, Version]]) -> list[Place]:
    """Give the folders their new names, under which no training looks for them.

    Args:
        places: all that nodes have of one checkpoint.
        noted: the versions of their files before anything was proved of them.

    Raises:
        CheckpointError: the run has changed one since; then all have their old names again.
    """
    with ExitStack() as undo:
        for one, known in zip(places, noted, strict=True):
            check_as_noted(one, one, known)
            if not one.is_renamed:
                _move(one.folder, one.target)
                undo.callback(_move, one.target, one.folder)
                check_as_noted(one.renamed, one, known)
        undo.pop_all()
    return [one.renamed for one in places]


def _move(folder: Path, name: Path) -> None:
    with writing(name):
        rename_folder(folder, name)
        sync_path(name.parent)


def check_as_noted(there: Place, place: Place, known: Mapping[Path, Version]) -> None:
    """Refuse a folder, wherever it is ``there`` now, that is not as it was."""
    with reading(place.folder):
        now = there.versions()
    changed = sorted(name for name in {**known, **now} if known.get(name) != now.get(name))
    if changed:
        raise CheckpointError(
            "was changed or removed by its run meanwhile",
            path=place.folder / changed[0],
            hint="Nothing was removed here; look at what is left",
        )


def hollow_out(place: Place, names: Sequence[str], note: Note) -> None:
    """Put the staged files into a folder that was renamed, and remove what only a resume needs."""
    partial, _ = workplaces(place.target)
    with writing(place.folder), times_kept(place.folder, place.tag_dir):
        write_durably(place.tag_dir / NOTE, _lines(note))
        for name in names:
            take_place(partial / place.original_tag / name, place.tag_dir / name)
        for path in of_a_resume(place):
            remove(path)
        for folder in (place.tag_dir, place.folder):
            sync_path(folder)
    with writing(partial):
        remove(partial)


def _lines(note: Note) -> bytes:
    return msgspec.json.format(msgspec.json.encode(note)) + b"\n"
