"""A real training run, and what must be true of exports made while it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """A run on two ranks that saves at every step and keeps two checkpoints."""

    base: Path
    out: Path
    steps: int
    pause_s: float = 1.0
    models: str = ""

    @property
    def environment(self) -> dict[str, str]:
        settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        return os.environ | settings | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}

    def start(self) -> subprocess.Popen[str]:
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        script = REPOSITORY / "tests" / "support" / "saving_often.py"
        words = (self.base, self.out, self.steps, self.pause_s, *filter(None, [self.models]))
        return subprocess.Popen(
            [sys.executable, *ranks, *map(str, (script, *words))],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> None:
        """Train to the end."""
        process = self.start()
        _, said = process.communicate(timeout=LIMIT_S + 5 * self.steps)
        assert process.returncode == 0, said[-3000:]

    def log(self, key: str) -> dict[int, Any]:
        """Return the last value of a key for every step."""
        text = self.out.with_name(f"{self.out.name}.log.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return {line["step"]: line[key] for line in lines if key in line}

    def truths(self) -> dict[str, dict[str, torch.Tensor]]:
        """The engine's weights at each save, by the checkpoint's name."""
        folder = self.out.with_name(f"{self.out.name}.truth")
        return {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def assert_is(model: Path, truth: dict[str, torch.Tensor]) -> None:
    """Assert that a bf16 model is what the engine had, rounded."""
    found = load_file(model / "model.safetensors")
    assert found.keys() <= truth.keys() <= {*found, "lm_head.weight"}
    assert all(torch.equal(found[name], truth[name].bfloat16()) for name in found), model


def assert_all_exported(training: Training, models: Path, lost: Iterable[str] = ()) -> int:
    """Check that every checkpoint is exported or reported lost, and return the number exported."""
    truths, gone = training.truths(), {*lost}
    assert len(truths) == training.steps
    there = {name for name in truths if (models / name).exists()}
    assert truths.keys() - there <= gone
    for name in there:
        assert_is(models / name, truths[name])
    return len(there)
