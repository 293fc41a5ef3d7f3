"""``zexport`` commands run in a fork of this process, which has imported it.

A fork has its own descriptors, signals, environment and end, as a command has that a user types;
only what is imported at the start is not its own. Tests of that start a Python.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import Any, ClassVar, NoReturn

from zexport import ZexportError
from zexport.__main__ import main

_STATVFS, _FREE = os.statvfs, 900
_INIT = ZexportError.__init__
"""As it is outside of tests, which note the errors that are made."""


def typed(
    *words: object, limit_s: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and output."""
    with TemporaryFile() as out, TemporaryFile() as err:
        if not (pid := os.fork()):
            _become([*map(str, words)], environment, (out.fileno(), err.fileno()))
        code = _ended(pid, limit_s)
        outputs = []
        for file in (out, err):
            file.seek(0)
            outputs.append(file.read().decode())
    return subprocess.CompletedProcess(words, code, *outputs)


class ForkedExport(subprocess.Popen[bytes]):
    """``python -m zexport consolidate`` as a fork; any other process as usual."""

    started: ClassVar[list[int]] = []

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if "consolidate" not in args:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        environment, out, err = rest[5], rest[12], rest[14]
        if not (pid := os.fork()):
            os.setpgid(0, 0)
            files = (os.dup2(out, _FREE), os.dup2(err, _FREE + 1))
            os.closerange(3, _FREE)
            os.environ.clear()
            os.statvfs = _STATVFS
            _become([*args[args.index("consolidate") :]], environment, files)
        self.pid, self._child_created = pid, True
        self.started.append(pid)


def _become(words: list[str], environment: Mapping[str, str], files: tuple[int, int]) -> NoReturn:
    code: object = 1
    try:
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files)):
            os.dup2(file, number)
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["zexport", *words]
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        ZexportError.__init__ = _INIT  # type: ignore[method-assign]
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # as Python does with uncaught exceptions
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)


def _ended(pid: int, limit_s: float) -> int:
    """The exit code of a process, or the negative number of the signal that ended it."""
    limit = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.003)
