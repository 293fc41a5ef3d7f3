"""Which folder an export may make or replace: looked at before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from zexport.checkpoint.candidates import is_tag_dir, list_run_checkpoints, list_tags
from zexport.errors import DamagedCheckpointError, OutputError
from zexport.run.manifest import MANIFEST_NAME
from zexport.store.disk import writing
from zexport.store.json import read_json_object

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_model.bin")


def real_path(out_dir: Path) -> Path:
    """Where the folder will lie, links followed.

    Raises:
        OutputError: the path begins at a working directory that is not there any more.
    """
    try:
        return Path(os.path.realpath(out_dir))
    except FileNotFoundError as cause:
        raise OutputError(
            "lies in a working directory that was removed",
            path=out_dir,
            hint="Change to a folder that is there",
        ) from cause


def check_place(target: Path, sources: Iterable[Path]) -> None:
    """Refuse a folder that holds where the user is or lives, or that what is read lies in.

    Raises:
        OutputError: it is such a folder.
    """
    for place, what in _inhabited():
        if place.is_relative_to(target):
            raise OutputError(
                f"is or holds {what}, which an export never replaces",
                path=target,
                found=place,
                hint="Choose a folder of its own for the output",
            )
    _check_apart(target, sources)


def _inhabited() -> Iterator[tuple[Path, str]]:
    yield Path(os.path.realpath(Path("~").expanduser())), "your home folder"
    try:
        yield Path.cwd(), "the working directory"
    except FileNotFoundError:
        return  # it was removed: nobody can be hurt there


def _check_apart(target: Path, sources: Iterable[Path]) -> None:
    """Refuse a folder that holds a source, or a checkpoint's own folder and what is below it.

    A model folder given as a base (safetensors) may have an export below it: its files stay as they
    are.
    """
    for folder, is_checkpoint in {(path.parent, path.suffix == ".pt") for path in sources}:
        real = Path(os.path.realpath(folder))
        if real.is_relative_to(target) or (is_checkpoint and target.is_relative_to(real)):
            raise OutputError(
                "would be mixed with the files that are read",
                path=target,
                found=f"sources in {folder}",
                hint="Choose a folder outside the checkpoint",
            )


def check_content(target: Path, *, overwrite: bool) -> None:
    """Refuse what lies at ``target``, unless that is nothing or an older model to be replaced.

    Raises:
        OutputError: it stays.
    """
    with writing(target):
        exists, is_folder, is_mount = target.exists(), target.is_dir(), target.is_mount()
        holds_something = is_folder and any(target.iterdir())
        is_checkpoint = is_folder and _holds_checkpoint(target)
    if exists and not is_folder:
        raise OutputError("is not a folder", path=target, hint="Choose another name")
    if is_mount:
        raise OutputError(
            "is a mount point, which no finished folder can take the place of",
            path=target,
            hint="Choose a folder below it",
        )
    if is_checkpoint:
        raise OutputError(
            "holds a checkpoint, which an export never replaces",
            path=target,
            hint="Choose another name; OUT is the last of the folders",
        )
    if holds_something and not overwrite:
        raise OutputError(
            "exists and is not empty", path=target, hint="Choose another name, or pass --overwrite"
        )
    if holds_something:
        _check_replaceable(target)
        _check_removable(target)


def _holds_checkpoint(folder: Path) -> bool:
    return is_tag_dir(folder) or bool(list_tags(folder) or list_run_checkpoints(folder))


def _check_replaceable(target: Path) -> None:
    """Refuse a folder of folders that is not known for a model's by a file at its top.

    Folders of people's own work have folders in them; what a failed or foreign export has left
    behind has none.
    """
    with writing(target):
        is_model = (
            (target / MANIFEST_NAME).is_file()
            or any(path.match(pattern) for path in target.iterdir() for pattern in _WEIGHTS)
            or _is_model_config(target / "config.json")
            or not any(path.is_dir() for path in target.iterdir())
        )
    if not is_model:
        raise OutputError(
            "holds folders and is no model's, which --overwrite does not replace",
            path=target,
            expected=f"{MANIFEST_NAME}, weights, or a model's config.json in it",
            hint="Choose another name, or remove it yourself",
        )


def _is_model_config(path: Path) -> bool:
    try:
        return "model_type" in read_json_object(path)
    except DamagedCheckpointError:
        return False


def _check_removable(target: Path) -> None:
    """Refuse a folder with one in it that could not be removed once the new one is there."""

    def refuse(cause: OSError) -> None:
        raise _stays(Path(cause.filename), cause.strerror or "it cannot be read") from cause

    for name, folders, files in os.walk(target, onerror=refuse):
        if (folders or files) and not os.access(name, os.W_OK | os.X_OK):
            raise _stays(Path(name), "no permission to empty it")
        if os.path.ismount(name):
            raise _stays(Path(name), "it is a mount point")


def _stays(folder: Path, why: str) -> OutputError:
    return OutputError(
        f"cannot be removed with the older model: {why}",
        path=folder,
        hint="Remove it yourself, or choose another name for the output",
    )
