"""A Trainer on two ranks that saves at every step, keeps two checkpoints, and has the callback.

``torchrun --nproc-per-node 2 saving_often.py BASE OUT STEPS MODELS`` leaves in ``OUT.truth`` the
weights of the running engine at each save, and in ``OUT.on_save_s`` how long the callback took.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from tests.support.framework_runs import rows, training_arguments
from zexport.callbacks import ExportCallback
from zexport.train.worker import join_ranks

_PAUSE_S = 1.0
"""After each save, in which it can be exported."""


class _Truth(TrainerCallback):
    """Keeps the weights of every save, by the checkpoint's name."""

    def __init__(self, out: Path) -> None:
        self._folder = out.with_name(f"{out.name}.truth")
        self._folder.mkdir(parents=True, exist_ok=True)

    def on_save(self, _: Any, state: Any, __: Any, **more: Any) -> None:
        """Keep those of now."""
        weights = {name: one.detach().clone() for name, one in more["model"].named_parameters()}
        if state.is_world_process_zero:
            save_file(weights, self._folder / f"checkpoint-{state.global_step}.safetensors")
        time.sleep(_PAUSE_S)


class _Timed(ExportCallback):
    """Notes how long each save took."""

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Export as always."""
        began = time.perf_counter()
        super().on_save(args, state, control, **more)
        if state.is_world_process_zero:
            with Path(f"{args.output_dir}.on_save_s").open("a") as file:
                file.write(f"{time.perf_counter() - began}\n")


def main(base: str, out: str, steps: int, models: str) -> None:
    """Train to ``steps``."""
    join_ranks(300)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    settings = training_arguments(Path(out)) | {"max_steps": steps, "save_total_limit": 2}
    exporting = _Timed(models, dtype="bf16", newest_only=False, interval_s=0.2)
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=TrainingArguments(**settings, deepspeed=config),
        train_dataset=rows(),  # type: ignore[arg-type]
        data_collator=default_data_collator,
        callbacks=[_Truth(Path(out)), exporting],
    ).train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
