"""Second names of files, under which they stay when the first one is removed."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What a system says that cannot link one file twice."""

_OPEN_FILES = Path(f"/proc/{os.getpid()}/fd")


class NoKeepError(Exception):
    """The system can keep no file whose name is removed, or no more of them."""


def keep(path: Path, target: Path, descriptors: list[int]) -> None:
    """Give a file a second name: a hard link, or on another file system one to it as it is open.

    It is open for as long as its descriptor, which is added to ``descriptors``.

    Raises:
        NoKeepError: neither is possible.
        OSError: it is not there, or ``target`` cannot be written.
    """
    try:
        os.link(path, target)
    except OSError as cause:
        if cause.errno not in _NO_LINKS:
            raise
        _keep_open(path, target, descriptors)


def _keep_open(path: Path, target: Path, descriptors: list[int]) -> None:
    if not _OPEN_FILES.is_dir():
        raise NoKeepError
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as cause:
        if cause.errno == errno.EMFILE:
            raise NoKeepError from cause
        raise
    target.symlink_to(_OPEN_FILES / str(descriptors[-1]))


def point(path: Path, target: Path) -> None:
    """Make a symbolic link to ``path``."""
    target.symlink_to(path)


def let_go(descriptors: Iterable[int]) -> None:
    """Close what was held open."""
    for descriptor in descriptors:
        os.close(descriptor)
