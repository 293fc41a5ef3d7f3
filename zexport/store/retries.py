"""When the storage falters: what is worth another try, how often, and how a file is opened again.

Network file systems fail for a moment: a server restarts (``EIO``, ``ETIMEDOUT``), a handle goes
stale (``ESTALE``), a signal or a busy server cuts in (``EINTR``, ``EAGAIN``). What does not pass in
less than a second is told to the user. Nothing else is tried again: a full disk stays full.

A failed ``fsync`` is never tried again but for ``EINTR`` and ``EAGAIN``: after any other failure
the kernel may have thrown the bytes away and marked them clean (Linux, ``mm/filemap.c``,
``filemap_check_errors``), so that a second call would succeed over bytes that are gone. Nor is a
rename, which may have happened although it failed.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection
from typing import TypeVar

PAUSES_SECONDS = (0.01, 0.05, 0.2, 0.5)
"""One pause before each further try."""

CUT_SHORT = frozenset({errno.EINTR, errno.EAGAIN})
"""What is worth another try of whatever it was: also a listing of a store that ended too early."""

_FALTERING = CUT_SHORT | {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}

_T = TypeVar("_T")


def steadily(
    act: Callable[[], _T],
    *,
    recover: Callable[[], None] | None = None,
    on: Collection[int] = _FALTERING,
) -> _T:
    """What ``act`` returns, tried again after ``recover`` a few times while the storage falters.

    ``on`` are the errors that are taken for that.
    """
    for pause in PAUSES_SECONDS:
        try:
            return act()
        except OSError as error:
            if error.errno not in on:
                raise
        time.sleep(pause)
        if recover is not None:
            _once(recover)
    return act()


def may_pass(cause: BaseException | None) -> bool:
    """Whether it is the system's refusal of a storage that falters, so that a later try may go."""
    return isinstance(cause, OSError) and cause.errno in _FALTERING


def _once(recover: Callable[[], None]) -> None:
    """Recovery that fails for a moment is left to the next try."""
    try:
        recover()
    except OSError as error:
        if error.errno not in _FALTERING:
            raise


def synced(descriptor: int, sync: Callable[[int], None] | None = None) -> None:
    """Return when what was written is on the disk, by ``sync`` or else by ``os.fsync``."""
    sync = sync or os.fsync
    for pause in PAUSES_SECONDS:
        try:
            return sync(descriptor)
        except OSError as error:
            if error.errno not in CUT_SHORT:
                raise
        time.sleep(pause)
    return sync(descriptor)
