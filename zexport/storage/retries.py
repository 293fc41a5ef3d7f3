"""Retry file operations while network storage falters: a busy or restarting server."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection
from typing import TypeVar

PAUSES_SECONDS = (0.01, 0.05, 0.2, 0.5)
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
    """Return ``act()``; after the errors ``on``, pause, call ``recover`` and retry.

    Do not use it for a rename, which may have happened although it failed.
    """
    for pause in PAUSES_SECONDS:
        try:
            return act()
        except OSError as error:
            if error.errno not in on:
                raise
        time.sleep(pause)
        if recover is not None:
            _recover(recover)
    return act()


def _recover(recover: Callable[[], None]) -> None:
    try:
        recover()
    except OSError as error:
        if error.errno not in _FALTERING:
            raise


def may_pass(cause: BaseException | None) -> bool:
    """Whether it is an error of faltering storage, so that running again may succeed."""
    return isinstance(cause, OSError) and cause.errno in _FALTERING


def synced(descriptor: int, sync: Callable[[int], None] | None = None) -> None:
    """Flush a file to the disk with ``sync`` (default ``os.fsync``).

    Repeated only after ``EINTR`` and ``EAGAIN``: after other errors the kernel may have dropped the
    bytes and marked them clean, so that a second call would succeed (Linux, ``mm/filemap.c``).
    """
    steadily(lambda: (sync or os.fsync)(descriptor), on=CUT_SHORT)
