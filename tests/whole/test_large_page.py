"""The commands for many machines and for the Hub: each gives the bytes of one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stopping import files

ROOT = Path(__file__).parents[2]
RUN = "run/checkpoint-1000"
LIMIT_S = 400

_PROGRAMS = {
    "zexport": f'exec {sys.executable} -m zexport "$@"\n',
    "srun": 'SLURM_PROCID=0 SLURM_NTASKS=1 exec "$@"\n',
    "sbatch": "for n in 1 2; do SLURM_ARRAY_TASK_ID=$n SLURM_ARRAY_TASK_COUNT=2 "
    'SLURM_ARRAY_TASK_MIN=1 SLURM_CPUS_PER_TASK=1 bash "$@" || exit 1; done\n',
    "kubectl": f'exec {sys.executable} "$(dirname "$0")/pods.py" "$3"\n',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run --standalone "$@"\n',
}
_PODS = """
import os, subprocess, sys, yaml
spec = yaml.safe_load(open(sys.argv[1]))["spec"]
(container,) = spec["template"]["spec"]["containers"]
words = [word.removeprefix("/data/") for word in container["command"]]
for number in range(spec["completions"]):
    subprocess.run(words, check=True, env=os.environ | {"JOB_COMPLETION_INDEX": str(number)})
"""
"""Run each pod of a job in turn, with the working directory as its volume."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


def lines(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [line.partition("#")[0].strip() for line in "".join(blocks).splitlines()]


LINES = lines("large.md")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, the examples, the output of one process, and simulated launchers."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "bin").mkdir()
    for name, body in _PROGRAMS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}")
        (folder / "bin" / name).chmod(0o755)
    (folder / "bin" / "pods.py").write_text(_PODS)
    shutil.copytree(ROOT / "fixtures" / "z3_w2_bf16_frozen" / "ckpt", folder / RUN)
    shutil.copytree(ROOT / "examples", folder / "examples")
    _run(folder, f"zexport consolidate {RUN} whole")
    _run(folder, f"zexport reshard {RUN} whole-64 -n 64")
    return folder


def _run(folder: Path, *commands: str, **variables: str) -> None:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    pythonpath = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", "-euxc", "\n".join(commands)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": pythonpath} | variables,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _with(*words: str) -> Iterator[str]:
    found = [line for line in LINES if any(word in line for word in words)]
    assert found
    yield from found


def _check(folder: Path, made: str = "model", whole: str = "whole") -> None:
    assert files(folder / made) == files(folder / whole)
    assert not [*folder.glob(f"{made}.*")]
    shutil.rmtree(folder / made)


@pytest.mark.parametrize("launcher", ["sbatch", "kubectl", "torchrun"])
def test_launchers(launcher: str, place: Path) -> None:
    """Slurm and Kubernetes are simulated; torchrun is real, on one node."""
    (line,) = _with(f"{launcher} ")
    _run(place, line.replace("--nnodes 4", "--nnodes 1"))
    _check(place)
