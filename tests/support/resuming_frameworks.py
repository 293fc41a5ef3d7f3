"""Trainings by the frameworks that users have, on CPU ranks: each saves, and goes on from a save.

All train a tiny Llama on the same rows in updates of six, however many ranks share them. Right
after resuming, DeepSpeed saves again what it was given, so that it can be compared.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ROWS = 6
SAVED_AT, STEPS = 3, 5


@dataclass(frozen=True)
class Going:
    """A training of a framework by ``world`` ranks into ``out``, maybe from ``source``."""

    framework: str
    world: int
    stage: int
    out: Path
    source: Path | None = None
    is_universal: bool = False

    def __call__(self, rank: int) -> None:
        losses = _FRAMEWORKS[self.framework](self)
        if rank == 0:
            (self.out / "losses.json").write_text(json.dumps(losses), encoding="utf-8")

    @property
    def losses(self) -> list[float]:
        """Of the updates that it did, the mean of all ranks."""
        losses: list[float] = json.loads((self.out / "losses.json").read_text(encoding="utf-8"))
        return losses

    def ds_config(self) -> dict[str, Any]:
        """As users of Trainer write it."""
        return {
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": ROWS // self.world,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            **({"checkpoint": {"load_universal": True}} if self.is_universal else {}),
        }


def tiny_llama() -> Any:
    """A model of some ten thousand weights, the same every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def _rows() -> list[dict[str, list[int]]]:
    import torch

    tokens = torch.randint(3, 64, (60, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


def _trainer(going: Going) -> list[float]:
    from transformers import Trainer

    return _trained(going, Trainer, tiny_llama(), _rows())


def _lora(going: Going) -> list[float]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer

    model = tiny_llama()
    torch.manual_seed(6)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    return _trained(going, Trainer, get_peft_model(model, config), _rows())


def _trl(going: Going) -> list[float]:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = WordLevel({"<pad>": 0, "</s>": 1, **{str(n): n for n in range(2, 64)}}, "<pad>")
    named = {"pad_token": "<pad>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **named)
    rows = Dataset.from_list([{"input_ids": row["input_ids"]} for row in _rows()])
    return _trained(going, SFTTrainer, tiny_llama(), rows, SFTConfig, processing_class=tokenizer)


def _trained(
    going: Going, trainer_class: Any, model: Any, rows: Any, config: Any = None, **more: Any
) -> list[float]:
    """The losses of a Trainer's updates; what it resumed from is saved again before the first."""
    from transformers import TrainerCallback, TrainingArguments

    class SaveAgain(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if going.source is not None:
                trainer.model_wrapped.save_checkpoint(str(going.out / "again"))

    arguments = (config or TrainingArguments)(
        output_dir=str(going.out),
        deepspeed=going.ds_config(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS // going.world,
        max_steps=STEPS,
        save_steps=SAVED_AT,
        logging_steps=1,
        learning_rate=1e-2,
        weight_decay=0.1,
        bf16=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=rows, callbacks=[SaveAgain()], **more
    )
    trainer.train(resume_from_checkpoint=None if going.source is None else str(going.source))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _accelerate(going: Going) -> list[float]:
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from torch.utils.data import DataLoader

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as its launcher does
    plugin = DeepSpeedPlugin(hf_ds_config=going.ds_config())
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo])
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule, second = (
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) for _ in range(2)
    )
    data = DataLoader(_rows(), batch_size=1, collate_fn=_collated)  # type: ignore[arg-type]
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    second = accelerator.prepare_scheduler(second)
    updates = 0
    if going.source is not None:
        accelerator.load_state(str(going.source))
        model.save_checkpoint(str(going.out / "again"))
        updates = SAVED_AT
    losses: list[float] = []
    sums: list[float] = []
    for batch in islice(data, updates * ROWS // going.world, None):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            second.step()
            optimizer.zero_grad()
        sums.append(_mean(loss))
        if len(sums) == ROWS // going.world:
            losses.append(sum(sums) / len(sums))
            sums, updates = [], updates + 1
            if updates == SAVED_AT:
                accelerator.save_state(str(going.out / "saved"))
        if updates == STEPS:
            break
    return losses


def _mean(loss: Any) -> float:
    """Over all ranks."""
    from torch import distributed

    total = loss.detach().double()
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()


def _collated(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def _lightning(going: Going) -> list[float]:
    import lightning
    import torch
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from torch.utils.data import DataLoader

    class OnCpu(DeepSpeedStrategy):
        @property
        def root_device(self) -> Any:
            return torch.device("cpu", 0)

    _let_lightning_use_the_cpu()
    losses: list[float] = []
    sums: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_llama()

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            loss = self.model(**batch).loss
            sums.append(_mean(loss))
            if len(sums) == ROWS // going.world:
                losses.append(sum(sums) / len(sums))
                sums.clear()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Save(Callback):
        def on_train_start(self, trainer: Any, _: Any) -> None:
            if going.source is not None:
                trainer.strategy.deepspeed_engine.save_checkpoint(str(going.out / "again"))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            is_due = trainer.global_step == SAVED_AT and not sums and going.source is None
            if is_due:
                trainer.save_checkpoint(str(going.out / "x.ckpt"))

    config = going.ds_config()
    accumulated = config.pop("gradient_accumulation_steps")
    strategy = OnCpu(config=config, process_group_backend="gloo")
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=going.world,
        accumulate_grad_batches=accumulated,
        precision="bf16-mixed",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(going.out),
        callbacks=[Save()],
    )
    rows = DataLoader(_rows(), batch_size=1, collate_fn=_collated)  # type: ignore[arg-type]
    trainer.fit(Module(), rows, ckpt_path=None if going.source is None else str(going.source))
    return losses


def _let_lightning_use_the_cpu() -> None:
    """Its strategy refuses anything but a GPU, whatever DeepSpeed itself can do."""
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import deepspeed

    deepspeed.CUDAAccelerator = CPUAccelerator  # type: ignore[misc,assignment,attr-defined]
    deepspeed._validate_device_index_selection = lambda _: None  # type: ignore[attr-defined]


_FRAMEWORKS = {
    "trainer": _trainer,
    "lora": _lora,
    "trl": _trl,
    "accelerate": _accelerate,
    "lightning": _lightning,
}
