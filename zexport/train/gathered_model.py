"""The whole weights of a partitioned model, gathered to rank 0 and written as a model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from zexport.train.files import open_like_config

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_FILE = "adapter_model.safetensors"


def gathered_weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor] | None:
    """Every weight and persistent buffer under its name in memory, on rank 0; None elsewhere.

    In 16 bit: those of an fp32 run are rounded to bf16. A collective call.
    """
    if engine.zero_optimization_partition_weights():
        weights = engine._zero3_consolidated_16bit_state_dict()
    else:
        weights = engine.module_state_dict()
    if engine.global_rank != 0:
        return None
    if engine.bfloat16_enabled() or engine.fp16_enabled():
        return dict(weights)
    return {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def meta_twin(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model without data, to name and convert the weights of one that is partitioned.

    A partitioned module reports every shape as 0, which transformers' conversions ask for. The
    twin remembers the conversions that loading applied, so that saving undoes the same ones.
    """
    with torch.device("meta"):
        twin: PreTrainedModel = type(model)(model.config)
    twin.tie_weights()
    twin.to(dtype)
    if hasattr(model, "_weight_conversions"):
        twin._weight_conversions = model._weight_conversions
    if model.can_generate():
        twin.generation_config = model.generation_config
    return twin


@dataclass(frozen=True, slots=True)
class ModelWriter:
    """Writes what ``save_pretrained`` writes: weights under hub names, config and tokenizer."""

    twin: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """A model folder that transformers loads."""
        self.twin.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        open_like_config(folder)

    def write_config(self, folder: Path) -> None:
        """Nothing: a model's configuration is written with the run's."""


@dataclass(frozen=True, slots=True)
class AdapterWriter:
    """Writes what peft's ``save_pretrained`` writes: the adapter's weights and configuration."""

    model: PeftModel
    tokenizer: PreTrainedTokenizerBase

    def write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """An adapter folder that peft loads."""
        folder.mkdir(parents=True, exist_ok=True)
        self.write_config(folder)
        self.write_weights(folder / ADAPTER_FILE, weights)
        self.tokenizer.save_pretrained(folder)

    def write_config(self, folder: Path) -> None:
        """``adapter_config.json`` alone."""
        self.model.peft_config["default"].save_pretrained(folder, inference_mode=True)

    def write_weights(self, path: Path, weights: dict[str, torch.Tensor]) -> None:
        """The adapter's part of ``weights``, under the names peft gives them in a file."""
        from peft import get_peft_model_state_dict  # noqa: PLC0415 - of the extra

        adapter: dict[str, Any] = get_peft_model_state_dict(
            self.model, state_dict=weights, save_embedding_layers=False
        )
        tensors = {name: tensor.contiguous() for name, tensor in adapter.items()}
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod((path.parent / "adapter_config.json").stat().st_mode)
