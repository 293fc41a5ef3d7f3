"""Which folder is meant: from any level a user may hand over to one tag folder.

The levels, from the top: a run's ``output_dir`` (holding ``checkpoint-N`` folders, and perhaps tags
beside them), the folder with ``latest`` and the tags (which ``checkpoint-N`` is, too), and a tag
folder with the rank files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from zexport.checkpoint.candidates import (
    Candidate,
    are_of_one_run,
    are_tied,
    beside,
    is_age,
    is_tag_dir,
    list_ages,
    list_candidates,
    list_run_checkpoints,
    list_runs,
    list_tags,
    models_of_accelerate,
)
from zexport.checkpoint.location import (
    LATEST,
    NEWEST,
    Location,
    TagChoice,
    check_child_name,
    location_of,
    read_latest,
)
from zexport.checkpoint.pruned import original_name, pruned_name
from zexport.errors import (
    AmbiguousTagError,
    CheckpointError,
    NoSuchTagError,
    NotACheckpointError,
    OtherTagError,
    UsageError,
)
from zexport.filenames import ADAPTER_FILE, WEIGHTS_IN_ORDER
from zexport.printable import some
from zexport.store.address import Address
from zexport.store.boundary import Boundary
from zexport.store.files import reading
from zexport.store.folders import absolute, child_folders, exists, is_file, is_folder, matching
from zexport.store.publish import check_finished

_NUMBERS = re.compile(r"\d+")
_CHECK = "Check the path and its permissions"
_GIVE_FOLDER = "Give a run's folder, checkpoint-N in it, or the folder that holds `latest`"
_FINISHED = (*WEIGHTS_IN_ORDER, ADAPTER_FILE, "adapter_model.bin")
"""What says that a model, or an adapter, is there as it is loaded."""


def locate(path: Path, tag: str | None = None, *, follow_symlinks: bool = False) -> Location:
    """The tag folder that ``path`` and ``tag`` mean.

    The tag comes from ``tag``, else from the level given, else from ``latest``, else it is the only
    one there. ``latest`` names a child of its own folder and nothing else; ``tag`` a tag in
    ``path``, a checkpoint of the run there, or a tag that only one of those holds. Links lead to
    somewhere below ``path``, unless ``follow_symlinks`` lets them lead anywhere.
    """
    with reading(path, hint=_CHECK):
        path = _folder(path)
        boundary = Boundary.of(path, follow=follow_symlinks)
        if is_tag_dir(path):
            return _handed_over(path, tag, boundary)
        has_tags = bool(list_tags(path)) or is_file(path / LATEST[0])
        if not has_tags:
            _check_any(path, tag)
        if tag is not None:
            return _named(path, tag, boundary)
        if has_tags:
            return _in_root(path, boundary)
        return _in_run(path, boundary)


def locate_all(path: Path, *, follow_symlinks: bool = False) -> tuple[Location, ...]:
    """Every tag folder of one run at or below ``path``, newest first, as steps and names tell."""
    with reading(path, hint=_CHECK):
        path = _folder(path)
        boundary = Boundary.of(path, follow=follow_symlinks)
        if is_tag_dir(path):
            return (_handed_over(path, None, boundary),)
        tags = list_tags(path)
        if not tags:
            _check_any(path)
            _check_one_run(path)
        for root in (path, *(path / run for run in list_ages(path))):
            _check_one_model(root, list_tags(root))
        return tuple(
            location_of(one.root, tag, TagChoice.NEWEST, boundary)
            for one in reversed(list_candidates(path, boundary))
            for tag in reversed(one.tags)
        )


def locate_named(path: Path, tag: str, *, follow_symlinks: bool = False) -> tuple[Location, ...]:
    """Every tag of that name, wherever in a run it lies."""
    with reading(path, hint=_CHECK):
        path = _folder(path)
        boundary = Boundary.of(path, follow=follow_symlinks)
        check_child_name(tag, path / tag, UsageError)
        above = (path, *(child for child, _ in child_folders(path)))
        runs = [top / run for top in above for run in list_run_checkpoints(top)]
        return tuple(
            location_of(root, tag, TagChoice.OPTION, boundary)
            for root in dict.fromkeys((path, *runs))
            if is_tag_dir(root / tag)
        )


def _folder(path: Path) -> Path:
    path = absolute(path)  # not resolve(): messages should say what the user wrote
    check_finished(path, NotACheckpointError)
    if not is_folder(path):
        what = "is a file, not a checkpoint folder" if exists(path) else "does not exist"
        pruned = pruned_name(path)
        hint = f"It was pruned: give {pruned}" if exists(pruned) else _instead(path)
        raise NotACheckpointError(what, path=path, hint=hint)
    return run_folder(path)


def _instead(path: Path) -> str:
    """What to give in place of what is no folder: what lies beside it under a like name."""
    names = list[str]()
    if isinstance(path, Address):
        return _GIVE_FOLDER
    above = next(parent for parent in path.parents if is_folder(parent))
    with suppress(PermissionError):
        names = sorted(child.name for child, _ in child_folders(above))
    wanted, *below = path.relative_to(above).parts
    near = _nearest(wanted, names)
    meant = above.joinpath(near or "", *below)
    if near is None or (below and not is_folder(meant)):
        return _GIVE_FOLDER
    return f"Did you mean {meant}? {_GIVE_FOLDER}"


def _meant(tag: str, names: Sequence[str]) -> str | None:
    """The one of these that was likely meant by a name: none of another number."""
    numbers = _NUMBERS.findall(tag)
    same = [one for one in names if _NUMBERS.findall(one) == numbers]
    return same[0] if numbers and len(same) == 1 else _nearest(tag, same)


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """The most alike of these, if any is."""
    import difflib  # noqa: PLC0415 - who names what is there needs it not

    return next(iter(difflib.get_close_matches(name, names, 1)), None)


def run_folder(path: Path) -> Path:
    """The folder with a run's checkpoints: itself, or ``checkpoints`` in Accelerate's project.

    Source: Accelerate 1.15, ``accelerator.py`` (``save_state`` with automatic names:
    ``<project_dir>/checkpoints/checkpoint_<n>``).
    """
    inner = path / "checkpoints"
    is_project = (
        not is_tag_dir(path)
        and not list_run_checkpoints(path)
        and not (list_tags(path) or is_file(path / LATEST[0]))
        and bool(is_folder(inner) and list_run_checkpoints(inner))
    )
    return inner if is_project else path


def _handed_over(path: Path, tag: str | None, boundary: Boundary) -> Location:
    if tag not in (None, path.name, original_name(path.name)):
        raise OtherTagError(
            "is a tag folder itself, and --tag names another",
            path=path,
            found=tag,
            hint="Leave out --tag, or give the folder that has that tag",
        )
    boundary = boundary.including(path.parent)
    return location_of(path.parent, path.name, TagChoice.HANDED_OVER, boundary)


def _named(path: Path, tag: str, boundary: Boundary) -> Location:
    """The tag of that name, or what is meant in the checkpoint of that name, below ``path``."""
    check_child_name(tag, path / tag, UsageError)
    tag = beside(path / tag) or tag
    if not exists(path / tag) and exists(pruned := pruned_name(path / tag)):
        tag = pruned.name
    if is_tag_dir(path / tag):
        return location_of(path, tag, TagChoice.OPTION, boundary)
    runs = list_run_checkpoints(path)
    if tag in runs:
        return _in_root(path / tag, boundary)
    holders = [run for run in list_ages(path) if is_tag_dir(path / run / tag)]
    if len(holders) > 1:
        raise AmbiguousTagError(
            f"holds the tag {tag!r} in several checkpoints",
            path=path,
            found=", ".join(holders),
            hint=f"Give the one that you mean, for example {path / holders[-1]}",
        )
    if holders:
        return location_of(path / holders[0], tag, TagChoice.OPTION, boundary)
    there = [*list_tags(path), *runs]
    near = _meant(tag, [*there, NEWEST])
    raise NoSuchTagError(
        f"has no tag or checkpoint {tag!r}",
        path=path,
        found=_listed(there),
        hint=f"Did you mean --tag {near}?" if near else "Choose one of these, or --tag newest",
    )


def _in_run(path: Path, boundary: Boundary) -> Location:
    """Descend from a run's ``output_dir`` into its only checkpoint."""
    runs = list_run_checkpoints(path)
    if len(runs) > 1:
        raise AmbiguousTagError(
            "holds several checkpoints",
            path=path,
            found=", ".join(runs),
            hint="Choose one with --tag" + _example(list_candidates(path, boundary)),
        )
    return _in_root(path / runs[0], boundary)


