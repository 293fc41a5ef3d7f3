"""Models by the hub's name for them, ``owner/name``, and the copies of them on this machine."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from zexport.errors import CheckpointError, NotACheckpointError, ZexportError
from zexport.store.address import last_names
from zexport.store.contents import read_json_object, read_regular
from zexport.store.files import reading
from zexport.store.folders import exists, hub_cache_folder, is_folder, real
from zexport.store.publish import check_finished

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_LOCAL = re.compile(
    r"(checkpoints?|ckpts?|models?|outputs?|out|runs?|results?|saves?|saved|data|datasets?|weights|"
    r"pretrained(_models?)?|hf_models?|base|exp|experiments?|logs?|tmp|home|mnt|root|work|workspace)"
    r"/.*|.*/(checkpoint|global_step|step|epoch)[-_]?\d+",
    re.IGNORECASE,
)
"""What looks like the hub's ``owner/name`` and is rather a folder."""

_QUANTIZED = re.compile(
    r"[-_.](?:unsloth[-_.])?(?:bnb[-_.])?(?:\d[-_.]?bits?|int[48]|fp8|nf4|[gw]\d?a?\d*g?ptq|gptq|awq"
    r"|gguf|hqq|w4a16|w8a8)(?:[-_.].*)?$",
    re.IGNORECASE,
)
"""How names end that quantized forms of a model are given."""


_COMMIT, _REF_NBYTES_MAX = re.compile(r"[0-9a-f]{40}"), 40
_BRANCH = re.compile(r"\w[\w.-]{0,95}")
_SNAPSHOTS = "snapshots"


class GivenBase(Struct, frozen=True):
    """The model that was given for what a checkpoint lacks.

    Attributes:
        name: the hub's name for it, or the last names of its folder.
        commit: the hub's commit of it, where it lies in the hub's cache; null elsewhere.
    """

    name: str
    commit: str | None = None

    @classmethod
    def of(cls, folder: Path) -> GivenBase:
        """The model in a folder."""
        here = real(folder)
        if (hub_id := hub_id_of(here)) is None:
            return cls(last_names(here))
        commits = (below for name, below in pairwise(here.parts) if name == _SNAPSHOTS)
        return cls(hub_id, next(filter(_COMMIT.fullmatch, commits), None))

    @classmethod
    def recorded(cls, record: object) -> GivenBase | None:
        """What a manifest says of it; ``None`` where that is nothing."""
        try:
            return msgspec.convert(record, cls)
        except msgspec.ValidationError:
            return None

    def __str__(self) -> str:
        """The name, and the commit where it is known."""
        return f"{self.name} at commit {self.commit}" if self.commit else self.name


def is_hub_id(name: str) -> bool:
    """Whether a name is the hub's for a model, and not likely to be a folder's."""
    return _HUB_ID.fullmatch(name) is not None and _LOCAL.fullmatch(name) is None


def hub_id_of(folder: Path) -> str | None:
    """The hub's name for the model in a folder of the hub's cache; ``None`` for another folder."""
    found = (_CACHED.fullmatch(part) for part in folder.parts)
    return next((f"{one[1]}/{one[2]}" for one in found if one), None)


def plain_name(name: str) -> str:
    """A model's name in small letters, without what tells of a quantized form of it."""
    return _QUANTIZED.sub("", name.rstrip("/").lower())


def model_folder(given: Path) -> Path:
    """A model's folder: the path itself, or the cached copy of what the hub has by this name.

    Raises:
        CheckpointError: there is neither, or it is an export that is not finished.
    """
    name = str(given)
    with reading(given, hint="Check the path and its permissions"):
        check_finished(given, CheckpointError)
        if exists(given) or not is_hub_id(name):
            return given
    if (cached := cached_snapshot(name)) is not None:
        return cached
    raise NotACheckpointError(
        "is no folder, nor a model in the hub's cache on this machine",
        path=given,
        hint=f"Give a model folder, or download this one first: hf download {name}",
    )


def cached_snapshot(hub_id: str, revision: str = "main") -> Path | None:
    """The folder of a model in the hub's cache here, of a commit or of a branch as last fetched.

    One whose download was stopped is none. Source: huggingface_hub 2.4,
    ``_snapshot_download.py`` and ``_tree_cache.py``.
    """
    try:
        model = hub_cache_folder() / f"models--{hub_id.replace('/', '--')}"
        commit = revision
        if not _COMMIT.fullmatch(revision):
            if not _BRANCH.fullmatch(revision):
                return None
            found = read_regular(model / "refs" / revision, _REF_NBYTES_MAX)
            commit = (found or b"").decode("ascii")
    except (OSError, RuntimeError, ValueError):  # nothing is there, nor a home to look in
        return None
    snapshot = model / _SNAPSHOTS / commit
    is_here = _COMMIT.fullmatch(commit) and is_folder(snapshot)
    return snapshot if is_here and _is_whole(snapshot, model / "trees" / f"{commit}.json") else None


def _is_whole(snapshot: Path, listing: Path) -> bool:
    """Whether a snapshot has all files that the hub has of it, where these were listed."""
    try:
        files = read_json_object(listing).get("files") if exists(listing) else None
    except ZexportError:
        return False
    return not isinstance(files, dict) or all(exists(snapshot / name) for name in files)
