"""Which checkpoint of a run may be pruned; everything else is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from zexport.beside.best import best_names
from zexport.beside.newest import Age, newest
from zexport.beside.sightings import Sighting, look, sighting
from zexport.checkpoint.candidates import list_run_checkpoints, list_tags
from zexport.checkpoint.find import locate
from zexport.checkpoint.location import LATEST, Framework, Location, read_latest
from zexport.checkpoint.pruned import original_name, pruned_name
from zexport.errors import OutputError, UnsupportedError
from zexport.printable import some
from zexport.store.boundary import Boundary
from zexport.store.files import reading, version
from zexport.store.folders import (
    child_folders,
    exists,
    is_file,
    is_link,
    is_mount,
    leaves,
    real,
    subfolders,
)
from zexport.store.versions import Version

_OF_ONE = re.compile(r"(checkpoint|ckpt|(global_?)?step|iter(ation)?|epoch)s?[-_=]?\d.*", re.I)
"""Names of folders made for one checkpoint; a number alone, or a date, may be a run's."""

OF_A_RESUME = re.compile(
    r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl|(scheduler|sampler|optimizer)(_\d+)?\.(pt|bin)"
    r"|scaler\.pt"
)
"""What frameworks keep for a resume alone, beside the rank files.

Source: transformers 5.23, ``trainer.py`` (``_save_rng_state``, ``_save_optimizer_and_scheduler``),
accelerate 1.15, ``checkpointing.py``.
"""

_WRAPPING = (Framework.HF_TRAINER, Framework.ACCELERATE, Framework.LIGHTNING)
_OWN_TAGS = (Framework.ZEXPORT, Framework.OPENRLHF)


class Place(Struct, frozen=True):
    """A checkpoint's own folder, all of it or what one node has of it.

    Attributes:
        folder: the folder that is this checkpoint alone.
        tag_dir: the one with the rank files, which may be the same.
    """

    folder: Path
    tag_dir: Path

    @property
    def target(self) -> Path:
        """What the folder is called once it is pruned."""
        return pruned_name(self.folder)

    @property
    def original_tag(self) -> str:
        """The tag that its rank files were saved under."""
        return original_name(self.tag_dir.name)

    @property
    def is_renamed(self) -> bool:
        """Whether it is called so already."""
        return self.folder == self.target

    @property
    def renamed(self) -> Place:
        """The same under that name."""
        return Place(self.target, self.target / self.tag_dir.relative_to(self.folder))

    def versions(self) -> dict[Path, Version]:
        """The versions of all its files, by their paths within it."""
        files = (path for path in leaves(self.folder) if is_file(path))
        return {path.relative_to(self.folder): version(path) for path in files}


def place_of(path: Path, tag: str | None) -> Place:
    """The checkpoint that a path and a tag mean; one that was renamed is found by its old name."""
    if is_link(path):
        raise _refused(path, "is a link or a mount point", "Name the folder itself")
    if not exists(path):
        renamed = (pruned_name(path), pruned_name(path.parent) / path.name)
        path = next(filter(exists, renamed), path)
    location = locate(path, tag)
    is_wrapped = _is_wrapped(location)
    if is_wrapped and len(location.tags) > 1:
        raise UnsupportedError(
            "holds several tags, of which one alone cannot be pruned",
            path=location.root,
            found=some(location.tags),
            hint="Move those that are not needed elsewhere",
        )
    return Place(location.root if is_wrapped else location.tag_dir, location.tag_dir)


def _is_wrapped(location: Location) -> bool:
    """Whether a folder was made around the tag for this checkpoint alone."""
    if list_run_checkpoints(location.root):
        return False  # it is a run's own, which may hold a tag beside its checkpoints
    if location.framework is Framework.LIGHTNING:
        return True
    is_named = _OF_ONE.fullmatch(original_name(location.root.name)) is not None
    is_alone = location.framework not in _OWN_TAGS and len(location.tags) == 1
    return is_named and (is_alone or location.framework in _WRAPPING)


