"""The files around the weights: in which folders config, tokenizer and their kin are found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zexport.errors import DamagedCheckpointError, NotACheckpointError
from zexport.model.config import ConfigFile
from zexport.model.side_files import (
    Files,
    config_code,
    license_files,
    present,
    processor_files,
    sentence_transformers_files,
    tokenizer_files,
)
from zexport.store.boundary import Boundary
from zexport.store.json import Json, JsonObject, read_json_object

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_README = "README.md"
_CARD_NBYTES_MAX = 64 << 10
_SOURCE_SIDECAR = "zexport_source.json"
_COPIED_NBYTES_MAX = 1 << 30
_OWN_FOLDERS = Boundary(())


@dataclass(frozen=True, slots=True)
class Sidecars:
    """What was found around the weights.

    Attributes:
        config: the model's config, if any.
        source: content of the sidecar that `zexport train` writes, if any.
        copied: the other files to copy, by their name in the output.
        missing: what is nowhere, in words.
        base: the folder that was given for what the checkpoint lacks, links followed.
        base_card: the metadata of its model card.
    """

    config: ConfigFile | None
    source: Mapping[str, Json] | None
    copied: Mapping[str, Path]
    missing: tuple[str, ...]
    base: Path | None
    base_card: str = ""


def find_sidecars(
    root: Path, base: Path | None = None, boundary: Boundary = _OWN_FOLDERS
) -> Sidecars:
    """The files that belong to the checkpoint in ``root``.

    Each kind comes whole from the first folder that has it: ``root``, its parent (the Hugging Face
    Trainer's ``output_dir``), ``base``. Kinds are never mixed from two folders. A model card is
    kept where it lies in ``root`` itself, and licences are those of ``root``, else of ``base``:
    what lies above a checkpoint may be about anything. A link leads to somewhere in the folder that
    it lies in, or within ``boundary``.
    """
    if base is not None and not base.is_dir():
        raise NotACheckpointError("is no folder", path=base, hint="Give --base a model folder")
    given = [] if base is None else [base]
    folders = [root, root.parent, *given]
    config = _find_config(root, folders, boundary)
    tokenizer = tokenizer_files(folders)
    copied = _first_of(present(folder, (_GENERATION_CONFIG,)) for folder in folders)
    copied |= sentence_transformers_files(folders)
    copied |= _first_of(license_files(folder) for folder in (root, *given))
    copied |= present(root, (_README,))
    if config is not None:
        copied |= config_code([config.path.parent, *folders], config.content)
    copied |= processor_files(folders) | tokenizer
    _check_links(copied.values(), (root, *given, root.parent), boundary)
    _check_sizes(copied)
    missing = tuple(
        word for word, found in (("config.json", config), ("a tokenizer", tokenizer)) if not found
    )
    return Sidecars(
        config,
        _read_source_sidecar(root, boundary),
        copied,
        missing,
        base=None if base is None else base.resolve(),
        base_card="" if base is None else read_card(base),
    )


def read_card(folder: Path) -> str:
    """The metadata of a folder's model card: the lines between its first two ``---``."""
    path = folder / _README
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        text = file.read(_CARD_NBYTES_MAX).decode(errors="replace")
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text.lstrip("\ufeff"), re.DOTALL)
    return found[1] if found else ""


def _first_of(found: Iterable[Files]) -> Files:
    return next(filter(None, found), {})


def _check_links(paths: Iterable[Path], folders: Sequence[Path], boundary: Boundary) -> None:
    """Refuse a file that leads out of the first of the folders that it lies in."""
    within = {folder: boundary.including(folder) for folder in folders}
    for path in paths:
        next(within[folder] for folder in folders if path.is_relative_to(folder)).check(path)


def _check_sizes(files: Files) -> None:
    for path in files.values():
        if (nbytes := path.stat().st_size) > _COPIED_NBYTES_MAX:
            raise DamagedCheckpointError(
                "is too large for a file of its kind",
                path=path,
                found=f"{nbytes} bytes",
                expected=f"{_COPIED_NBYTES_MAX} or fewer",
                hint="Mend or remove the file",
            )


def _find_config(root: Path, folders: Sequence[Path], boundary: Boundary) -> ConfigFile | None:
    for folder in folders:
        path = folder / _CONFIG
        if path.is_file():
            boundary.including(folder).check(path)
            content = _read_config(path, is_the_models=folder != root.parent)
            if "model_type" in content or "architectures" in content:
                return ConfigFile(path, content)
    return None


def _read_config(path: Path, *, is_the_models: bool) -> JsonObject:
    """What a config says; nothing for an unreadable one above the checkpoint: it may be any."""
    try:
        return read_json_object(path)
    except DamagedCheckpointError:
        if is_the_models:
            raise
        return {}


def _read_source_sidecar(root: Path, boundary: Boundary) -> Mapping[str, Json] | None:
    path = root / _SOURCE_SIDECAR
    boundary.including(root).check(path)
    return read_json_object(path) if path.is_file() else None
