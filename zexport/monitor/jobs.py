"""What runs beside the training in a process of its own: an export, or the command after it."""

from __future__ import annotations

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
from io import FileIO
from pathlib import Path

import msgspec
from msgspec import Struct

from zexport.errors import UsageError
from zexport.report.failure import Failure, Told
from zexport.storage.client import options_in_use
from zexport.storage.json import decoded

_NICENESS = 10
_END_S = 20
"""So long a process may take to end when it is asked to."""

END_OF_INPUT = b"\x04"
"""What says on standard input that no more comes."""

_OF_STORAGE = "_STORAGE_OPTION"
_OPTION = re.compile(rf"ZEXPORT_[A-Z]+_(?!{_OF_STORAGE[1:]}$)")
"""Variables that set an option of a command: a process of ours gets its options in words alone."""

_OF_A_RANK = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|NODE|CROSS)_(RANK|WORLD_SIZE|SIZE)|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|(TORCHELASTIC|ACCELERATE|OMPI|PMI|PMIX|MV2)_\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS)"
)
"""Variables that say which rank of a training a process is: no other process is that.

Source: torch 2.13, ``distributed/elastic/agent/server/local_elastic_agent.py``; accelerate 1.15,
``utils/launch.py``, ``state.py``; Lightning 2.6, ``plugins/environments/slurm.py``.
"""

_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)
"""With these blocked, a process in the background that asks the terminal fails at once."""

_PLACES = ("{}", "{step}")

_TAIL = 2000
"""So many characters of a complaint are told."""

_READ_NBYTES = 1 << 20


class Job:
    """A process at low priority, which no Ctrl-C reaches; it ends with ``end`` at the latest."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        is_heard: bool,
        is_of_training: bool = False,
    ) -> None:
        """Start it; its output is kept, unless it ``is_heard`` on stderr, as the user's command is.

        One that a training starts has an input, which ends when ``no_more`` is called, or this
        process is gone; it is no rank as this process is, and commands that it starts may use GPUs.
        """
        self._out = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - ``end`` closes both
        self._err = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        environment = {k: v for k, v in os.environ.items() if is_heard or not _OPTION.match(k)}
        if is_of_training:
            environment = {k: v for k, v in environment.items() if not _OF_A_RANK.fullmatch(k)}
        elif not is_heard:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if settings := "".join(f"{key}={value}\n" for key, value in options_in_use().items()):
            # not as words, which anybody may read
            ours = ("CONSOLIDATE", "WATCH")
            environment |= {f"ZEXPORT_{one}{_OF_STORAGE}": settings for one in ours}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - ours, or the user's own command
                words,
                stdin=subprocess.PIPE if is_of_training else subprocess.DEVNULL,
                stdout=2 if is_heard else self._out,
                stderr=2 if is_heard else self._err,
                env=environment,
                process_group=0,  # of this session: niceness counts within one alone (autogroup)
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._heard = self._complained = 0
        with suppress(OSError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, as soon as it has ended; ``None`` where that takes longer."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def no_more(self) -> None:
        """End its standard input, and say so: children that were forked may hold it open."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(BrokenPipeError):  # it has ended already
                stdin.write(END_OF_INPUT)
            with suppress(BrokenPipeError):
                stdin.close()

    def output(self) -> tuple[str, str]:
        """What it wrote to stdout, and the end of what it wrote to stderr."""
        return _read(self._out, 0), self.complaint()

    def complaint(self) -> str:
        """The end of what it has written to stderr since this was asked before."""
        size = os.fstat(self._err.fileno()).st_size
        last = size - 4 * _TAIL  # a command may have written gigabytes
        begin = max(self._complained, last)
        said = _read(self._err, begin)
        self._complained = begin + len(said.encode(errors="surrogateescape"))
        return said[-_TAIL:]

    def lines(self) -> list[str]:
        """The lines that it has written to stdout since this was asked before."""
        news, _, _ = _read(self._out, self._heard).rpartition("\n")
        self._heard += len(news.encode(errors="surrogateescape")) + bool(news)
        return news.splitlines()

    def end(self) -> None:
        """Have the process end, and all that it has started, if it has not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(0) is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                self.wait(_END_S)
        self.no_more()
        self._out.close()
        self._err.close()


UNTOLD = "internal"
"""The kind of error of a process that ended without a word."""


def _read(file: FileIO, begin: int) -> str:
    """What a file holds from a place on; its process goes on writing where it is."""
    content = b""
    while data := os.pread(file.fileno(), _READ_NBYTES, begin + len(content)):
        content += data
    return content.decode(errors="surrogateescape")


class Exported(Struct, frozen=True):
    """What an export in its own process told.

    Attributes:
        warnings: what should be known before it is used.
        error: why there is none.
    """

    warnings: tuple[str, ...] = ()
    error: Told | None = None


def start_export(checkpoint: Path, out_dir: Path, words: Sequence[str]) -> Job:
    """An export as ``zexport consolidate`` makes it, with its options in words."""
    return _ours("consolidate", str(checkpoint), str(out_dir), *words, "--quiet")


def start_watch(run: Path, outs: Path, words: Sequence[str]) -> Job:
    """What ``zexport watch`` does until ``no_more`` is called; commands after it may use GPUs."""
    given = ("watch", str(run), str(outs), *words, "--until-eof")
    return _ours(*given, is_of_training=True)


def _ours(*words: str, is_of_training: bool = False) -> Job:
    # -P: the working folder may be the run's, and nothing is imported from there
    program = (sys.executable, "-P", "-m", "zexport")
    return Job((*program, *words, "--json"), is_heard=False, is_of_training=is_of_training)


def told_by(job: Job, code: int) -> Exported:
    """What an export that has ended told; one that told no reason was ended from outside."""
    out, err = job.output()
    if code == 0:
        return decoded(out, Exported)
    with suppress(ValueError, msgspec.ValidationError):  # it was killed before, or after, it told
        return Exported(error=decoded(out, Failure).error)
    last = err.strip().rpartition("\n")[2]
    said = f"its process ended with code {code}" + (f": {last}" if last else "")
    return Exported(error=Told(max(code, 1), UNTOLD, None, said, ""))


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


def start_command(words: Sequence[str], out_dir: Path, step: int | None) -> Job:
    """Start the command after an export: ``{}`` is its folder, ``{step}`` its step."""
    values = {"{}": str(out_dir), "{step}": "" if step is None else str(step)}
    return Job([values.get(word, word) for word in words], is_heard=True)
