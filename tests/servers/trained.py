"""Small models of many families, trained on two ranks, and LoRA adapters of some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

STEPS = 3
VOCABULARY = 384
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's attention on the CPU takes 32, 64, 80, 96, ...
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"tie_word_embeddings": False}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Mistral": ("Mistral", {"sliding_window": 8}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
    "Gemma 2": ("Gemma2", {"sliding_window": 8}),
    "Gemma 3": ("Gemma3Text", {"sliding_window": 8}),
    "Phi-3": ("Phi3", {}),
    "OLMo 2": ("Olmo2", {}),
    "Granite": ("Granite", {}),
    "StableLM": ("StableLm", {}),
    "Starcoder2": ("Starcoder2", {}),
    "SmolLM3": ("SmolLM3", {}),
    "GPT-2": ("GPT2", {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 128}),
    "GPT-NeoX": ("GPTNeoX", {"num_key_value_heads": 2}),
    "OPT": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("Qwen3Moe", {**_MOE, "norm_topk_prob": True}),
}
BY_FSDP = ("Llama, tied", "Gemma 3", "Phi-3")
"""Trained with FSDP2; the others with DeepSpeed."""

ADAPTED = ("Llama", "Qwen3", "Gemma 2", "Phi-3")


def new_model(family: str) -> Any:
    """Random weights, each with its own effect on what the model says: biases and norms, too."""
    import transformers

    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_TEXT, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(torch.randn_like(value) * 0.1)
    return model


def train(rank: int, runs: Path) -> None:
    """Leave in ``runs`` a checkpoint of every family, and of some an adapter's and its base."""
    for number, family in enumerate(FAMILIES):
        if family in BY_FSDP:
            _train_by_fsdp(new_model(family), runs / family)
        else:
            _train_one(new_model(family), runs / family, stage=1 + number % 3)
    for family in ADAPTED:
        _adapt(rank, family, runs)


def _adapt(rank: int, family: str, runs: Path) -> None:
    import peft
    from torch import distributed

    model, base = new_model(family).bfloat16(), runs / f"{family} base"
    if rank == 0:
        model.save_pretrained(base)
    distributed.barrier()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    adapted = peft.get_peft_model(model.float(), config)
    with torch.no_grad():
        for value in adapted.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.1)
    config.base_model_name_or_path = str(base)
    _train_one(adapted, runs / f"{family} adapter", stage=3)
    if rank == 0:
        config.save_pretrained(runs / f"{family} adapter")


def _train_by_fsdp(model: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    model.config.save_pretrained(folder)


def _loss(model: Any, step: int) -> torch.Tensor:
    """The loss of this rank's half of the step's batch."""
    rows = torch.Generator().manual_seed(step)
    rank = torch.distributed.get_rank()
    tokens = torch.randint(VOCABULARY, (8, 16), generator=rows)[rank::2]
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _train_one(model: Any, folder: Path, stage: int) -> None:
    import deepspeed
    from torch import distributed

    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    trained = [value for value in model.parameters() if value.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)
    for step in range(STEPS):
        engine.backward(_loss(engine, step))
        engine.step()
    engine.save_checkpoint(str(folder), tag="step")
    if distributed.get_rank() == 0:
        model.config.save_pretrained(folder)
    engine.destroy()
