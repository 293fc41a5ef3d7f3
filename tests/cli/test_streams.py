"""Closed and full standard streams: the work is done, and the exit code reports the rest."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from zexport import consolidate, verify_export

ZERO3 = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt"


def run(words: str, redirections: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run a command line of a shell; ``$NAME`` are the variables."""
    environment = {name: str(value) for name, value in variables.items()}
    return subprocess.run(
        ["/bin/sh", "-c", f'"$PYTHON" -m zexport {words} {redirections}'],
        env={**os.environ, "PYTHON": sys.executable, "CKPT": str(ZERO3), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("redirections", "code"),
    [("2>&-", 0), ("<&- >&- 2>&-", 0), ("2>/dev/full", 0), (">/dev/full 2>&1", 6)],
)
def test_export_is_complete_with_closed_or_full_streams(
    tmp_path: Path, redirections: str, code: int
) -> None:
    out = tmp_path / "model"
    words = 'consolidate "$CKPT" "$OUT" --layout memory --progress json --json'
    done = run(words, redirections, OUT=out)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert verify_export(out).ok
    if redirections in ("2>&-", "2>/dev/full"):
        assert json.loads(done.stdout)["tensors"] == 21


@pytest.mark.parametrize("words", ['inspect "$CKPT"', 'verify "$MODEL" --json'])
def test_result_that_cannot_be_written_exits_with_6(tmp_path: Path, words: str) -> None:
    consolidate(ZERO3, tmp_path / "model")
    done = run(words, ">/dev/full", MODEL=tmp_path / "model")
    assert done.returncode == 6
    assert done.stderr.startswith("Error: cannot write the result to stdout: No space left")
    assert done.stderr.count("\n") == 1
    assert run(words, ">&- 2>&-", MODEL=tmp_path / "model").returncode == 0


def test_terminal_shows_a_bar_and_then_lines_that_fit(tmp_path: Path) -> None:
    shutil.copytree(ZERO3, tmp_path / "ckpt")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    words = ("-m", "zexport", "consolidate", "ckpt", "model", "--layout", "memory")
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "NO_COLOR"):
        environment.pop(name, None)
    shown = b""
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
    ) as process:  # fmt: skip
        os.close(theirs)
        while more := _read(ours):
            shown += more
    os.close(ours)
    bar, _, report = shown.decode().rpartition("\x1b[2K")
    assert process.returncode == 0
    assert re.search(r"Preparing.*Writing.*Verifying", bar, re.DOTALL)
    assert report.startswith("\x1b[32m\x1b[1mExported to model")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", report).splitlines()
    assert max(map(len, lines)) <= 50 < len(report)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side is closed
        return b""
