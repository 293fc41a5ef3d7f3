"""Models in the local Hub cache, by Hub id (``owner/name``)."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import Struct

from zexport.errors import CheckpointError, NotACheckpointError
from zexport.storage.files import exists, is_folder, read_regular, real
from zexport.storage.location import hub_cache_folder, last_names
from zexport.storage.locks import check_finished
from zexport.storage.os_errors import reading

_HUB_ID = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
_CACHED = r"models--([\w.-]+?)--([\w.-]+)"
_LOCAL = (
    r"(?i)(checkpoints?|ckpts?|models?|outputs?|out|runs?|results?|saves?|saved|data|datasets?|"
    r"weights|pretrained(_models?)?|hf_models?|base|exp|experiments?|logs?|tmp|home|mnt|root|work|workspace)"
    r"/.*|.*/(checkpoint|global_step|step|epoch)[-_]?\d+"
)
"""Looks like a Hub id and is probably a folder."""

_QUANTIZED = (
    r"(?i)[-_.](?:unsloth[-_.])?(?:bnb[-_.])?(?:\d[-_.]?bits?|int[48]|fp8|nf4|[gw]\d?a?\d*g?ptq|gptq|awq"
    r"|gguf|hqq|w4a16|w8a8)(?:[-_.].*)?$"
)
"""Endings of the names of quantized models."""

_COMMIT, _REF_NBYTES_MAX = re.compile(r"[0-9a-f]{40}"), 40
_BRANCH = r"\w[\w.-]{0,95}"


class GivenBase(Struct, frozen=True):
    """The model that was passed with ``--base``.

    Attributes:
        name: its Hub id, or the last names of its folder.
        commit: its commit, if it is in the Hub cache.
    """

    name: str
    commit: str | None = None

    @classmethod
    def of(cls, folder: Path) -> GivenBase:
        here = real(folder)
        if (hub_id := hub_id_of(here)) is None:
            return cls(last_names(here))
        return cls(hub_id, next(filter(_COMMIT.fullmatch, here.parts), None))

    @classmethod
    def recorded(cls, record: object) -> GivenBase | None:
        try:
            return msgspec.convert(record, cls)
        except msgspec.ValidationError:
            return None

    def __str__(self) -> str:
        return f"{self.name} at commit {self.commit}" if self.commit else f"folder {self.name}"


def is_hub_id(name: str) -> bool:
    """Whether a name is a Hub id and probably not a folder."""
    return re.fullmatch(_HUB_ID, name) is not None and re.fullmatch(_LOCAL, name) is None


def hub_id_of(folder: Path) -> str | None:
    """Return the Hub id of a folder in the Hub cache; ``None`` for another folder."""
    found = (re.fullmatch(_CACHED, part) for part in folder.parts)
    return next((f"{one[1]}/{one[2]}" for one in found if one), None)


def plain_name(name: str) -> str:
    """Return a model's name in lowercase, without the ending of a quantized model."""
    return re.sub(_QUANTIZED, "", name.rstrip("/").lower())


def model_folder(given: Path) -> Path:
    """Return the folder of a path, or of a Hub id in the Hub cache.

    Raises:
        NotACheckpointError: there is no such folder or cached model.
        CheckpointError: it is an unfinished export.
    """
    with reading(given, hint="Check the path and its permissions"):
        check_finished(given, CheckpointError)
        if exists(given) or not is_hub_id(str(given)):
            return given
    if (cached := cached_snapshot(str(given))) is not None:
        return cached
    raise NotACheckpointError(
        "neither a folder nor a model in the Hub cache",
        path=given,
        hint=f"Pass a model folder, or download the model: hf download {given}",
    )


def cached_snapshot(hub_id: str, revision: str = "main") -> Path | None:
    """Return the cached folder of a model at a commit or branch, or ``None``.

    Source: huggingface_hub 2.4, ``_snapshot_download.py``.
    """
    if not re.fullmatch(_BRANCH, revision):
        return None
    try:
        model = hub_cache_folder() / f"models--{hub_id.replace('/', '--')}"
        if not _COMMIT.fullmatch(revision):
            ref = read_regular(model / "refs" / revision, _REF_NBYTES_MAX) or b""
            revision = ref.decode("ascii")
    except (OSError, RuntimeError, ValueError):  # no such branch, or no home folder
        return None
    snapshot = model / "snapshots" / revision
    return snapshot if _COMMIT.fullmatch(revision) and is_folder(snapshot) else None
