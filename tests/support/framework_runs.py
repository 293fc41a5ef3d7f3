"""Short runs by the frameworks themselves, on CPU ranks: from the start, or from a checkpoint.

All train one small model on the same rows in updates of six, however many ranks share them. They
save after each update. Before its first update, a resumed run saves again what it has loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
ROWS = 6
STEPS = 2


@dataclass(frozen=True)
class FrameworkRun:
    """A run of ``framework`` on ``world`` ranks into ``out``, maybe from ``source``.

    It leaves ``OUT.truth.safetensors`` (the engine's fp32 master weights and frozen weights at the
    end, under in-memory names), ``OUT.losses.json`` (of each update, the mean of all ranks) and, if
    it is resumed, ``OUT.again``.
    """

    framework: str
    base: Path
    out: Path
    world: int = 2
    stage: int = 3
    source: Path | None = None
    is_universal: bool = False

    @property
    def accumulated(self) -> int:
        return ROWS // self.world

    @property
    def losses(self) -> list[float]:
        losses: list[float] = json.loads(self.beside("losses.json").read_text())
        return losses

    def beside(self, ending: str) -> Path:
        return self.out.with_name(f"{self.out.name}.{ending}")

    def ds_config(self) -> dict[str, Any]:
        universal = {"checkpoint": {"load_universal": True}} if self.is_universal else {}
        return universal | {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulated,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }

    def save_again(self, engine: Any) -> None:
        if self.source is not None:
            engine.save_checkpoint(str(self.beside("again")))


def train(rank: int, runs: Sequence[FrameworkRun]) -> None:
    """Do each run in turn, as one of its ranks."""
    from accelerate.state import AcceleratorState
    from safetensors.torch import save_file
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    for run in runs:
        truth, losses = _FRAMEWORKS[run.framework](run)
        if rank == 0:
            save_file(truth, run.beside("truth.safetensors"))
            run.beside("losses.json").write_text(json.dumps(losses))
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()


def rows() -> list[dict[str, list[int]]]:
    tokens = torch.randint(3, 64, (60, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


def training_arguments(out: Path, accumulated: int = 1) -> dict[str, Any]:
    """Arguments of Trainer and TRL, except the DeepSpeed configuration."""
    return {
        "output_dir": str(out),
        "max_steps": STEPS,
        "save_steps": 1,
        "logging_steps": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulated,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "bf16": True,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }


Trained = tuple[Tensors, list[float]]
"""What the engine holds, and the losses of its updates."""


def _with_trainer(run: FrameworkRun) -> Trained:
    """All weights, by transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    return _by_trainer(run, Trainer, TrainingArguments, model=_model(run), train_dataset=rows())


def _with_trl(run: FrameworkRun) -> Trained:
    """A LoRA adapter, by TRL's SFTTrainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    return _by_trainer(
        run,
        SFTTrainer,
        SFTConfig,
        model=str(run.base),
        train_dataset=Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows()]),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )


def _by_trainer(run: FrameworkRun, trainer_class: Any, arguments: Any, **more: Any) -> Trained:
    from transformers import AutoTokenizer, TrainerCallback

    class SaveAgain(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.save_again(trainer.model_wrapped)

    tokenizer = AutoTokenizer.from_pretrained(run.base)
    tokenizer.pad_token = tokenizer.eos_token
    settings = training_arguments(run.out, run.accumulated)
    trainer = trainer_class(
        args=arguments(**settings, deepspeed=run.ds_config()),
        processing_class=tokenizer,
        callbacks=[SaveAgain()],
        **more,
    )
    trainer.train(resume_from_checkpoint=None if run.source is None else str(run.source))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return _truth(trainer.model_wrapped), losses


def _with_accelerate(run: FrameworkRun) -> Trained:
    """A loop of one's own around Accelerate, with two schedulers."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as its launcher does
    plugin = DeepSpeedPlugin(hf_ds_config=run.ds_config())
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(
        mixed_precision="bf16", deepspeed_plugin=plugin, kwargs_handlers=[gloo]
    )
    assert accelerator.num_processes == run.world
    model = _model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule, second = (
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) for _ in range(2)
    )
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, _data(), schedule)
    second = accelerator.prepare_scheduler(second)
    done = 0
    if run.source is not None:
        accelerator.load_state(str(run.source))
        run.save_again(model)
        done = 1
    losses = _Losses(run)
    for batch in islice(data, done * run.accumulated, STEPS * run.accumulated):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            second.step()
            optimizer.zero_grad()
        if losses.add(loss):
            accelerator.save_state(str(run.out / f"step_{done + len(losses.means)}"))
    return _truth(model), losses.means


