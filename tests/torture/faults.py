"""Count system calls of this process and let them fail, at the level of ``os``."""

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
CHANGES = (*WRITES, *SYNCS, *RENAMES, "link", "symlink", "utime")
CALLS = (*CHANGES, *READS)


@dataclass
class Calls:
    """Counts each call and runs ``act`` before it.

    Attributes:
        act: gets the call's name and its number among all calls, from 1.
        names: the calls that count.
        counts: calls by name.
    """

    act: Callable[[str, int], None] = lambda _name, _number: None
    names: tuple[str, ...] = CALLS
    counts: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def passed(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1
            number = self.counts.total()
        self.act(name, number)


@contextmanager
def watched(calls: Calls) -> Iterator[Calls]:
    """Route system calls through ``calls`` in the block; shorten pauses between retries."""
    sleep = time.sleep
    with pytest.MonkeyPatch.context() as patch:
        for name in calls.names:
            patch.setattr(os, name, _through(calls, name, getattr(os, name)))
        patch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.001)))
        yield calls


def _through(calls: Calls, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        calls.passed(name)
        return whole(*args, **named)

    return call


def failing(names: tuple[str, ...], at: int, number: int, *, times: int) -> Calls:
    """Fail ``times`` calls of these names from the ``at``-th on, with an errno or (0) Ctrl-C."""
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


def killing(at: int, names: tuple[str, ...] = CALLS) -> Calls:
    """Kill the process before its ``at``-th call, as ``kill -9`` does."""

    def act(_name: str, number: int) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return Calls(act, names)


def forked(act: Callable[[], object], calls: Calls) -> int:
    """Start a process that runs ``act`` through ``calls``; it exits with 0 on success."""
    if child := os.fork():
        return child
    code = 1
    try:
        with watched(calls):
            act()
        code = 0
    except BaseException:  # printed as Python does
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process: int) -> int:
    """Return a process's exit code, or the negative signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
