"""Several real processes that export one checkpoint, started as launchers start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.forked import typed
from tests.support.stopping import files
from zexport import OutputError, UsageError

ROOT = Path(__file__).parents[2]
CKPT = ROOT / "fixtures" / "z3_w2_bf16_frozen" / "ckpt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process alone makes."""
    out = tmp_path_factory.mktemp("whole") / "model"
    done = typed("consolidate", CKPT, out)
    assert done.returncode == 0, done.stderr
    return files(out)


def _started(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zexport", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each printed; all of them went well."""
    told = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return [out for out, _ in told]


def test_workers_side_by_side_make_what_one_makes(whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "model"
    command = ["consolidate", CKPT, out, "--json", "--part"]
    told = [*map(json.loads, _ended([_started(*command, f"{n}/4") for n in range(1, 5)]))]
    assert files(out) == whole
    published = [one for one in told if "files" in one]
    assert len(published) == 1
    assert set(published[0]["files"]) == set(whole)
    assert all("missing" in one for one in told if one not in published)
    (again,) = map(json.loads, _ended([_started(*command, "3/4")]))  # as a requeued task is
    assert again["missing"] == []
    assert files(out) == whole


def test_a_worker_that_is_killed_is_started_again(whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "model"
    command = ["consolidate", CKPT, out, "--part"]
    killed = _started(*command, "1/2")
    killed.kill()
    killed.communicate()
    _ended([_started(*command, "2/2")])
    assert not out.exists()
    _ended([_started(*command, "1/2")])
    assert files(out) == whole


def test_finish_names_the_parts_that_are_missing(tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert typed("consolidate", CKPT, out, "--part", "2/3").returncode == 0
    done = typed("finish", out)
    assert done.returncode == OutputError.exit_code
    assert "lacks parts" in done.stderr
    assert "the comparison of replicas, by part 1" in done.stderr


@pytest.fixture
def _unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables of the launcher that runs the tests."""
    for name in [*os.environ]:
        if name in {"RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX"} or name.startswith("SLURM"):
            monkeypatch.delenv(name)


_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
_ARRAY = {
    "SLURM_ARRAY_TASK_ID": "14",
    "SLURM_ARRAY_TASK_COUNT": "3",
    "SLURM_ARRAY_TASK_MIN": "10",
    "SLURM_ARRAY_TASK_STEP": "4",
}
_ONE_TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


@pytest.mark.usefixtures("_unlaunched")
@pytest.mark.parametrize(
    ("variables", "part", "expected"),
    [
        ({"RANK": "2", "WORLD_SIZE": "8"}, "auto", (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "auto", (4, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "auto", (1, 4)),
        (_ONE_TASK | _TORCHRUN, "auto", (2, 2)),
        (_ONE_TASK | _ARRAY, "auto", (2, 3)),
        ({"JOB_COMPLETION_INDEX": "5"}, "auto/6", (6, 6)),
        (_TORCHRUN, "1/8", (1, 8)),
    ],
)
def test_each_launcher_gives_the_number_of_a_part(
    variables: dict[str, str], part: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    words = ("consolidate", CKPT, tmp_path / "model", "--part", part, "--json")
    printed = json.loads(typed(*words, **variables).stdout)
    assert (printed["part"], printed["parts"]) == expected


@pytest.mark.usefixtures("_unlaunched")
@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({}, "auto"),
        ({"JOB_COMPLETION_INDEX": "1"}, "auto"),
        (_TORCHRUN | {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, "auto"),
        ({"RANK": "9", "WORLD_SIZE": "8"}, "auto"),
        ({"RANK": "zero", "WORLD_SIZE": "8"}, "auto"),
        *(({}, part) for part in ("0/4", "5/4", "3", "a/b", "auto/0", "1/4/2", "")),
    ],
)
def test_ambiguous_or_impossible_part_is_refused(
    variables: dict[str, str], part: str, tmp_path: Path
) -> None:
    done = typed("consolidate", CKPT, tmp_path / "model", "--part", part, **variables)
    assert done.returncode == UsageError.exit_code
    assert "Invalid value for '--part'" in done.stderr
    assert not [*tmp_path.iterdir()]
