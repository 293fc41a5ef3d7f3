"""Turn the operating system's errors into zexport's, with path and next step."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zexport.errors import CheckpointError, OutputError, ZexportError
from zexport.storage.client import cure_of

HINTS = {
    errno.ENOENT: "Choose a folder that can be created and that nothing removes meanwhile",
    errno.ENOSPC: "Free some space, or choose another disk",
    errno.EDQUOT: "Free some of your quota, or choose another disk",
    errno.EACCES: "Choose a folder you may write to",
    errno.EPERM: "Choose a folder you may write to",
    errno.EROFS: "Choose a disk that is not read-only",
}


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