def _in_root(root: Path, boundary: Boundary) -> Location:
    """The tag that ``latest`` names, or the only one."""
    tags = list_tags(root)
    _check_one_model(root, tags)
    for name in LATEST:
        boundary.check(root / name)
    latest = next(filter(None, (read_latest(root, name) for name in LATEST)), None)
    if latest is not None and is_tag_dir(root / latest):
        return location_of(root, latest, TagChoice.LATEST, boundary)
    if latest is None and len(tags) == 1:
        return location_of(root, tags[0], TagChoice.ONLY, boundary)
    candidates = list_candidates(root, boundary)
    names = [one.name for one in candidates]
    if latest is not None:
        raise CheckpointError(
            f"names the tag {latest!r}, which is not there",
            path=root / "latest",
            found=_listed(names),
            hint=f"Export another with --tag {names[-1]}" if names else "Copy the tag folder again",
        )
    raise AmbiguousTagError(
        "has several tags and no `latest`",
        path=root,
        found=_listed(names),
        hint="Choose one with --tag" + _example(candidates),
    )


def _example(candidates: Sequence[Candidate]) -> str:
    """The newest as an example, unless another is of its step and may be meant as well."""
    if not candidates:
        return ""
    *others, newest = candidates
    folder = newest.root / newest.tags[-1]
    tied = newest.step is not None and any(
        one.step == newest.step and are_tied(one.root / one.tags[-1], folder) for one in others
    )
    return "" if tied else f", for example --tag {newest.name} or --tag newest"


