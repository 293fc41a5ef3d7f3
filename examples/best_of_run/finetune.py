"""A short fine-tuning with transformers' Trainer under ZeRO-2, saving three checkpoints.

Usage: torchrun --nproc-per-node 2 finetune.py BASE_MODEL OUTPUT_DIR
"""

from __future__ import annotations

import sys

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from zexport.train.worker import join_ranks

TEXT = "The keeper wrote the day's tide in the book, and the book kept it when the sea did not."
STEPS = 6


def main(base: str, out: str) -> None:
    """Train on one sentence."""
    join_ranks(600)  # without GPUs: DeepSpeed's CPU accelerator and gloo
    row = AutoTokenizer.from_pretrained(base)(TEXT)["input_ids"]
    rows = [{"input_ids": row, "labels": row}] * 2 * STEPS
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        save_steps=2,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        deepspeed={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=arguments,
        train_dataset=Dataset.from_list(rows).with_format("torch"),
        processing_class=AutoTokenizer.from_pretrained(base),
        data_collator=default_data_collator,
    ).train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
