"""Runs of the real ``zexport train`` command, for the tests that look at what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.exports import edit_json
from tests.support.published import check

REPOSITORY = Path(__file__).parents[2]
TRAIN = (sys.executable, "-m", "zexport", "train")
LIMIT_S = 180
FIXTURE_RUN = REPOSITORY / "fixtures" / "z3_w2_bf16" / "ckpt"
"""A run of two ranks, saved at its second step."""


@dataclass(frozen=True)
class Run:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        return json.loads(self.stdout)


def run(*arguments: object, command: tuple[str, ...] = TRAIN, **environment: str) -> Run:
    """The command, run to its end."""
    done = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": _parent(arguments[0])} | environment,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr)


def trained(*arguments: object, command: tuple[str, ...] = TRAIN, **environment: str) -> Run:
    """The command, run to a good end."""
    done = run(*arguments, "--json", command=command, **environment)
    assert done.status == 0, done.stderr
    check("train", done.result)
    return done


def fixture_run(out: Path) -> Path:
    """A copy of that run, with options that this version reads."""
    shutil.copytree(FIXTURE_RUN, out)
    edit_json(out / "zexport_train.json", schema=2)
    return out


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The command while it trains: its first step is done when the context begins."""
    process = subprocess.Popen(
        [*TRAIN, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": _parent(arguments[0])},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("step "), line + process.stderr.read()
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _parent(out: object) -> str:
    """Where a run's logs go, so that those of a failed one end with the test's folder."""
    return str(Path(str(out)).parent)


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Rank to process id of the workers that a running command has started."""
    workers = [pid for pid in everything_under(process) if b"zexport.train.launch" in _words(pid)]
    ranks = {int(_environment(pid).get("RANK", -1)): pid for pid in workers}
    return {rank: pid for rank, pid in ranks.items() if rank >= 0}


def gone(pids: list[int], within_s: float) -> bool:
    """Whether all the processes are gone in time."""
    end = time.monotonic() + within_s
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def ended(process: subprocess.Popen[str], within_s: float) -> Run:
    """The command once it has ended by itself, which it must do in time."""
    stdout, stderr = process.communicate(timeout=within_s)
    return Run(process.returncode, stdout, stderr)


def everything_under(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a running command has started, launcher and ranks."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found, new = [], [process.pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def _words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def _environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text()
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
