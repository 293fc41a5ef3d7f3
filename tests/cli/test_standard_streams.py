"""Standard streams that are closed or full: the work is done, the exit code says what was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zexport import verify_export

ZERO3 = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt"


def run(words: str, redirections: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """A command line with shell redirections; ``$NAME`` are the variables."""
    script = f'"$PYTHON" -m zexport {words} {redirections}'
    environment = {name: str(value) for name, value in variables.items()}
    return subprocess.run(
        ["/bin/sh", "-c", script],
        env={**os.environ, "PYTHON": sys.executable, "CKPT": str(ZERO3), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("mode", ["", "--json"])
@pytest.mark.parametrize(
    ("redirections", "code"),
    [
        ("2>&-", 0),
        (">&-", 0),
        ("<&- >&- 2>&-", 0),
        ("2>/dev/full", 0),
        (">/dev/full", 6),
        (">/dev/full 2>&1", 6),
    ],
)
def test_an_export_is_complete_whatever_becomes_of_its_streams(
    tmp_path: Path, redirections: str, code: int, mode: str
) -> None:
    out = tmp_path / "model"
    words = f'consolidate "$CKPT" "$OUT" --layout memory --progress json {mode}'
    done = run(words, redirections, OUT=out)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert verify_export(out).ok
    if mode and redirections in ("2>&-", "2>/dev/full"):
        assert json.loads(done.stdout)["tensors"] == 21


@pytest.mark.parametrize("mode", ["", "--json"])
@pytest.mark.parametrize("words", ['inspect "$CKPT"', 'verify "$MODEL"', 'diff "$MODEL" "$MODEL"'])
def test_a_result_that_cannot_be_written_ends_with_6(tmp_path: Path, words: str, mode: str) -> None:
    model = tmp_path / "model"
    assert run('consolidate "$CKPT" "$OUT" -q', "", OUT=model).returncode == 0
    done = run(f"{words} {mode}", ">/dev/full", MODEL=model)
    assert done.returncode == 6
    assert done.stderr.startswith("Error: the result cannot be written to standard output: No sp")
    assert done.stderr.count("\n") == 1
    assert run(f"{words} {mode}", ">&- 2>&-", MODEL=model).returncode == 0


def test_a_failure_that_cannot_be_told_keeps_its_exit_code(tmp_path: Path) -> None:
    for redirections in (">/dev/full", ">&-", "2>/dev/full", "2>&-"):
        done = run('inspect "$CKPT" --json', redirections, CKPT=tmp_path / "nothing")
        assert done.returncode == 3
        assert "Traceback" not in done.stderr
