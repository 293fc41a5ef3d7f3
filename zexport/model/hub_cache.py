"""Models by the hub's name for them, ``owner/name``, and the copies of them on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from zexport.errors import NotACheckpointError
from zexport.store.folders import exists

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_LOCAL = re.compile(
    r"(checkpoints?|ckpts?|models?|outputs?|out|runs?|results?|saves?|saved|data|datasets?|weights|"
    r"pretrained(_models?)?|hf_models?|base|exp|experiments?|logs?|tmp|home|mnt|root|work|workspace)"
    r"/.*|.*/(checkpoint|global_step|step|epoch)[-_]?\d+",
    re.IGNORECASE,
)
"""What looks like the hub's ``owner/name`` and is rather a folder."""


def is_hub_id(name: str) -> bool:
    """Whether a name is the hub's for a model, and not likely to be a folder's."""
    return _HUB_ID.fullmatch(name) is not None and _LOCAL.fullmatch(name) is None


def hub_id_of(folder: Path) -> str | None:
    """The hub's name for the model in a folder of the hub's cache; ``None`` for another folder."""
    found = (_CACHED.fullmatch(part) for part in folder.parts)
    return next((f"{one[1]}/{one[2]}" for one in found if one), None)


def model_folder(given: Path) -> Path:
    """A model's folder: the path itself, or the cached copy of what the hub has by this name."""
    name = str(given)
    if exists(given) or not is_hub_id(name):
        return given
    if (cached := cached_snapshot(name)) is not None:
        return cached
    raise NotACheckpointError(
        "is no folder, nor a model in the hub's cache on this machine",
        path=given,
        hint=f"Give a model folder, or download this one first: hf download {name}",
    )


def cached_snapshot(hub_id: str) -> Path | None:
    """The folder of a model in the hub's cache on this machine; nothing is downloaded."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - takes half a second
    from huggingface_hub.errors import (  # noqa: PLC0415
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