def _with_lightning(run: FrameworkRun) -> Trained:
    """Lightning's trainer with its DeepSpeed strategy, which only accepts CUDA."""
    import lightning
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DeepSpeedStrategy, deepspeed

    from zexport.callbacks import LightningExportCallback

    deepspeed.CUDAAccelerator = CPUAccelerator  # type: ignore[misc,assignment,attr-defined]
    deepspeed._validate_device_index_selection = lambda _: None  # type: ignore[attr-defined]
    truth: Tensors = {}
    losses = _Losses(run)

    class OnCpu(DeepSpeedStrategy):
        @property
        def root_device(self) -> Any:
            return torch.device("cpu", 0)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(run)

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            loss = self.model(**batch).loss
            losses.add(loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Save(Callback):
        def on_train_start(self, trainer: Any, _: Any) -> None:
            run.save_again(trainer.strategy.deepspeed_engine)

        def on_train_end(self, trainer: Any, _: Any) -> None:
            truth.update(_truth(trainer.strategy.deepspeed_engine))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if run.source is None and losses.is_whole and len(losses.means) == 1:
                trainer.save_checkpoint(str(run.beside("ckpt")))

    config = run.ds_config()
    accumulated = config.pop("gradient_accumulation_steps")
    lightning.Trainer(
        strategy=OnCpu(config=config, process_group_backend="gloo"),
        accelerator="cpu",
        devices=run.world,
        accumulate_grad_batches=accumulated,
        precision="bf16-mixed",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(run.out),
        callbacks=[Save(), LightningExportCallback(run.beside("models"), interval_s=0.2)],
    ).fit(Module(), _data(), ckpt_path=None if run.source is None else str(run.source))
    return truth, losses.means


def _with_deepspeed(run: FrameworkRun) -> Trained:
    """A loop of one's own around DeepSpeed's engine."""
    import deepspeed

    model = _model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=run.ds_config())
    losses = _Losses(run)
    for batch in islice(_data(), STEPS * run.accumulated):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.add(loss)
    engine.save_checkpoint(str(run.out))
    return _truth(engine), losses.means


_FRAMEWORKS: Mapping[str, Callable[[FrameworkRun], Trained]] = {
    "trainer": _with_trainer,
    "trl": _with_trl,
    "accelerate": _with_accelerate,
    "lightning": _with_lightning,
    "deepspeed": _with_deepspeed,
}


class _Losses:
    """Means of the losses of each update, over its rows and all ranks."""

    def __init__(self, run: FrameworkRun) -> None:
        self._run = run
        self._losses: list[float] = []
        self.means: list[float] = []

    @property
    def is_whole(self) -> bool:
        return not self._losses

    def add(self, loss: torch.Tensor) -> bool:
        """Return whether the update is done."""
        total = loss.detach().double()
        torch.distributed.all_reduce(total)
        self._losses.append(float(total) / self._run.world)
        if len(self._losses) == self._run.accumulated:
            self.means.append(sum(self._losses) / len(self._losses))
            self._losses.clear()
        return self.is_whole


def _model(run: FrameworkRun) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(run.base)


def _data() -> Any:
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    return DataLoader(rows(), batch_size=1, collate_fn=default_data_collator)  # type: ignore[arg-type]


def _truth(engine: torch.nn.Module) -> Tensors:
    """What the engine holds; every rank has to take part."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    truth = {}
    for whole, parameter in engine.named_parameters():
        name = whole.removeprefix("module.")
        if parameter.requires_grad:
            truth[name] = safe_get_full_fp32_param(parameter).clone()
        else:
            with zero.GatheredParameters(parameter):
                truth[name] = parameter.detach().clone()
    return truth