def _check_any(path: Path, tag: str | None = None) -> None:
    """Refuse a folder without tags that holds no folder with tags either, or whole runs."""
    checkpoints = list_run_checkpoints(path)
    if tag not in checkpoints and (runs := runs_in(path)):
        names = [*sorted(runs), *sorted(checkpoints)]
        raise AmbiguousTagError(
            "holds the folders of whole runs, and is no run itself",
            path=path,
            found=_listed(names),
            hint=f"Give one of them, for example {path / names[0]}",
        )
    if checkpoints:
        return
    if finished := _finished(path):
        raise NotACheckpointError(
            "holds a finished model, no ZeRO checkpoint",
            path=path,
            found=finished.relative_to(path),
            hint="Load it as it is; if its weights are empty placeholders (ZeRO-3 without "
            "gathering), give the folder with the tags",
        )
    raise NotACheckpointError(
        "holds no ZeRO checkpoint",
        path=path,
        found="neither *_optim_states.pt nor *_model_states.pt in it, nor two levels below it",
        expected="`latest` and a tag folder such as global_step100",
        hint="Give the folder that DeepSpeed's save_checkpoint wrote to",
    )


def runs_in(path: Path) -> tuple[str, ...]:
    """Names of the runs in a folder that is neither a run nor holds tags itself."""
    is_run = bool(list_tags(path)) or any(map(is_age, list_run_checkpoints(path)))
    return () if is_run else list_runs(path)


def _finished(path: Path) -> Path | None:
    """A file with the weights of a finished model in a folder, or in ``checkpoint-N`` there."""
    folders = (path, *matching(path, "checkpoint-*"))
    files = (folder / name for folder in folders for name in _FINISHED)
    return next((file for file in files if is_file(file)), None)


def _check_one_run(path: Path) -> None:
    """Refuse to order folders of several models: none of them is the newer."""
    runs = list_run_checkpoints(path)
    if not are_of_one_run(runs):
        raise AmbiguousTagError(
            "holds several checkpoints, none of which is the newest by its name",
            path=path,
            found=", ".join(runs),
            expected="names that tell of their age alone, such as checkpoint-100 and final",
            hint="Choose one with --tag",
        )


def _check_one_model(root: Path, tags: Sequence[str]) -> None:
    """Refuse to choose between models that were saved together: none of them is the newer."""
    models = models_of_accelerate(tags)
    if len(models) > 1:
        raise AmbiguousTagError(
            "holds several models, which Accelerate saved together",
            path=root,
            found=_listed(models),
            hint="Choose one with --tag",
        )


def _listed(names: Sequence[str]) -> str:
    return some(names) if names else "no tag folder"
