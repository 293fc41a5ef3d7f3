"""Short trainings by the frameworks themselves, under DeepSpeed's ZeRO-3 on two ranks of the CPU.

``torchrun --nproc-per-node 2 framework_runs.py BASE OUT FRAMEWORK...`` leaves two things for each:
``OUT/FRAMEWORK``, as the framework left it, and ``OUT/FRAMEWORK.truth.safetensors``, the engine's
fp32 master weights and frozen weights under in-memory names. All share one start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from datasets import Dataset
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from peft import LoraConfig
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig, SFTTrainer

from zexport.callbacks import LightningExportCallback
from zexport.train.worker import join_ranks

Tensors = dict[str, torch.Tensor]
STEPS = 2
_LIMIT_S = 300
_TEXT = "The keeper wrote the day's tide in the book, and the book kept it when the sea did not."
_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def lines_of(base: Path) -> Dataset:
    tokens = AutoTokenizer.from_pretrained(base)(_TEXT)["input_ids"][:16]
    row = {"input_ids": tokens, "labels": tokens}
    return Dataset.from_list([row] * 2 * STEPS).with_format("torch")


def arguments_of(out: Path) -> dict[str, Any]:
    """Those of the Trainer and of all that is made of it."""
    return {
        "output_dir": str(out),
        "max_steps": STEPS,
        "save_steps": 1,
        "per_device_train_batch_size": 1,
        "deepspeed": deepcopy(_CONFIG),
        "bf16": True,
        "use_cpu": True,
        "report_to": [],
        "learning_rate": 1e-3,
    }


def with_trainer(base: Path, out: Path) -> Tensors:
    """transformers' Trainer, all weights."""
    arguments = TrainingArguments(**arguments_of(out))
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=arguments,
        train_dataset=lines_of(base),
        processing_class=AutoTokenizer.from_pretrained(base),
        data_collator=default_data_collator,
    )
    trainer.train()
    return _truth(trainer.model_wrapped)


def with_trl(base: Path, out: Path) -> Tensors:
    """TRL's SFTTrainer, a LoRA adapter."""
    arguments = SFTConfig(**arguments_of(out), max_length=16)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = SFTTrainer(
        model=str(base),
        args=arguments,
        train_dataset=Dataset.from_list([{"text": _TEXT}] * 2 * STEPS),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    return _truth(trainer.model_wrapped)


def with_accelerate(base: Path, out: Path) -> Tensors:
    """A loop of one's own around Accelerate."""
    plugin = DeepSpeedPlugin(hf_ds_config=deepcopy(_CONFIG))
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(lines_of(base), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in islice(loader, STEPS):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
    accelerator.save_state(str(out / "step_2"))
    return _truth(model)


def with_lightning(base: Path, out: Path) -> Tensors:
    """Lightning's trainer with its DeepSpeed strategy, which only accepts CUDA."""

    class Cpu(CPUAccelerator, CUDAAccelerator):
        @staticmethod
        def get_parallel_devices(devices: int | str) -> list[torch.device]:
            return [torch.device("cpu", number) for number in range(int(devices))]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(base)

        def training_step(self, batch: Any, _number: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_end(self) -> None:
            self.truth = _truth(self)

    module = Module()
    lightning.Trainer(
        strategy=DeepSpeedStrategy(stage=3, process_group_backend="gloo"),
        accelerator=Cpu(),
        devices=2,
        precision="bf16-mixed",
        max_steps=STEPS,
        default_root_dir=out,
        logger=False,
        callbacks=[LightningExportCallback(out.with_name(f"{out.name}.models"), interval_s=0.2)],
    ).fit(module, DataLoader(lines_of(base), batch_size=1))
    return module.truth


def with_deepspeed(base: Path, out: Path) -> Tensors:
    """A loop of one's own around DeepSpeed's engine."""
    import deepspeed

    model = AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepcopy(_CONFIG))
    for row in islice(lines_of(base).iter(1), STEPS):
        engine.backward(engine(**row).loss)
        engine.step()
    engine.save_checkpoint(str(out))
    return _truth(engine)


FRAMEWORKS: Mapping[str, Callable[[Path, Path], Tensors]] = {
    "trainer": with_trainer,
    "trl": with_trl,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "deepspeed": with_deepspeed,
}


def _truth(module: torch.nn.Module) -> Tensors:
    """What the engine holds; every rank has to take part."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    truth = {}
    for whole, parameter in module.named_parameters():
        name = whole.removeprefix("module.")
        if parameter.requires_grad:
            truth[name] = safe_get_full_fp32_param(parameter).clone()
        else:
            with zero.GatheredParameters(parameter):
                truth[name] = parameter.detach().clone()
    return truth


def main(base: str, out: str, *frameworks: str) -> None:
    """Train with each framework in turn, in a folder of its name."""
    ranks = join_ranks(_LIMIT_S)
    for framework in frameworks:
        folder = Path(out) / framework
        truth = FRAMEWORKS[framework](Path(base), folder)
        if ranks.is_first:
            save_file(truth, f"{folder}.truth.safetensors")
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
    ranks.leave()
    os._exit(0)  # gloo's threads may not end otherwise


if __name__ == "__main__":
    main(*sys.argv[1:])
