"""Export and ``--then`` subprocesses, and the watch process that a callback starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import msgspec
from msgspec import Struct

from zexport.errors import UsageError
from zexport.monitor.policy import WatchOptions
from zexport.options import ExportOptions
from zexport.report.json import ErrorInfo
from zexport.storage.client import options_in_use
from zexport.storage.json import decoded

_NICENESS = 10
_END_S = 20
"""How long a process may take to end after SIGTERM."""

END_OF_INPUT = b"\x04"
"""Sent before stdin is closed: forked children may hold the pipe open."""

NO_ANSWER = "internal"
"""Kind of error of a process that ended without printing a result."""

_STORAGE_OPTION = "_STORAGE_OPTION"
_OPTION = re.compile(rf"ZEXPORT_[A-Z]+_(?!{_STORAGE_OPTION[1:]}$)")
"""Variables that set options: subprocesses of zexport get options only as arguments."""

_OF_A_RANK = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|NODE|CROSS)_(RANK|WORLD_SIZE|SIZE)|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|(TORCHELASTIC|ACCELERATE|OMPI|PMI|PMIX|MV2)_\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS)"
)
"""Variables that make a process a rank of the run.

Source: torch 2.13, ``distributed/elastic/agent/server/local_elastic_agent.py``; accelerate 1.15,
``utils/launch.py``, ``state.py``; Lightning 2.6, ``plugins/environments/slurm.py``.
"""

_PLACES = ("{}", "{step}")
_TAIL = 2000
"""How many characters of stderr are reported."""

_ARGUMENTS = {
    "max_shard_nbytes": "--max-shard-size",
    "max_memory_nbytes": "--max-memory",
    "renames": "--rename",
    "interval_s": "--interval",
}


class Job:
    """A low-priority process in its own group, which Ctrl-C does not reach."""

    def __init__(
        self, words: Sequence[str], environment: dict[str, str], **streams: int | None
    ) -> None:
        """Start it; its output is kept in files unless ``streams`` differ."""
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - ``end`` closes both
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        kept = {"stdin": subprocess.DEVNULL, "stdout": self._out, "stderr": self._err}
        self._process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - zexport, or the user's own command
            words,
            env=environment,
            process_group=0,  # not a session: niceness counts within one only (autogroup)
            **kept | streams,  # type: ignore[call-overload]
        )
        self._nbytes_read = 0
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; ``None`` if it runs longer than ``seconds``."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close_input(self) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(BrokenPipeError), stdin:  # it has ended
                stdin.write(END_OF_INPUT)

    def lines(self) -> list[str]:
        """Return the lines that it wrote to stdout since the last call."""
        text, _, _ = _read(self._out.fileno(), self._nbytes_read).rpartition("\n")
        self._nbytes_read += len(text.encode(errors="surrogateescape")) + bool(text)
        return text.splitlines()

    def stderr_tail(self) -> str:
        nbytes = os.fstat(self._err.fileno()).st_size
        return _read(self._err.fileno(), max(0, nbytes - 4 * _TAIL))[-_TAIL:].strip()

    def end(self) -> None:
        """End the process and everything that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(0) is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                self.wait(_END_S)
        self.close_input()
        self._out.close()
        self._err.close()


def _read(descriptor: int, begin: int) -> str:
    """Return a file from an offset; its process continues to write at its own."""
    nbytes = os.fstat(descriptor).st_size - begin
    return os.pread(descriptor, nbytes, begin).decode(errors="surrogateescape")


class ExportResult(Struct, frozen=True):
    """Warnings of an export process, or its error."""

    warnings: tuple[str, ...] = ()
    error: ErrorInfo | None = None


