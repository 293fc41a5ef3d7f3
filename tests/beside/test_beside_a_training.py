"""A watch beside a training that really trains, and removes its checkpoints as it goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

REPOSITORY = Path(__file__).parents[2]
STEPS = 12
LIMIT_S = 400


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(2 * LIMIT_S)
def test_every_save_is_exported_as_the_engine_had_it_though_the_run_keeps_two(
    tmp_path: Path,
) -> None:
    """The watch is ended in the middle; the next one goes on with what was kept."""
    base, out, models = (tmp_path / name for name in ("base", "out", "models"))
    ignored = shutil.ignore_patterns("global_*", "latest")
    shutil.copytree(REPOSITORY / "fixtures" / "z3_w2_bf16" / "ckpt", base, ignore=ignored)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).save_pretrained(base)
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | settings | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "zexport", "watch", str(out), str(models), "--dtype", "bf16"]
    watching = subprocess.Popen([*command, "--interval", "0.2"], env=environment)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = str(REPOSITORY / "tests" / "support" / "saving_often.py")
    trained = subprocess.run(
        [sys.executable, *ranks, script, str(base), str(out), str(STEPS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    watching.send_signal(signal.SIGTERM)
    assert watching.wait(60) == 130
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert len([*out.glob("checkpoint-*")]) == 2
    subprocess.run([*command, "--once"], env=environment, timeout=LIMIT_S, check=True)
    truths = sorted(tmp_path.glob("out.truth/*.safetensors"))
    assert len(truths) == STEPS
    for truth in truths:
        found = load_file(models / truth.stem / "model.safetensors")
        expected = load_file(truth)
        assert found.keys() <= expected.keys() <= {*found, "lm_head.weight"}
        assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found), truth
