"""Which checkpoint of a run may be pruned; everything else is refused."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from msgspec import Struct

from zexport.checkpoint.resolve import (
    LATEST,
    Framework,
    Location,
    list_run_checkpoints,
    list_tags,
    locate,
    original_name,
    pruned_name,
    read_latest,
)
from zexport.checkpoint.state import TrainingState
from zexport.errors import OutputError, UnsupportedError, UsageError, VerificationError
from zexport.export.manifest import Manifest
from zexport.export.overwrite import real_path
from zexport.filenames import MANIFEST_NAME
from zexport.formats.pickle_view import PickleView
from zexport.monitor.best import best_names
from zexport.monitor.newest import Age, newest
from zexport.monitor.sightings import TRAINER_STATE, Sighting, look, sighting
from zexport.options import ExportOptions
from zexport.storage.contents import read_json_object
from zexport.storage.files import (
    child_folders,
    exists,
    is_file,
    is_link,
    leaves,
    real,
    subfolders,
    version,
)
from zexport.storage.json import as_table
from zexport.storage.location import is_mount
from zexport.storage.os_errors import reading
from zexport.storage.storage import Version
from zexport.storage.symlink_policy import Boundary
from zexport.text import some

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


def check_prunable(
    place: Place, *others: Place, opened: TrainingState, even_newest: bool, is_last: bool
) -> None:
    """Raise if a checkpoint may still change, or if a training would resume from it.

    Args:
        place: where it lies.
        others: where the other nodes' parts of it lie.
        opened: what all parts hold; once it is pruned, no training can resume from it.
        even_newest: accept that a training would resume from it.
        is_last: read the checkpoint that a resume would use instead, too.

    Raises:
        OutputError: its folder may not be changed.
        UsageError: a training would resume from it.
    """
    for folder in (place.folder, place.tag_dir):
        if is_link(folder) or is_mount(folder):
            raise _refused(folder, "is a link or a mount point", "Name the folder itself")
    _check_own(place)
    if not place.is_renamed and exists(place.target):
        hint = "Remove that, or move it elsewhere"
        why = f"would be called `{place.target.name}`, as an older save is that was pruned"
        raise _refused(place.folder, why, hint)
    if opened.pruned_files:
        return
    run, nodes = place.folder.parent, [one.folder.parent for one in others]
    own = sighting(run, place.folder.name, Boundary.of(run))
    is_begun = any(one.is_renamed for one in (place, *others))
    if not is_begun and (lacks := own.lacks(None, *nodes)):
        why = f"may still be being written: {lacks}"
        raise _refused(place.folder, why, "Wait until it is complete")
    if even_newest:
        return
    for why in _reasons(place, _saved(own, opened), nodes, is_last=is_last):
        raise UsageError(
            f"is not pruned: {why}",
            path=place.folder,
            hint="If no training will resume from it, pass --even-newest",
        )


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


class _Saved(Struct, frozen=True):
    """A checkpoint of a run.

    Attributes:
        seen: its files.
        opened: what they hold.
        step: the step that its Trainer's state records, or else its rank files.
        model: its name without its step: equal for checkpoints of one model.
    """

    seen: Sighting
    opened: TrainingState
    step: int
    model: str


def _saved(seen: Sighting, opened: TrainingState) -> _Saved:
    """Return a checkpoint; a number in its name is a step, or an epoch, if its files record it."""
    state, name = seen.folder / TRAINER_STATE, original_name(seen.name)
    of_trainer = read_json_object(state).get("global_step") if is_file(state) else None
    step = of_trainer if isinstance(of_trainer, int) else opened.global_steps or 0
    saved = opened.whole.states
    root = saved.root if saved else PickleView(seen.tag_dir, "model states", {})
    if (epoch := root.get("epoch").number_or(None)) is not None:
        name = re.sub(rf"epoch={epoch}(?!\d)", "epoch=#", name)
    steps = {of_trainer, opened.global_steps, root.get("global_step").number_or(None)}
    at = [found for found in re.finditer(r"\d+", name, re.ASCII) if int(found[0]) in steps]
    model = f"{name[: at[-1].start()]}#{name[at[-1].end() :]}" if at else name
    return _Saved(seen, opened, step, model)


def _reasons(place: Place, own: _Saved, nodes: Sequence[Path], *, is_last: bool) -> Iterator[str]:
    """Yield why a training would resume from a checkpoint; each holds only if none before does."""
    run, name = own.seen.run, original_name(own.seen.name)
    latest = {read_latest(run, one) for one in LATEST}
    if name in latest:
        yield "`latest` names it"
    if link := link_to(place.folder):
        yield f"the link `{link.name}` leads to it"
    rest = [one for one in look(run, Boundary.of(run)) if one.name != own.seen.name]
    opened = ((one, one.opened_to_resume(*nodes)) for one in rest)
    usable = [_saved(one, found) for one, found in opened if found is not None]
    same = [one for one in usable if one.model == own.model]
    same.sort(key=lambda one: (one.step, one.seen.written_ns))
    if not same or own.step >= same[-1].step:
        yield "it is the newest complete checkpoint of its model"
    by_time = [max(ones, key=lambda one: one.seen.written_ns).seen for ones in (same, usable)]
    if own.seen.written_ns >= by_time[0].written_ns:
        yield "it is the newest complete checkpoint of its model by the time of its files"
    if name in best_names(run, [same[-1].seen, *by_time]):
        yield "it is the best checkpoint of its run"
    if is_last:
        yield from _unusable_instead(place, rest, usable, latest, same[-1])


def _unusable_instead(
    place: Place,
    rest: Sequence[Sighting],
    usable: Sequence[_Saved],
    latest: Container[str | None],
    newest: _Saved,
) -> Iterator[str]:
    """Yield why a training could not resume from the checkpoint that it would use instead."""
    if place.folder == place.tag_dir:
        named = next((one.name for one in rest if one.name in latest), newest.seen.name)
        found = next((one for one in usable if one.seen.name == named), None)
        if found is None:
            yield f"`latest` names {named}, from which no training can resume"
        newest = found or newest
    if damaged := _damaged_file(newest.opened):
        yield f"a training would resume from {newest.seen.name}, and {damaged} is damaged"


def _damaged_file(opened: TrainingState) -> Path | None:
    """Return a file that has a record whose CRC-32 is wrong: ``torch.load`` checks none."""
    for path in (one.path for one in opened.torch_files):
        with reading(path):
            if is_zipfile(path):
                with ZipFile(path) as content:
                    if content.testzip() is not None:
                        return path
    return None


def newest_of(complete: list[Sighting], boundary: Boundary, count: int) -> set[str]:
    """The names of the newest checkpoints: a training may take them."""
    return newest((Age(one.name, one.step(boundary), one.written_ns) for one in complete), count)


def link_to(folder: Path) -> Path | None:
    """A link beside a folder that leads to it, or into it."""
    target = real(folder)
    with reading(folder.parent):
        links = [path for path, is_link in child_folders(folder.parent) if is_link]
    return next((link for link in links if real(link).is_relative_to(target)), None)


def check_apart(places: Sequence[Place], out: Path) -> None:
    """Refuse an export that lies in the checkpoint that it is to stand for."""
    for one in places:
        if real_path(out).is_relative_to(real_path(one.folder)):
            raise OutputError(
                "lies in the checkpoint that it is to stand for",
                path=out,
                hint="Move it out of there first",
            )


def check_stands_for(out: Path, manifest: Manifest, opened: TrainingState) -> None:
    """Raise unless an export was made from all of this checkpoint, without accepted findings.

    Raises:
        OutputError: it lacks something.
        VerificationError: it was made from another tag or step, or has no export's manifest.
    """
    told = manifest.provenance
    try:
        options = ExportOptions.from_recorded(told.get("options"))
    except ValueError as cause:
        raise VerificationError(
            "is not the manifest of an export", path=out / MANIFEST_NAME, found=cause
        ) from cause
    record = as_table(told.get("checkpoint"))
    tag = original_name(str(record.get("tag")))
    made_from = f"tag {tag}, step {record.get('global_steps')}"
    own = f"tag {original_name(opened.location.tag)}, step {opened.global_steps}"
    if made_from != own:
        raise VerificationError(
            "was made from another checkpoint",
            path=out,
            found=made_from,
            expected=own,
            hint="Export this checkpoint",
        )
    why = "without frozen weights" if options.exclude_frozen else ""
    if options.allow or any(one.accepted for one in manifest.findings):
        why = "with --allow"
    if why:
        raise OutputError(
            f"cannot stand for the checkpoint: it was exported {why}",
            path=out,
            hint="Export it again without that",
        )


def _refused(path: Path, why: str, hint: str) -> OutputError:
    return OutputError(f"is not pruned: it {why}", path=path, hint=hint)
