"""The model to train: built in or read from a folder, with its adapter and frozen weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zexport.errors import UsageError
from zexport.train.options import TrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEADS, _KEY_VALUE_HEADS = 4, 2

LORA_RANK = 8


def make_model(options: TrainOptions, vocab_size: int) -> PreTrainedModel:
    """The model on the CPU in fp32, its random weights decided by ``--seed``."""
    torch.manual_seed(options.seed)
    if options.model is None:
        return _built_in(options, vocab_size)

    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            "holds no causal language model that transformers can read",
            path=options.model,
            found=str(error).partition("\n")[0].rstrip("."),
            hint="Name a model folder with --model",
        ) from error
    known = model.get_input_embeddings().num_embeddings
    if known < vocab_size:
        raise UsageError(
            "the tokenizer does not fit the model",
            path=options.tokenizer or options.model,
            found=f"{vocab_size} tokens",
            expected=f"at most {known}",
            hint="Name a fitting one with --tokenizer",
        )
    return model


def _built_in(options: TrainOptions, vocab_size: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - takes seconds

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=2 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KEY_VALUE_HEADS,
        max_position_embeddings=max(512, options.seq_len),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    return model


def add_adapter(model: PreTrainedModel, base: Path) -> torch.nn.Module:
    """The model with a LoRA adapter of ``base`` on every linear layer, and all else frozen."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - of the extra; takes seconds

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        target_modules="all-linear",
        base_model_name_or_path=str(base),
    )
    adapted: torch.nn.Module = get_peft_model(model, config)
    config.base_model_name_or_path = str(base)  # get_peft_model puts the model's own name there
    return adapted


def freeze(model: torch.nn.Module, patterns: tuple[str, ...]) -> None:
    """Stop training the parameters in whose names one of the patterns is found."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        found = [name for name in parameters if re.search(pattern, name)]
        if not found:
            raise UsageError(
                f"--freeze {pattern} matches no parameter",
                expected=f"names like {next(iter(parameters))}",
            )
        for name in found:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError("--freeze leaves no parameter to train", hint="Freeze less")


def meta_twin(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model without data, to name and convert the weights of one that is partitioned.

    There every shape is 0. The twin remembers the conversions of loading, so that saving undoes
    them.
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
