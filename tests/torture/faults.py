"""The system's calls, counted and made to fail: in this process, at the level of ``os``."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import pytest

WRITES = ("pwrite", "write", "ftruncate", "posix_fallocate", "open", "mkdir", "unlink", "rmdir")
SYNCS = ("fsync", "fdatasync")
RENAMES = ("rename", "replace")
READS = ("preadv",)
CALLS = (*WRITES, *SYNCS, *RENAMES, *READS)


@dataclass
class Calls:
    """What is done at every call: counts it, and lets ``act`` do what it will before it happens.

    Attributes:
        act: told the call's name and its number among all calls, from 1.
        counts: how often each was called.
    """

    act: Callable[[str, int], None] = lambda _name, _number: None
    counts: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def passed(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1
            number = self.counts.total()
        self.act(name, number)


@contextmanager
def watched(calls: Calls) -> Iterator[Calls]:
    """A block in which the calls go through ``calls``; the pauses between tries are short."""
    sleep = time.sleep
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, _through(calls, name, getattr(os, name)))
        patch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.001)))
        yield calls


def _through(calls: Calls, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        calls.passed(name)
        return whole(*args, **named)

    return call


def failing(names: tuple[str, ...], at: int, number: int, *, times: int) -> Calls:
    """Calls of which the ``at``-th of these names, and so many after it, fail with an errno.

    With 0 for that it is Ctrl-C.
    """
    seen, lock = Counter[str](), Lock()

    def act(name: str, _number: int) -> None:
        if name not in names:
            return
        with lock:
            seen["all"] += 1
            fails = at <= seen["all"] < at + times
        if fails:
            raise OSError(number, os.strerror(number)) if number else KeyboardInterrupt

    return Calls(act)


def killing(at: int) -> Calls:
    """Calls before the ``at``-th of which the process is gone, as by ``kill -9``."""

    def act(_name: str, number: int) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return Calls(act)


def forked(act: Callable[[], object], calls: Calls) -> int:
    """A process that does ``act`` through ``calls``; it ends with 0 if that ends well."""
    if child := os.fork():
        return child
    code = 1
    try:
        with watched(calls):
            act()
        code = 0
    except BaseException:  # as Python does with what nobody catches
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process: int) -> int:
    """The exit code of a process, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
