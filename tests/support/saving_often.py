"""A Trainer on two ranks that saves every second, and keeps two checkpoints.

``torchrun --nproc-per-node 2 saving_often.py BASE OUT STEPS`` leaves in ``OUT.truth`` the weights
of the running engine at each save.
"""

from __future__ import annotations

import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from tests.support import framework_runs
from zexport.train.ranks import join_ranks


class _Truth(TrainerCallback):
    """Keeps the weights of every save, by the checkpoint's name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_save(self, _: Any, state: Any, __: Any, **more: Any) -> None:
        """Keep those of now."""
        model: nn.Module = more["model"]
        weights = {name: one.detach().clone() for name, one in model.named_parameters()}
        if state.is_world_process_zero:
            self._folder.mkdir(exist_ok=True)
            save_file(weights, self._folder / f"checkpoint-{state.global_step}.safetensors")
        time.sleep(1)


def main(base: Path, out: Path, steps: int) -> None:
    """Train for so many steps."""
    join_ranks(300)
    framework_runs.STEPS = steps
    arguments = framework_runs.arguments_of(out)
    config = deepcopy(arguments["deepspeed"]) | {"zero_optimization": {"stage": 2}}
    more = {"max_steps": steps, "save_total_limit": 2, "learning_rate": 1e-2, "deepspeed": config}
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=TrainingArguments(**arguments | more),
        train_dataset=framework_runs.lines_of(base),
        data_collator=default_data_collator,
        callbacks=[_Truth(out.with_name(f"{out.name}.truth"))],
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