def is_one_checkpoint(folder: Path) -> bool:
    """Whether a framework has made a folder for one checkpoint: it is no run's."""
    tags = list_tags(folder)
    if len(tags) != 1:
        return False
    location = locate(folder, tags[0])
    return location.framework in _WRAPPING and _is_wrapped(location)


def check_prunable(place: Place, *others: Place, is_pruned: bool) -> None:
    """Refuse a checkpoint that a training goes on from, or may.

    Args:
        place: where it lies.
        others: where the other nodes' parts of it lie.
        is_pruned: whether no training can go on from it any more.

    Raises:
        OutputError: with the reason.
    """
    for folder in (place.folder, place.tag_dir):
        if is_link(folder) or is_mount(folder):
            raise _refused(folder, "is a link or a mount point", "Name the folder itself")
    _check_own(place)
    if not place.is_renamed and exists(place.target):
        hint = "Remove that, or move it elsewhere"
        why = f"would be called `{place.target.name}`, as an older save is that was pruned"
        raise _refused(place.folder, why, hint)
    if not is_pruned:
        _check_not_needed(place, others)


def _check_own(place: Place) -> None:
    """Refuse a folder below which something lies that is not its own."""
    folder = place.folder
    with reading(folder):
        within = Boundary.of(folder)
        mounts = [path for path, _ in subfolders(folder) if is_mount(path)]
        links = [path for path in leaves(folder) if is_link(path) and not within.holds(path)]
    for found, what in ((mounts, "a mount point"), (links, "a link that leads elsewhere")):
        if found:
            why = f"holds {what}, `{found[0].relative_to(folder)}`"
            raise _refused(folder, why, "Put the files themselves there, or remove it")


def _check_not_needed(place: Place, parts: Sequence[Place]) -> None:
    folder, run = place.folder, place.folder.parent
    nodes = [one.folder.parent for one in parts]
    name = original_name(folder.name)
    within = Boundary.of(run)
    own = sighting(run, folder.name, within)
    is_begun = any(one.is_renamed for one in (place, *parts))
    if not is_begun and (lacks := own.lacks(None, *nodes)):
        raise _refused(folder, f"may still be being written: {lacks}", "Wait until it is complete")
    rest = (one for one in look(run, within) if one.name != own.name)
    others = [one for one in rest if one.is_resumable(*nodes)]
    newest = newest_of([own, *others], within, 1)
    if own.name in newest:
        hint = "Wait for the next one; to end the run for good, remove it yourself"
        raise _refused(folder, "is the newest complete checkpoint of its run", hint)
    if name in [read_latest(run, latest) for latest in LATEST]:
        hint = "Have `latest` name another tag first"
        raise _refused(folder, "is what `latest` names: a training would go on from it", hint)
    if name in best_names(run, [one for one in others if one.name in newest]):
        hint = "A Trainer loads it at the end; prune it when the training has ended"
        raise _refused(folder, "is the best checkpoint, says the Trainer", hint)
    if link := link_to(folder):
        hint = "Remove the link, or have it lead elsewhere first"
        raise _refused(folder, f"is what the link `{link.name}` of its run leads to", hint)


def newest_of(complete: list[Sighting], boundary: Boundary, count: int) -> set[str]:
    """The names of the newest checkpoints: a training may take them."""
    return newest((Age(one.name, one.step(boundary), one.written_ns) for one in complete), count)


def link_to(folder: Path) -> Path | None:
    """A link beside a folder that leads to it, or into it."""
    target = real(folder)
    with reading(folder.parent):
        links = [path for path, is_link in child_folders(folder.parent) if is_link]
    return next((link for link in links if real(link).is_relative_to(target)), None)


def _refused(path: Path, why: str, hint: str) -> OutputError:
    return OutputError(f"is not pruned: it {why}", path=path, hint=hint)
