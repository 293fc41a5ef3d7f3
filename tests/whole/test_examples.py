"""The examples, run as a reader would run them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training_run import make_base

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = ("train", "inspect", "export", "verify")
LIMIT_S = 240

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the variables of an activated environment with its own cache."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cache = str(tmp_path_factory.mktemp("cache"))
    return os.environ | {"PATH": path, "XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"}


def ran(*words: object, cwd: Path, env: Mapping[str, str], limit_s: int = LIMIT_S) -> str:
    """Return the stdout of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=cwd,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, environment: Mapping[str, str]) -> Path:
    """Return the folder of pipeline.sh, with its output in ``stdout``."""
    folder = tmp_path_factory.mktemp("pipeline")
    printed = ran("bash", EXAMPLES / "pipeline.sh", folder / "work", cwd=folder, env=environment)
    (folder / "work" / "stdout").write_text(printed)
    return folder / "work"


def loss_of(printed: str) -> float:
    return float(printed.rsplit(maxsplit=1)[-1])


def test_shell_pipeline_writes_json_for_every_step(work: Path) -> None:
    steps = {name: json.loads((work / f"{name}.json").read_text()) for name in STEPS}
    assert all(step["schema"] == 2 for step in steps.values())
    assert steps["train"]["steps"] == 20
    assert steps["inspect"]["verdict"]["exportable"] is True
    assert steps["export"]["loadable"] is True
    assert (steps["verify"]["ok"], steps["verify"]["against_checkpoint"]) == (True, True)
    assert 0 < loss_of((work / "stdout").read_text()) < math.log(384) + 0.5


def test_model_of_the_shell_pipeline_loads_in_bf16(work: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(work / "model", output_loading_info=True)
    assert not any(loading.values())
    assert model.dtype is torch.bfloat16
    stored = load_file(work / "model" / "model.safetensors")
    state = model.state_dict()
    assert stored
    assert all(torch.equal(state[name], value) for name, value in stored.items())


def test_shell_pipeline_stops_before_the_export_if_a_rank_file_is_missing(
    work: Path, tmp_path: Path, environment: Mapping[str, str]
) -> None:
    (tmp_path / "zexport").write_text(
        "#!/usr/bin/env bash\n"
        f'[ "$1" = train ] && cp -r "{work}/run" "{tmp_path}/work/" '
        f'&& rm "{tmp_path}/work/run/global_step20"/*zero_pp_rank_1*optim* && echo "{{}}" && exit\n'
        f'exec "{sys.executable}" -m zexport "$@"\n'
    )
    (tmp_path / "zexport").chmod(0o755)
    (tmp_path / "work").mkdir()
    path = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", str(EXAMPLES / "pipeline.sh"), str(tmp_path / "work")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**environment, "PATH": path},
        check=False,
    )
    assert done.returncode == 1
    assert "not exportable: " in done.stderr
    assert not (tmp_path / "work" / "model").exists()


def test_python_pipeline_gives_the_same_weights_and_loss(
    work: Path, tmp_path: Path, environment: Mapping[str, str]
) -> None:
    words = (sys.executable, EXAMPLES / "pipeline.py", work / "run", tmp_path / "model")
    printed = ran(*words, cwd=tmp_path, env=environment)
    assert printed.startswith("ZeRO-3, 2 ranks, step 20\n")
    assert loss_of(printed) == loss_of((work / "stdout").read_text())
    shell, python = ((w / "model" / "model.safetensors").read_bytes() for w in (work, tmp_path))
    assert shell == python


def test_model_generates_text(work: Path, tmp_path: Path, environment: Mapping[str, str]) -> None:
    words = (sys.executable, EXAMPLES / "generate.py", work / "model", "The tide")
    printed = ran(*words, cwd=tmp_path, env=environment)
    assert "no missing and no unexpected key" in printed
    assert "The tide" in printed.splitlines()[1]


LM_EVAL = """#!/usr/bin/env python3
import json, pathlib, sys
path = pathlib.Path(sys.argv[sys.argv.index("--output_path") + 1])
assert (pathlib.Path(sys.argv[4].split("=")[1].split(",")[0]) / "model.safetensors").exists()
path.parent.mkdir(exist_ok=True)
score = {"step-2": 9e99, "step-4": 0.5, "step-6": 0.7}[path.stem]
path.write_text(json.dumps({"results": {"tide": {"word_perplexity,none": score}}}))
"""
"""In place of lm-eval, which takes long: scores each model by its step."""


@pytest.mark.timeout(4 * LIMIT_S)
def test_best_of_run_keeps_the_best_model(tmp_path: Path, environment: Mapping[str, str]) -> None:
    base = make_base(tmp_path / "base")
    work = tmp_path / "work"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lm_eval").write_text(LM_EVAL)
    (tmp_path / "bin" / "lm_eval").chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), environment["PATH"]])
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    loop = (EXAMPLES / "best_of_run" / "loop.sh", base, work)
    printed = ran("bash", *loop, cwd=tmp_path, env={**environment, **own}, limit_s=4 * LIMIT_S)
    assert "step 4: perplexity 0.50, the best" in printed
    for folder in (work / "run", work / "models"):
        found = {path.name for path in folder.glob("*checkpoint-*")}
        assert found == {f"checkpoint-{step}" for step in (2, 4, 6)}
    best, kept = (work / one / "model.safetensors" for one in ("best", "models/checkpoint-4"))
    assert best.read_bytes() == kept.read_bytes()
