"""A Trainer on two ranks that saves at every step, and keeps two checkpoints.

``torchrun --nproc-per-node 2 saving_often.py BASE OUT STEPS PAUSE [MODELS]`` resumes from the last
checkpoint, as a launcher would have it, and exports to MODELS by the callback. It leaves in
``OUT.truth`` the weights of the running engine at each save, and in ``OUT.log.jsonl`` a line for
each step's loss, and for each save when it was and how long the callback took.
"""

from __future__ import annotations

import json
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
from transformers.trainer_utils import get_last_checkpoint

from tests.support import framework_runs
from zexport.train.worker import join_ranks


class _Truth(TrainerCallback):
    """Keeps the weights of every save, by the checkpoint's name, and notes losses."""

    def __init__(self, out: Path, pause_s: float) -> None:
        self._folder = out.with_name(f"{out.name}.truth")
        self._log = out.with_name(f"{out.name}.log.jsonl")
        self._pause_s = pause_s

    def note(self, **entry: Any) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_save(self, _: Any, state: Any, __: Any, **more: Any) -> None:
        """Keep those of now."""
        model: nn.Module = more["model"]
        weights = {name: one.detach().clone() for name, one in model.named_parameters()}
        if state.is_world_process_zero:
            self._folder.mkdir(exist_ok=True)
            file = self._folder / f"checkpoint-{state.global_step}.safetensors"
            save_file(weights, file.with_suffix(".new"))
            file.with_suffix(".new").rename(file)
            self.note(step=state.global_step, saved_at=time.time())
        time.sleep(self._pause_s)

    def on_log(self, _: Any, state: Any, __: Any, logs: Any, **___: Any) -> None:
        """Note a step's loss."""
        if state.is_world_process_zero and "loss" in logs:
            self.note(step=state.global_step, loss=logs["loss"])


def _timed(callback: TrainerCallback, truth: _Truth) -> TrainerCallback:
    whole = callback.on_save

    def on_save(args: Any, state: Any, control: Any, **more: Any) -> None:
        began = time.perf_counter()
        whole(args, state, control, **more)
        if state.is_world_process_zero:
            truth.note(step=state.global_step, on_save_s=time.perf_counter() - began)

    callback.on_save = on_save
    return callback


def main(base: Path, out: Path, steps: int, pause_s: float, models: str = "") -> None:
    """Train to ``steps``, from the last checkpoint if there is one."""
    join_ranks(300)
    framework_runs.STEPS = steps
    arguments = framework_runs.arguments_of(out)
    config = deepcopy(arguments["deepspeed"]) | {"zero_optimization": {"stage": 2}}
    more = {"max_steps": steps, "save_total_limit": 2, "learning_rate": 1e-2, "deepspeed": config}
    truth = _Truth(out, pause_s)
    callbacks: list[TrainerCallback] = [truth]
    if models:
        from zexport.callbacks import ExportCallback

        exporting = ExportCallback(models, dtype="bf16", newest_only=False, interval_s=0.2)
        callbacks.append(_timed(exporting, truth))
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=TrainingArguments(**arguments | more | {"logging_steps": 1}),
        train_dataset=framework_runs.lines_of(base),
        data_collator=default_data_collator,
        callbacks=callbacks,
    )
    last = get_last_checkpoint(str(out)) if out.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:])
