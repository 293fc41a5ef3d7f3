"""What one command costs: seconds and peak memory of a child process, on a settled machine.

A child's peak memory counts the pages its parent held when it was started (Linux keeps the mark
across ``exec``), so this module and all that ``benchmarks.run`` imports stay with the standard
library: the floor is about 15 MB.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from time import perf_counter

TIME_LIMIT = 1800.0  # seconds; nothing measured here takes that long
_RSS_UNIT = 1024  # Linux counts ru_maxrss in KiB
_TAIL = 2000


class CommandFailedError(Exception):
    """A measured command ended with another code than 0; the text is the end of its stderr."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one command.

    Attributes:
        seconds: wall time.
        cpu_seconds: of the process and those it waited for, on all cores together.
        peak_rss: bytes, the largest of the process and those it waited for.
        nbytes_read: bytes the command says it read of the checkpoint, where it says so.
    """

    seconds: float
    cpu_seconds: float
    peak_rss: int
    nbytes_read: int | None = None


def run(argv: Sequence[str], env: Mapping[str, str]) -> tuple[Sample, bytes]:
    """The cost of a command and its stdout.

    Raises:
        CommandFailedError: it failed, or did not end within ``TIME_LIMIT``.
    """
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        begin = perf_counter()
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env
        )
        limit = Timer(TIME_LIMIT, child.kill)
        limit.start()
        _, status, usage = os.wait4(child.pid, 0)
        seconds = perf_counter() - begin
        limit.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if child.returncode != 0:
            words = " ".join(argv)
            tail = (stderr.read() + stdout.read())[-_TAIL:].decode(errors="replace")
            raise CommandFailedError(f"{words}: ended with code {child.returncode}\n{tail}")
        cpu_seconds = usage.ru_utime + usage.ru_stime
        return Sample(seconds, cpu_seconds, usage.ru_maxrss * _RSS_UNIT), stdout.read()


def copy(folder: Path, env: Mapping[str, str], out: Path) -> Sample:
    """The cost of ``cp`` of a folder's files and of bringing the copies to the disk.

    What it is compared with ends with its bytes on the disk, so the copy must as well.
    """
    out.mkdir()
    files = sorted(path for path in folder.iterdir() if path.is_file())
    copied, _ = run(["cp", *map(str, files), str(out)], env)
    synced, _ = run(["sync", "-d", *(str(out / path.name) for path in files)], env)
    return Sample(
        copied.seconds + synced.seconds,
        copied.cpu_seconds + synced.cpu_seconds,
        max(copied.peak_rss, synced.peak_rss),
    )
