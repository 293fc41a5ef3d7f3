"""A Trainer on the ranks of the CPU that saves at every second step, and notes its times.

``torchrun --nproc-per-node 2 -m benchmarks.callback_training OUT STEPS LAYERS [MODELS]`` exports to
MODELS by the callback. Each rank leaves ``OUT.N.json``: seconds from one step to the next, by the
clock and of its own processor time, a save that came between them included.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from zexport.callbacks import ExportCallback
from zexport.train.worker import join_ranks

_LENGTH = 64
_VOCABULARY = 4096
_SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class _Clock(TrainerCallback):
    """Notes when each step begins."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note it."""
        self.times.append((time.perf_counter(), time.process_time()))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The last save is made; exports are waited for after this."""
        self.on_step_begin()


def main(out: Path, steps: int, layers: int, models: str = "") -> None:
    """Train."""
    join_ranks(300)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, vocab_size=_VOCABULARY, num_hidden_layers=layers
    )
    lines = torch.randint(_VOCABULARY, (2 * steps, _LENGTH)).tolist()
    clock = _Clock()
    callbacks: list[TrainerCallback] = [clock]
    if models:
        callbacks.append(ExportCallback(models, dtype="bf16", newest_only=False))
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=str(out),
            max_steps=steps,
            save_steps=2,
            save_total_limit=2,
            per_device_train_batch_size=1,
            deepspeed=_SETTINGS,
            bf16=True,
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=[{"input_ids": line, "labels": line} for line in lines],
        data_collator=default_data_collator,
        callbacks=callbacks,
    )
    trainer.train()
    ends = zip(clock.times, clock.times[1:], strict=False)
    spent = [(then[0] - now[0], then[1] - now[1]) for now, then in ends]
    out.with_name(f"{out.name}.{os.environ['RANK']}.json").write_text(json.dumps(spent))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
