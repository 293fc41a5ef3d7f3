"""Upload a finished folder to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from zexport.errors import MissingExtraError, OutputError, UsageError
from zexport.storage.os_errors import first_line
from zexport.text import shell_word, some

_LAST = ("config.json", "adapter_config.json", "*.index.json", "zexport_manifest.json")
"""Files without which no library loads a folder, uploaded last."""

_MODEL = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*", *_LAST)
_MODEL_FILES = (
    *("generation_config.json", "*.jinja", "chat_template*", "*processor_config.json", "*.py"),
    *("tokenizer*", "*vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
)


def check_repository(repository: str, *, overwrite: bool) -> None:
    """Raise if a folder cannot be uploaded, before any work is done.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        UsageError: the name is invalid, the Hub is switched off, or there is no login.
        OutputError: the Hub refuses, or the repository has a model and ``overwrite`` is not set.
    """
    if find_spec("huggingface_hub") is None:
        raise MissingExtraError(
            "--push-to-hub needs huggingface_hub, which is not installed",
            hint="Run pip install '.[hub]' in a clone of zexport",
        )
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    name = f"{repository!r} is not a repository name"
    try:
        validate_repo_id(repository)
    except HFValidationError as cause:
        raise UsageError(name, found=first_line(cause)) from cause
    if "/" not in repository:
        raise UsageError(name, expected="ORG/NAME")
    if constants.HF_HUB_OFFLINE:
        raise UsageError("--push-to-hub needs the Hub", hint="Unset HF_HUB_OFFLINE")
    if get_token() is None:
        raise UsageError("--push-to-hub needs a login", hint="Type hf auth login, or set HF_TOKEN")
    with _asked(f"cannot upload to {repository}", hint="Nothing was written"):
        api = HfApi()
        api.whoami()  # with an invalid login, repositories look missing
        try:
            files = api.list_repo_files(repository)
        except RepositoryNotFoundError:
            return
    found = sorted(name for name in files if any(fnmatchcase(name, kind) for kind in _MODEL))
    if found and not overwrite:
        raise OutputError(
            f"{repository} already has a model",
            found=some(found, 4),
            hint="Choose another name, or pass --overwrite; its history keeps the old model",
        )


def push(folder: Path, repository: str, *, overwrite: bool, quiet: bool) -> str:
    """Upload a folder to a model repository, created as private if missing; return its URL.

    Two commits, so that none has half a model: the first removes the old model's files if
    ``overwrite``, the second adds those without which nothing is loaded.

    Raises:
        OutputError: the Hub refuses. The folder stays, and a retry skips uploaded files.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if quiet:
        disable_progress_bars()
    api, old = HfApi(), [*_MODEL, *_MODEL_FILES] if overwrite else []
    upload = partial(
        api.upload_folder,
        repo_id=repository,
        folder_path=folder,
        commit_message="Upload an export by zexport",
    )
    line = ["hf", "upload", "--private", repository, str(folder)]
    line += [word for kind in old for word in ("--delete", kind)]
    with _asked(
        f"is complete, but was not uploaded to {repository}",
        path=folder,
        hint=f"To continue, type {' '.join(map(shell_word, line))}",
    ):
        url = api.create_repo(repository, private=True, exist_ok=True)
        upload(ignore_patterns=[*_LAST], delete_patterns=old or None)
        upload(allow_patterns=[*_LAST])
    return str(url)


@contextmanager
def _asked(problem: str, *, hint: str, path: Path | None = None) -> Iterator[None]:
    """Raise ``OutputError`` for an error of the Hub."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # httpx, or httpx2

    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as cause:
        raise OutputError(problem, path=path, found=first_line(cause), hint=hint) from cause
