"""Which checkpoint of a run may be pruned, and by which export; everything else is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from zexport.beside.best import best_names
from zexport.beside.newest import Age, newest
from zexport.beside.sightings import Sighting, look, sighting
from zexport.checkpoint.candidates import list_run_checkpoints, list_tags
from zexport.checkpoint.find import locate
from zexport.checkpoint.location import LATEST, Framework, Location, read_latest
from zexport.checkpoint.pruned import NOTES, original_name, pruned_name
from zexport.checkpoint.rank_files import parse_rank_file
from zexport.errors import OutputError, UnsupportedError, VerificationError
from zexport.filenames import MANIFEST_NAME, SOURCE_SIDECAR
from zexport.options import AdapterMode, ExportDType, ExportOptions
from zexport.printable import some
from zexport.run.manifest import Manifest
from zexport.store.boundary import Boundary
from zexport.store.files import reading, version
from zexport.store.folders import (
    child_folders,
    exists,
    is_file,
    is_folder,
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

_OF_THE_STATE = re.compile(
    r"(adapter_|pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|trainer_state\.json|training_args\.bin|zero_to_fp32\.py|latest(_universal)?"
)
"""What frameworks write with every save: weights that the rank files hold, and words on the state.

What a program has a framework save for it (``custom_checkpoint_0.pkl``) may be found nowhere else.
"""

_OWN_FILES = (*NOTES, MANIFEST_NAME, SOURCE_SIDECAR)
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
        raise _refused(place.target, "is in the way: an older save was pruned", hint)
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


def check_nothing_else(place: Place, out: Path, manifest: Manifest) -> None:
    """Refuse to remove a folder with files that are no training's, and that no export has.

    Raises:
        OutputError: with their names.
    """
    tag = place.tag_dir.relative_to(place.folder)
    files = [path for path in leaves(place.folder) if not (is_folder(path) or is_link(path))]
    more = [path for path in files if not _is_accounted_for(path, place, manifest)]
    if more:
        named = (path.relative_to(place.folder) for path in more)
        tops = (one if one.parent in (tag, Path()) else f"{one.parts[0]}/" for one in named)
        raise OutputError(
            f"is not removed: it holds what is no part of a training's state, and not in {out}",
            path=place.folder,
            found=some([*dict.fromkeys(map(str, tops))], 5),
            hint="Move it elsewhere first; what belongs to the model: export the checkpoint again",
        )


def _is_accounted_for(path: Path, place: Place, manifest: Manifest) -> bool:
    """Whether a file is of the training's state, or lies in the export as well."""
    if path.parent == place.tag_dir and parse_rank_file(path) is not None:
        return True
    if path.is_relative_to(place.tag_dir / "zero"):
        return path.suffix == ".pt"  # of a universal checkpoint
    above = (place.tag_dir, place.folder)
    names = (path.relative_to(one).as_posix() for one in above if path.is_relative_to(one))
    if any(name in manifest.files for name in names):
        return True
    own = (OF_A_RESUME, _OF_THE_STATE)
    is_own = any(one.fullmatch(path.name) for one in own) or path.name in _OWN_FILES
    return is_own and path.parent in above


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


def check_stands_for(out: Path, manifest: Manifest, *, delete: bool) -> None:
    """Refuse an export that lacks something of a checkpoint, or was made in spite of a finding.

    Args:
        out: its folder.
        manifest: what that says.
        delete: whether nothing else will be left of the checkpoint.

    Raises:
        OutputError: with the reason.
        VerificationError: the manifest is none of an export.
    """
    told = manifest.provenance
    try:
        options = ExportOptions.from_recorded(told.get("options"))
    except ValueError as cause:
        raise VerificationError(
            "is not the manifest of an export", path=out / MANIFEST_NAME, found=cause
        ) from cause
    reasons = [*_lacking(manifest, options), *(_incomplete(manifest, options) if delete else ())]
    if reasons:
        raise OutputError(
            f"cannot stand for the checkpoint: {reasons[0]}",
            path=out,
            hint="Export it again without that" + (", as fp32" if delete else ""),
        )


def _lacking(manifest: Manifest, options: ExportOptions) -> Iterator[str]:
    if options.exclude_frozen:
        yield "it was exported without frozen weights"
    if options.allow or any(one.accepted for one in manifest.findings):
        yield "it was exported with --allow"


def _incomplete(manifest: Manifest, options: ExportOptions) -> Iterator[str]:
    """Why an export does not hold everything that can be exported, as the checkpoint has it."""
    if options.dtype is not ExportDType.FP32:
        yield f"its weights are rounded ({options.dtype.value}), the checkpoint's are fp32"
    if options.only:
        yield "it holds one part of the module alone"
    if options.adapter is not AdapterMode.AUTO:
        yield "it holds the adapter alone, or merged into its base"
    accounting = manifest.provenance.get("accounting")
    if not isinstance(accounting, dict) or accounting.get("left_out") != 0:
        yield "weights were left out of it"