def result_of(job: Job, code: int, links: Path, run: Path) -> ExportResult:
    """Return what an export process that has ended printed, with paths in the run, not links."""
    was, now = (json.dumps(str(path))[1:-1] for path in (links, run))
    with suppress(ValueError, msgspec.ValidationError):  # it was killed while it printed
        return decoded("".join(job.lines()).replace(was, now), ExportResult)
    last = job.stderr_tail().rpartition("\n")[2]
    message = f"the process ended with code {code}" + (f": {last}" if last else "")
    return ExportResult(error=ErrorInfo(max(code, 1), NO_ANSWER, None, message, ""))


def start_export(checkpoint: Path, out: Path, words: Sequence[str]) -> Job:
    """Start ``zexport consolidate``, without GPUs."""
    line = _own_command("consolidate", str(checkpoint), str(out), *words, "--quiet")
    return Job(line, _own_environment() | {"CUDA_VISIBLE_DEVICES": ""})


def start_watch(run: Path, outs: Path, words: Sequence[str]) -> Job:
    """Start ``zexport watch`` until ``close_input``; its commands see the GPUs, but are no rank."""
    environment = {k: v for k, v in _own_environment().items() if not _OF_A_RANK.fullmatch(k)}
    line = _own_command("watch", str(run), str(outs), *words, "--until-eof")
    return Job(line, environment, stdin=subprocess.PIPE)


def _own_command(*words: str) -> tuple[str, ...]:
    # -P: nothing is imported from the working directory
    return (sys.executable, "-P", "-m", "zexport", *words, "--json")


def _own_environment() -> dict[str, str]:
    """Return the environment with storage options, which must not be visible as arguments."""
    environment = {k: v for k, v in os.environ.items() if not _OPTION.match(k)}
    if settings := "".join(f"{key}={value}\n" for key, value in options_in_use().items()):
        for command in ("CONSOLIDATE", "WATCH"):
            environment[f"ZEXPORT_{command}{_STORAGE_OPTION}"] = settings
    return environment


def split_command(command: str) -> list[str]:
    """Return the words of a command that is run without a shell.

    Raises:
        UsageError: there is no such program, or ``{}`` or ``{step}`` is part of a longer word.
    """
    try:
        words = shlex.split(command)
    except ValueError as cause:
        raise UsageError(f"then: {cause}", found=command, hint="Close the quotes") from cause
    if command and shutil.which(next(iter(words), "")) is None:
        raise UsageError(
            "then: program not found",
            found=command,
            hint="Name a program in PATH, or give its path. Put shell syntax into a script",
        )
    for word in words:
        if word not in _PLACES and any(place in word for place in _PLACES):
            raise UsageError(
                "then: {} and {step} must be words of their own",
                found=word,
                hint="Pass them to a script, as in --then 'bash script.sh {} {step}'",
            )
    return words


def start_command(words: Sequence[str], out: Path, step: int | None) -> Job:
    """Start the command after an export: ``{}`` is its folder, ``{step}`` its step."""
    values = {"{}": str(out), "{step}": "" if step is None else str(step)}
    given = [values.get(word, word) for word in words]
    return Job(given, dict(os.environ), stdout=2, stderr=2)


def arguments_of(options: ExportOptions | WatchOptions) -> tuple[str, ...]:
    """Return the command-line arguments that set these options; defaults are omitted.

    Raises:
        UsageError: no argument can set an option.
    """
    defaults, words = type(options)(), list[str]()
    for name in (one.name for one in fields(options)):
        value = getattr(options, name)
        if value == getattr(defaults, name):
            continue
        if name == "hub_layout" or (name == "renames" and any("=" in old for old, _ in value)):
            raise UsageError(f"{name} cannot be set on the command line", found=value)
        option = _ARGUMENTS.get(name, f"--{name.replace('_', '-')}")
        items = sorted(value, key=str) if isinstance(value, frozenset) else value
        for item in items if isinstance(items, list | tuple) else (items,):
            words.append(option)
            if isinstance(item, tuple):
                words.append("=".join(item))
            elif item is not True:
                words.append(str(item))
    return tuple(words)
