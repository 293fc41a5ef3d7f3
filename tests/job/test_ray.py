"""``--ray``: the bytes of one process, even if a worker is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import zexport
from tests.support.cli import run
from tests.support.stopping import SHARD_WORDS, Job, four_shards
from zexport import MissingExtraError, ReshardOptions, UsageError

ROOT = Path(__file__).parents[2]
CKPT = ROOT / "fixtures" / "z3_w2_bf16_frozen" / "ckpt"
LIMIT_S = 180

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]

_FAULTS = """
import errno, os, signal, time
pwrite, mine = os.pwrite, []
def faulty(*args):
    if b"ray::" in open("/proc/self/cmdline", "rb").read():
        for kind in os.environ["TEST_KINDS"].split():
            try:
                os.close(os.open(f"{os.environ['TEST_MARK']}-{kind}", os.O_CREAT | os.O_EXCL))
                mine.extend([kind] * 7)
                break
            except FileExistsError:
                pass
        if mine:
            kind = mine.pop()
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "stale":
                raise OSError(errno.ESTALE, "Stale file handle")
            time.sleep(600)
    return pwrite(*args)
os.pwrite = faulty
"""
"""A worker that writes is killed, one is refused seven times, or one hangs."""


def _files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def _typed(*words: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zexport", *map(str, words), "--quiet"]
    return subprocess.Popen(
        command, env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )


def _ended(process: subprocess.Popen[str], code: int = 0) -> str:
    stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == code, stderr
    return stderr


def _started_with_faults(
    kinds: str, tmp_path: Path, *words: object
) -> tuple[subprocess.Popen[str], Path]:
    """Start a command with faulty workers; return it, and the start of the files they leave."""
    (tmp_path / "sitecustomize.py").write_text(_FAULTS)
    path, mark = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", tmp_path / "mark"
    words = (*words, "--ray", "local", "--jobs", 1)
    started = _typed(*words, PYTHONPATH=path, TEST_KINDS=kinds, TEST_MARK=str(mark))
    return started, mark


@pytest.mark.parametrize("source", ["zero", "fsdp"])
def test_parts_of_lost_and_failing_workers_are_written_again(source: str, tmp_path: Path) -> None:
    if source == "zero":
        job = Job(CKPT, tmp_path / "one", ReshardOptions(world_size=3))
        words: tuple[object, ...] = ("reshard", CKPT, tmp_path / "ray", "-n", 3)
    else:
        job = replace(four_shards(tmp_path, fsdp=True), out=tmp_path / "one")
        words = ("consolidate", job.source, tmp_path / "ray", *SHARD_WORDS)
    process, mark = _started_with_faults("killed stale", tmp_path, *words)
    _ended(process)
    job.run()
    assert all(mark.with_name(f"mark-{kind}").exists() for kind in ("killed", "stale"))
    assert _files(tmp_path / "ray") == _files(tmp_path / "one")


def _tasks(mark: Path) -> list[Path]:
    """Return the processes of this test that run a task."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = str(mark).encode() in (process / "environ").read_bytes()
            if is_ours and b"ray::_write_part" in (process / "cmdline").read_bytes():
                found.append(process)
    return found


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_interrupt_leaves_no_task_and_a_rerun_continues(tmp_path: Path) -> None:
    words = ("consolidate", CKPT, tmp_path / "model")
    process, mark = _started_with_faults("hangs", tmp_path, *words)
    _wait_until(lambda: mark.with_name("mark-hangs").exists() and bool(_tasks(mark)))
    process.send_signal(signal.SIGINT)
    assert "Interrupted." in _ended(process, 130)
    _wait_until(lambda: not _tasks(mark))  # Ray ends workers a moment after the driver
    assert "zexport_manifest.json" not in _files(tmp_path / "model")
    _ended(_typed("consolidate", CKPT, tmp_path / "model", "--ray", "local"))
    zexport.consolidate(CKPT, tmp_path / "one")
    assert _files(tmp_path / "model") == _files(tmp_path / "one")


def test_missing_ray_and_missing_cluster_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["consolidate", str(CKPT), str(tmp_path / "model"), "--ray", "auto"]
    with pytest.raises(UsageError, match="Ray cluster"):
        run(*words).or_raise()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"\[ray\]"):
        run(*words).or_raise()
    assert not [*tmp_path.iterdir()]
