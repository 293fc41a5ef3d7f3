"""Which folder is meant: from any level a user may hand over to one tag folder.

The levels, from the top: a run's ``output_dir`` (holding ``checkpoint-N`` folders, and perhaps tags
beside them), the folder with ``latest`` and the tags (which ``checkpoint-N`` is, too), and a tag
folder with the rank files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zexport.checkpoint.candidates import (
    are_of_one_run,
    is_tag_dir,
    list_ages,
    list_candidates,
    list_run_checkpoints,
    list_tags,
    models_of_accelerate,
)
from zexport.checkpoint.location import (
    Location,
    TagChoice,
    check_child_name,
    location_of,
    read_latest,
)
from zexport.errors import (
    AmbiguousTagError,
    CheckpointError,
    NoSuchTagError,
    NotACheckpointError,
    OtherTagError,
    UsageError,
)
from zexport.store.boundary import Boundary
from zexport.store.folders import absolute, exists, is_file, is_folder, matching

_LATEST = ("latest", "latest_universal")
_FINISHED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
"""What says that a model, or an adapter, is there as it is loaded."""


def locate(path: Path, tag: str | None = None, *, follow_symlinks: bool = False) -> Location:
    """The tag folder that ``path`` and ``tag`` mean.

    The tag comes from ``tag``, else from the level given, else from ``latest``, else it is the only
    one there. ``latest`` names a child of its own folder and nothing else; ``tag`` a tag in
    ``path``, a checkpoint of the run there, or a tag that only one of those holds. Links lead to
    somewhere below ``path``, unless ``follow_symlinks`` lets them lead anywhere.
    """
    with _reading(path):
        path = _folder(path)
        boundary = Boundary.of(path, follow=follow_symlinks)
        if is_tag_dir(path):
            return _handed_over(path, tag, boundary)
        has_tags = bool(list_tags(path)) or is_file(path / _LATEST[0])
        if not has_tags:
            _check_any(path)
        if tag is not None:
            return _named(path, tag, boundary)
        if has_tags:
            return _in_root(path, boundary)
        return _in_run(path, boundary)


def locate_all(path: Path, *, follow_symlinks: bool = False) -> tuple[Location, ...]:
    """Every tag folder of one run at or below ``path``, newest first, as steps and names tell."""
    with _reading(path):
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


def newer_than(location: Location, step: int | None) -> Iterator[str]:
    """Tells of a newer checkpoint of the same run, where the tag was not chosen by the user."""
    if location.chosen not in (TagChoice.LATEST, TagChoice.ONLY) or step is None:
        return
    if not list_ages(location.root):
        return
    candidates = list_candidates(location.root, location.boundary)
    newest = [one for one in candidates if one.root != location.root][-1]
    if newest.step is not None and newest.step > step:
        yield (
            f"{newest.name} beside {location.tag} is of step {newest.step:,}, and this one, which "
            f"is {location.chosen.value}, of step {step:,}: --tag {newest.name} takes that one"
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}",
            path=Path(error.filename) if error.filename else path,
            hint="Check the path and its permissions",
        ) from error


def _folder(path: Path) -> Path:
    path = absolute(path)  # not resolve(): messages should say what the user wrote
    if not is_folder(path):
        what = "is a file, not a checkpoint folder" if exists(path) else "does not exist"
        raise NotACheckpointError(what, path=path, hint="Give the folder that holds `latest`")
    return path


def _handed_over(path: Path, tag: str | None, boundary: Boundary) -> Location:
    if tag not in (None, path.name):
        raise OtherTagError(
            "is a tag folder itself, and --tag names another",
            path=path,
            found=tag,
            hint=f"Leave out --tag, or give {path.parent}",
        )
    boundary = boundary.including(path.parent)
    return location_of(path.parent, path.name, TagChoice.HANDED_OVER, boundary)


def _named(path: Path, tag: str, boundary: Boundary) -> Location:
    """The tag of that name, or what is meant in the checkpoint of that name, below ``path``."""
    check_child_name(tag, path / tag, UsageError)
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
    raise NoSuchTagError(
        f"has no tag {tag!r}",
        path=path,
        found=_listed([*list_tags(path), *runs]),
        hint="Choose one of these",
    )


def _in_run(path: Path, boundary: Boundary) -> Location:
    """Descend from a run's ``output_dir`` into its only checkpoint."""
    runs = list_run_checkpoints(path)
    if len(runs) > 1:
        newest = next((one.name for one in reversed(list_candidates(path, boundary))), None)
        raise AmbiguousTagError(
            "holds several checkpoints",
            path=path,
            found=", ".join(runs),
            hint="Choose one with --tag" + (f", for example --tag {newest}" if newest else ""),
        )
    return _in_root(path / runs[0], boundary)


def _in_root(root: Path, boundary: Boundary) -> Location:
    """The tag that ``latest`` names, or the only one."""
    tags = list_tags(root)
    _check_one_model(root, tags)
    for name in _LATEST:
        boundary.check(root / name)
    latest = next(filter(None, (read_latest(root, name) for name in _LATEST)), None)
    if latest is not None and is_tag_dir(root / latest):
        return location_of(root, latest, TagChoice.LATEST, boundary)
    if latest is None and len(tags) == 1:
        return location_of(root, tags[0], TagChoice.ONLY, boundary)
    names = [one.name for one in list_candidates(root, boundary)]
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
        hint=f"Choose one with --tag, for example --tag {names[-1]}",
    )


def _check_any(path: Path) -> None:
    """Refuse a folder without tags that holds no folder with tags either."""
    if list_run_checkpoints(path):
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
        found="no *_optim_states.pt and no *_model_states.pt at, or up to two levels below",
        expected="`latest` and a tag folder such as global_step100",
        hint="Give the folder that DeepSpeed's save_checkpoint wrote to",
    )


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
            expected="names that differ in a number alone, such as checkpoint-100",
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
    return ", ".join(names) if names else "no tag folder"
