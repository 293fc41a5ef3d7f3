"""``--part`` and ``finish``: parts as launchers number them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import run
from tests.support.forked import typed
from tests.support.stopping import files
from zexport import consolidate

CKPT = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16_frozen" / "ckpt"
_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
_ARRAY = {
    "SLURM_ARRAY_TASK_ID": "14",
    "SLURM_ARRAY_TASK_COUNT": "3",
    "SLURM_ARRAY_TASK_MIN": "10",
    "SLURM_ARRAY_TASK_STEP": "4",
}
_ONE_TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


def _part(out: Path, part: str, **variables: str) -> dict[str, Any]:
    done = typed("consolidate", CKPT, out, "--json", "--part", part, **variables)
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_last_part_publishes_what_one_process_writes(tmp_path: Path) -> None:
    consolidate(CKPT, tmp_path / "whole")
    whole, out = files(tmp_path / "whole"), tmp_path / "model"
    first = run("consolidate", CKPT, out, "--part", "2/2")
    assert first.exit_code == 0
    assert "missing 1/2; the last part publishes the folder" in " ".join(first.stdout.split())
    unfinished = run("finish", out)
    assert unfinished.exit_code == 6
    assert "by part 1" in unfinished.stderr
    assert not out.exists()
    assert {*_part(out, "1/2")["files"]} == {*whole}
    assert files(out) == whole
    assert _part(out, "2/2")["missing"] == []  # such as a requeued task
    assert files(out) == whole


@pytest.fixture
def _unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables of the launcher that runs the tests."""
    for name in [*os.environ]:
        if name in {"RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX"} or name.startswith("SLURM"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("_unlaunched")
@pytest.mark.parametrize(
    ("variables", "part", "expected"),
    [
        ({"RANK": "2", "WORLD_SIZE": "8"}, "auto", (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "auto", (4, 4)),
        (_ONE_TASK | _TORCHRUN, "auto", (2, 2)),
        (_ONE_TASK | _ARRAY, "auto", (2, 3)),
        ({"JOB_COMPLETION_INDEX": "5"}, "auto/6", (6, 6)),
        (_TORCHRUN, "1/8", (1, 8)),
    ],
)
def test_launcher_numbers_the_part(
    variables: dict[str, str], part: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    printed = _part(tmp_path / "model", part, **variables)
    assert (printed["part"], printed["parts"]) == expected


@pytest.mark.usefixtures("_unlaunched")
@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({}, "auto"),
        ({"JOB_COMPLETION_INDEX": "1"}, "auto"),
        (_TORCHRUN | {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, "auto"),
        ({"RANK": "9", "WORLD_SIZE": "8"}, "auto"),
        *(({}, part) for part in ("0/4", "5/4", "3", "auto/0")),
    ],
)
def test_ambiguous_or_impossible_part_is_refused(
    variables: dict[str, str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = run("consolidate", CKPT, tmp_path / "model", "--part", part)
    assert done.exit_code == 2
    assert "Invalid value for '--part'" in done.stderr
    assert not [*tmp_path.iterdir()]
