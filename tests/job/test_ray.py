"""Exports by a Ray cluster of this machine: the bytes of one process, whatever befalls a worker."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from zexport import MissingExtraError, UsageError
from zexport.cli.main import cli
from zexport.filenames import MANIFEST_NAME

ROOT = Path(__file__).parents[2]
CKPT = ROOT / "fixtures" / "z3_w2_bf16_frozen" / "ckpt"
LIMIT_S = 180

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]

_BEFALLEN = """
import errno, os, signal, time
pwrite, mine = os.pwrite, []
def befallen(*args):
    if b"ray::" in open("/proc/self/cmdline", "rb").read():
        try:
            os.close(os.open(os.environ["TEST_MARK"], os.O_CREAT | os.O_EXCL))
            mine.extend(range(7))
        except FileExistsError:
            pass
        if mine and mine.pop() >= 0:
            kind = os.environ["TEST_KIND"]
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "stale":
                raise OSError(errno.ESTALE, "Stale file handle")
            time.sleep(600)
    return pwrite(*args)
os.pwrite = befallen
"""
"""The first worker that writes is killed, is refused seven times, or hangs."""


def _files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def _typed(*words: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zexport", *map(str, words), "--quiet"]
    return subprocess.Popen(
        command, env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )


def _ended(process: subprocess.Popen[str], code: int = 0) -> str:
    said = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == code, said
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that one process writes."""
    out = tmp_path_factory.mktemp("whole") / "model"
    _ended(_typed("consolidate", CKPT, out))
    return _files(out)


def test_lines_of_the_page_make_what_one_process_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "large.md").read_text(encoding="utf-8")
    section = page.partition("\n## Ray\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^zexport (.*) --ray auto$", section, re.MULTILINE)
    shutil.copytree(CKPT, tmp_path / "run" / "checkpoint-1000")
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = line.split()
        _ended(_typed(*words, "--ray", "local"))
        _ended(_typed(*words[:2], "whole", *words[3:]))
        assert _files(Path(words[2])) == _files(Path("whole"))
        shutil.rmtree("whole")
    assert len(lines) == 2


def _befallen(kind: str, tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start an export of which one worker is befallen; return it, and what exists once it is."""
    (tmp_path / "sitecustomize.py").write_text(_BEFALLEN)
    path, mark = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", tmp_path / "mark"
    words = ("consolidate", CKPT, tmp_path / "model", "--ray", "local", "--jobs", 1)
    started = _typed(*words, PYTHONPATH=path, TEST_KIND=kind, TEST_MARK=str(mark))
    return started, mark


@pytest.mark.parametrize("kind", ["killed", "stale"])
def test_share_of_a_lost_or_faltering_worker_is_written_again(
    kind: str, whole: dict[str, bytes], tmp_path: Path
) -> None:
    process, mark = _befallen(kind, tmp_path)
    _ended(process)
    assert mark.exists()
    assert _files(tmp_path / "model") == whole


def _tasks(mark: Path) -> list[Path]:
    """Return the processes of this test that run a task."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = str(mark).encode() in (process / "environ").read_bytes()
            if is_ours and b"ray::_write_part" in (process / "cmdline").read_bytes():
                found.append(process)
    return found


def test_interrupt_leaves_no_task_and_a_rerun_continues(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    process, mark = _befallen("hangs", tmp_path)
    deadline = time.monotonic() + LIMIT_S
    while not mark.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert _tasks(mark)
    process.send_signal(signal.SIGINT)
    assert "Interrupted." in _ended(process, 130)
    assert not _tasks(mark)
    assert MANIFEST_NAME not in _files(tmp_path / "model")
    _ended(_typed("consolidate", CKPT, tmp_path / "model", "--ray", "local"))
    assert _files(tmp_path / "model") == whole


def test_missing_ray_and_missing_cluster_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["consolidate", str(CKPT), str(tmp_path / "model"), "--ray", "auto"]
    with pytest.raises(UsageError, match="Ray cluster"):
        cli.main(words, standalone_mode=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"\[ray\]"):
        cli.main(words, standalone_mode=False)
    assert not [*tmp_path.iterdir()]
