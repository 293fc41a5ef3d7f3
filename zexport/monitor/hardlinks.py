"""Keep a checkpoint alive until it is exported, even if the run deletes it.

Nothing is written into the checkpoint's own folder: a Trainer deletes folders by their time
(transformers 5.23, ``trainer_utils.py``). On another file system and in a bucket there are no hard
links, and a checkpoint is read in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from zexport.errors import CheckpointError
from zexport.monitor.snapshot import LINKS, OWN_FOLDER, RunCheckpoint, checkpoint_at
from zexport.storage.files import (
    children,
    exists,
    is_file,
    is_link,
    is_local,
    leaves,
    make_folder,
    real,
    remove,
    subfolders,
    sync_path,
)
from zexport.storage.local import hard_link, rename, symlink
from zexport.storage.os_errors import writing
from zexport.storage.symlink_policy import Boundary

_MARK_LENGTH = 32


def keep(checkpoint: RunCheckpoint, outs: Path, boundary: Boundary) -> RunCheckpoint:
    """Return the checkpoint read through hard links, or in place if there can be none.

    The files next to it in the run are linked, too: an export may need them. A symlink that leads
    out of the run stays one.

    Raises:
        CheckpointError: the run has changed or deleted it.
        FileNotFoundError: the run is deleting it.
        OutputError: ``outs`` cannot be written.
    """
    run, own = checkpoint.folder.parent, outs / OWN_FOLDER
    if checkpoint.links is not None or not (is_local(run) and is_local(outs)):
        return checkpoint
    links, unfinished = own / LINKS / checkpoint.mark[:_MARK_LENGTH], own / "unfinished"
    copy = unfinished / run.name
    release(unfinished)
    try:
        for path in _files_of(checkpoint):
            to = copy / path.relative_to(run)
            with writing(own):
                make_folder(to.parent)
            (hard_link if boundary.holds(path) else symlink)(real(path), to)
    except FileNotFoundError:
        raise
    except OSError:  # such as another file system
        release(unfinished)
        return checkpoint
    kept = checkpoint_at(copy / checkpoint.name, Boundary.of(copy, follow=boundary.follow))
    if kept.mark != checkpoint.mark:
        raise CheckpointError("changed meanwhile", path=checkpoint.folder)
    with writing(own):
        make_folder(links.parent)
        release(links)
        for folder, _ in subfolders(unfinished):  # a link that is lost would go unnoticed
            sync_path(folder)
        rename(unfinished, links)
    folder = links / run.name / checkpoint.name
    tag_dir = folder / checkpoint.tag_dir.relative_to(checkpoint.folder)
    return replace(checkpoint, folder=folder, tag_dir=tag_dir, links=links)


def release(links: Path | None) -> None:
    """Remove hard links, if there are any."""
    if links is not None and exists(links):
        with writing(links):
            remove(links)


def _files_of(checkpoint: RunCheckpoint) -> Iterator[Path]:
    yield from filter(is_file, leaves(checkpoint.folder))
    if is_link(checkpoint.tag_dir):
        yield from filter(is_file, leaves(checkpoint.tag_dir))
    for path in children(checkpoint.folder.parent):
        if is_file(path) and path.name != "latest":
            yield path
