"""Several real processes that export one checkpoint, started as launchers start them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from tests.support.forked import typed
from tests.support.stopping import files
from zexport.errors import OutputError, UsageError

ROOT = Path(__file__).parents[2]
CKPT = ROOT / "fixtures" / "z3_w2_bf16_frozen" / "ckpt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process alone makes."""
    out = tmp_path_factory.mktemp("whole") / "model"
    done = _zexport("consolidate", CKPT, out)
    assert done.returncode == 0, done.stderr
    return files(out)


def _started(
    words: Sequence[object], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    return subprocess.Popen(
        [*map(str, words)],
        env=own | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _zexport(*words: object) -> subprocess.CompletedProcess[str]:
    return typed(*words)


def _ended(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each printed; all of them went well."""
    told = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return [out for out, _ in told]


def test_workers_side_by_side_make_what_one_makes(whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "model"
    command = [sys.executable, "-m", "zexport", "consolidate", CKPT, out, "--json", "--part"]
    told = [*map(json.loads, _ended([_started([*command, f"{n}/4"]) for n in range(1, 5)]))]
    assert files(out) == whole
    published = [one for one in told if "files" in one]
    assert len(published) == 1
    assert set(published[0]["files"]) == set(whole)
    assert all("missing" in one for one in told if one not in published)
    (again,) = map(json.loads, _ended([_started([*command, "3/4"])]))  # as a requeued task is
    assert again["missing"] == []
    assert files(out) == whole


def test_an_array_job_of_slurm_makes_what_one_process_makes(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    """A stand-in for srun sets what Slurm sets for a task of an array."""
    bin_dir, out = tmp_path / "bin", tmp_path / "model"
    bin_dir.mkdir()
    srun = bin_dir / "srun"
    srun.write_text('#!/bin/sh\nSLURM_PROCID=0 SLURM_NTASKS=1 exec "$@"\n')
    srun.chmod(0o755)
    zexport = bin_dir / "zexport"
    zexport.write_text(f'#!/bin/sh\nexec {sys.executable} -m zexport "$@"\n')
    zexport.chmod(0o755)
    script = ["bash", ROOT / "examples" / "slurm.sbatch", CKPT, out]
    tasks = [
        _started(
            script,
            {
                "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
                "SLURM_CPUS_PER_TASK": "1",
                "SLURM_ARRAY_TASK_ID": str(number),
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_ARRAY_TASK_MIN": "1",
            },
        )
        for number in (1, 2, 3)
    ]
    _ended(tasks)
    assert files(out) == whole


def test_an_indexed_job_of_kubernetes_makes_what_one_process_makes(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    spec = yaml.safe_load((ROOT / "examples" / "k8s-job.yaml").read_text())["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    places = {"/data/run/checkpoint-1000": str(CKPT), "/data/model": str(tmp_path / "model")}
    words = [places.get(word, word) for word in container["command"][1:]]
    assert words[-1] == f"auto/{spec['completions']}"
    for first in range(0, spec["completions"], 4):  # four at a time: a pod waits for no other
        _ended(
            [
                _started(
                    [sys.executable, "-m", "zexport", *words],
                    {"JOB_COMPLETION_INDEX": str(number)},
                )
                for number in range(first, first + 4)
            ]
        )
    assert files(tmp_path / "model") == whole


def test_a_worker_that_is_killed_is_started_again(whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "model"
    command = [sys.executable, "-m", "zexport", "consolidate", CKPT, out, "--part"]
    killed = _started([*command, "1/2"])
    killed.kill()
    killed.communicate()
    _ended([_started([*command, "2/2"])])
    assert not out.exists()
    _ended([_started([*command, "1/2"])])
    assert files(out) == whole


def test_finish_names_the_parts_that_are_missing(tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert _zexport("consolidate", CKPT, out, "--part", "2/3").returncode == 0
    done = _zexport("finish", out)
    assert done.returncode == OutputError.exit_code
    assert "found 1 of 3, expected also 1/3, 3/3" in done.stderr


def test_finish_publishes_what_all_parts_have_left(whole: dict[str, bytes], tmp_path: Path) -> None:
    """The last worker's folder as it is a moment before it is completed."""
    out, before = tmp_path / "model", tmp_path / "before"
    for part in ("1/2", "2/2"):
        if part == "2/2":
            shutil.copytree(tmp_path / "model.partial", before)
        assert _zexport("consolidate", CKPT, out, "--part", part).returncode == 0
    shutil.rmtree(out)
    before.rename(tmp_path / "model.partial")
    (tmp_path / "model.partial.lock").touch()
    assert _zexport("consolidate", CKPT, out, "--part", "2/2").returncode == 0
    assert files(out) == whole


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--part", "1/2", "--engine", "deepspeed"), UsageError.exit_code, "native engine alone"),
        (("--part", "auto"), UsageError.exit_code, "auto needs the number of this process"),
        (("--part", "3"), UsageError.exit_code, "write 1/8 to 8/8, auto, or auto/8"),
    ],
)
def test_what_no_worker_can_mean_is_refused(
    words: tuple[str, ...], code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*os.environ]:
        if name in {"RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX"} or name.startswith("SLURM"):
            monkeypatch.delenv(name)
    done = _zexport("consolidate", CKPT, tmp_path / "model", *words)
    assert done.returncode == code
    assert told in done.stderr
    assert not [*tmp_path.iterdir()]
