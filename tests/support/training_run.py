"""A real training run, and what must be true of exports made while it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 400


def make_base(folder: Path) -> Path:
    """Make a small base model."""
    ignored = shutil.ignore_patterns("global_*", "latest")
    shutil.copytree(REPOSITORY / "fixtures" / "z3_w2_bf16" / "ckpt", folder, ignore=ignored)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Training:
    """A run on two ranks that saves at every step, keeps two checkpoints and has the callback."""

    base: Path
    out: Path
    steps: int
    models: Path

    @property
    def environment(self) -> dict[str, str]:
        settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        return os.environ | settings | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}

    def finish(self) -> None:
        """Train to the end."""
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        script = REPOSITORY / "tests" / "support" / "saving_often.py"
        done = subprocess.run(
            [sys.executable, *ranks, script, self.base, self.out, str(self.steps), self.models],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def on_save_s(self) -> list[float]:
        """Return how long the callback took at each save."""
        return [float(line) for line in _beside(self.out, "on_save_s").read_text().splitlines()]

    def truths(self) -> dict[str, dict[str, torch.Tensor]]:
        """The engine's weights at each save, by the checkpoint's name."""
        folder = _beside(self.out, "truth")
        return {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def _beside(out: Path, ending: str) -> Path:
    return out.with_name(f"{out.name}.{ending}")


def assert_is(model: Path, truth: dict[str, torch.Tensor]) -> None:
    """Assert that a bf16 model is what the engine had, rounded."""
    found = load_file(model / "model.safetensors")
    assert found.keys() <= truth.keys() <= {*found, "lm_head.weight"}
    assert all(torch.equal(found[name], truth[name].bfloat16()) for name in found), model
