"""A finished folder handed to the Hugging Face hub, by the hub's own library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from zexport.errors import MissingExtraError, OutputError, UsageError
from zexport.printable import shell_word, some
from zexport.store.client import first_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_LAST = ("config.json", "adapter_config.json", "*.index.json", "zexport_manifest.json")
"""Without these no folder is loaded, or verified."""

_MODEL = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*", *_LAST)
"""What a model is loaded from."""

_BESIDE = (
    *("generation_config.json", "*.jinja", "chat_template*", "*processor_config.json", "*.py"),
    *("tokenizer*", "*vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
)
"""What changes how it is loaded, or what it says: of an older model none of it may stay."""


def check_repository(repository: str, *, overwrite: bool) -> None:
    """Refuse what no folder could be uploaded to, before any work is done.

    Raises:
        MissingExtraError: the hub's library is not installed.
        UsageError: it is no name of a repository, the hub is switched off, or nobody is logged in.
        OutputError: the hub refuses the login or is not reached, or the repository holds a model
            and ``overwrite`` is not set.
    """
    if find_spec("huggingface_hub") is None:
        raise MissingExtraError(
            "--push-to-hub needs huggingface_hub, which is not installed",
            hint="Type pip install '.[hub]' in a clone of zexport",
        )
    from huggingface_hub import HfApi, constants, get_token

    _check_name(repository)
    if constants.HF_HUB_OFFLINE:
        raise UsageError("--push-to-hub needs the hub", hint="Take away HF_HUB_OFFLINE")
    if get_token() is None:
        raise UsageError(
            "--push-to-hub needs a login to the hub", hint="Type hf auth login, or set HF_TOKEN"
        )
    with _asked(f"{repository} cannot be uploaded to", hint="Nothing was written"):
        held = _held(HfApi(), repository)
    if held and not overwrite:
        raise OutputError(
            f"{repository} holds a model",
            found=some(held, 4),
            hint="Choose another name, or pass --overwrite; the history there keeps the older one",
        )


def _check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as cause:
        raise UsageError(f"{repository!r} is no repository", found=first_line(cause)) from cause
    if "/" not in repository:
        raise UsageError(f"{repository!r} is no repository", expected="ORG/NAME")


def _held(api: HfApi, repository: str) -> list[str]:
    """The files of the model that a repository holds; none where there is no such repository."""
    from huggingface_hub.errors import RepositoryNotFoundError

    api.whoami()  # a login that does not count is told as a repository that is not there
    try:
        names = api.list_repo_files(repository)
    except RepositoryNotFoundError:
        return []
    return sorted(name for name in names if any(fnmatchcase(name, kind) for kind in _MODEL))


def push(folder: Path, repository: str, *, overwrite: bool, quiet: bool) -> str:
    """Upload a folder to a model's repository, which is made, and private, where there is none.

    What a folder is loaded by comes with the last commit; with ``overwrite``, the first one removes
    what an older model is loaded from. So no commit in between looks like a model.

    Returns:
        The address of the repository.

    Raises:
        OutputError: the hub refused it, or was not reached. The folder is as it was, and what was
            uploaded already is not uploaded again by the next try.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if quiet:
        disable_progress_bars()
    api, older = HfApi(), (*_MODEL, *_BESIDE) if overwrite else ()
    upload = partial(
        api.upload_folder,
        repo_id=repository,
        folder_path=folder,
        commit_message="Upload an export by zexport",
    )
    line = ["hf", "upload", "--private", repository, str(folder)]
    line += [word for kind in older for word in ("--delete", kind)]
    with _asked(
        f"is whole, but was not uploaded to {repository}",
        path=folder,
        hint=f"To go on, type {' '.join(map(shell_word, line))}",
    ):
        made = api.create_repo(repository, private=True, exist_ok=True)
        upload(ignore_patterns=[*_LAST], delete_patterns=[*older] or None)
        upload(allow_patterns=[*_LAST])
    return str(made)


@contextmanager
def _asked(refused: str, *, hint: str, path: Path | None = None) -> Iterator[None]:
    """A block in which the hub is asked; its refusals are told in one sentence."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # httpx, or httpx2

    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as cause:
        raise OutputError(refused, path=path, found=first_line(cause), hint=hint) from cause
