"""Retry operations while storage falters; turn an ``OSError`` into an error with path and hint."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from zexport.errors import CheckpointError, OutputError, ZexportError
from zexport.storage.location import Address

_PAUSES_SECONDS = (0.01, 0.05, 0.2, 0.5)
"""One pause before each retry."""

CUT_SHORT = frozenset({errno.EINTR, errno.EAGAIN})
"""Errors after which anything may be repeated, even a listing that ended too early."""

_FALTERING = CUT_SHORT | {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}

_T = TypeVar("_T")


def steadily(
    act: Callable[[], _T],
    *,
    recover: Callable[[], None] | None = None,
    on: Collection[int] = _FALTERING,
) -> _T:
    """Return ``act()``; after the errors ``on``, pause, call ``recover`` and retry up to 4 times.

    Do not use it for a rename, which may have happened although it failed.
    """
    failures = 0
    while True:
        try:
            if failures and recover is not None:
                recover()
            return act()
        except OSError as error:
            if error.errno not in on or failures == len(_PAUSES_SECONDS):
                raise
        time.sleep(_PAUSES_SECONDS[failures])
        failures += 1


def may_pass(cause: BaseException | None) -> bool:
    """Whether it is an error of faltering storage, so that running again may succeed."""
    return isinstance(cause, OSError) and cause.errno in _FALTERING


def lacks_memory(error: BaseException) -> bool:
    """Whether the system refused memory, for a thread too."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or str(error) in ("can't start new thread", "can't allocate lock")
    )


def synced(descriptor: int, sync: Callable[[int], None] | None = None) -> None:
    """Flush a file to the disk with ``sync`` (default ``os.fsync``).

    Repeated only after ``EINTR`` and ``EAGAIN``: after other errors the kernel may have dropped the
    bytes and marked them clean, so that a second call would succeed (Linux, ``mm/filemap.c``).
    """
    steadily(lambda: (sync or os.fsync)(descriptor), on=CUT_SHORT)


_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or run az login",
}
_CURES = {
    "there is no such bucket": "Check its name, the endpoint and the region",
    "there are no credentials": "Set {keys}",
    "the bucket is in another region": "Set AWS_REGION or --storage-option region=REGION",
    "the store cannot be reached": "Check the network, the region and the endpoint "
    "(--storage-option endpoint=URL)",
}

HINTS = {
    errno.ENOENT: "Choose a folder that can be created and that nothing removes meanwhile",
    errno.ENOSPC: "Free some space, or choose another disk",
    errno.EDQUOT: "Free some of your quota, or choose another disk",
    errno.EACCES: "Choose a folder you may write to",
    errno.EPERM: "Choose a folder you may write to",
    errno.EROFS: "Choose a disk that is not read-only",
}


def first_line(cause: Exception) -> str:
    """Return the first line of an error without its full stop."""
    return str(cause).partition("\n")[0].rstrip(".")


def cure_of(cause: OSError) -> str:
    """Return what to do about an error that concerns a whole bucket or store; else nothing."""
    if not isinstance(cause.filename, Address):
        return ""
    scheme = cause.filename.root_url.partition(":")[0]
    return _CURES.get(cause.strerror or "", "").format(keys=_KEYS.get(scheme, _KEYS["az"]))


@contextmanager
def reading(
    path: Path, error: type[ZexportError] = CheckpointError, hint: str = ""
) -> Iterator[None]:
    """Raise ``error`` for an ``OSError``, about its file or, if a bucket refuses, ``path``."""
    try:
        yield
    except OSError as cause:
        cure = cure_of(cause)
        if not cure and isinstance(name := cause.filename, str | Path):
            path = Path(name) if isinstance(name, str) else name
        problem = f"cannot be read: {cause.strerror or cause}"
        raise error(problem, path=path, hint=cure or hint) from cause


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise ``OutputError`` about ``path`` for an ``OSError``."""
    try:
        yield
    except OSError as cause:
        problem = f"cannot be written: {cause.strerror}"
        hint = cure_of(cause) or HINTS.get(cause.errno or 0, "")
        raise OutputError(problem, path=path, hint=hint) from cause
