"""Small live models of many families, and checkpoints of them in DeepSpeed's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.support.checkpoints import Model, Run, save

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 8,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "num_heads": 2,
    "patch_size": 2,
    "intermediate_size": 24,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "out_hidden_size": 16,
}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 10000.0}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_TEXT, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**_TEXT, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _TEXT),
    "gemma3-text": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_TEXT, "sliding_window": 8}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": _TEXT, "vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_TEXT, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_TEXT, **_MOE, "shared_expert_intermediate_size": 12},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_TEXT, **_MOE}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_TEXT,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 6,
            "kv_lora_rank": 6,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
            "image_token_index": 3,
        },
    ),
    "qwen2-vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**_TEXT, "rope_parameters": _ROPE},
            "vision_config": {**_QWEN_VISION, "hidden_size": 16},
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {
            "text_config": {**_TEXT, **_MOE, "rope_parameters": _ROPE},
            "vision_config": _QWEN_VISION,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _TEXT),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {**_TEXT, "state_size": 4}),
    "hrm-text": (
        "HrmTextForCausalLM",
        "HrmTextConfig",
        {**_TEXT, "num_hidden_layers": 8, "num_layers_per_stack": 1},
    ),
}
"""Name to model class, config class and config: small models of the families that users train."""


def live_model(family: str, **changes: Any) -> PreTrainedModel:
    """A model in float32 whose weights are all different numbers."""
    import transformers

    name, config_name, config = FAMILIES[family]
    made = getattr(transformers, config_name)(**{**config, **changes})
    made.architectures = [name]
    torch.manual_seed(7)
    model: PreTrainedModel = getattr(transformers, name)._from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def in_training(model: PreTrainedModel, frozen: tuple[str, ...] = ()) -> Model:
    """The model as DeepSpeed has it, with the parameters whose names begin so frozen."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    first: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    tied = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }
    known = {*named, *tied}
    return Model(
        groups=[
            {name: value for name, value in named.items() if not name.startswith(frozen or "\0")}
        ],
        frozen={n: v for n, v in named.items() if frozen and n.startswith(frozen)},
        buffers={name: value for name, value in model.state_dict().items() if name not in known},
        tied=tied,
        dtype=torch.float32,
    )


def checkpoint_of(
    model: PreTrainedModel,
    root: Path,
    stage: int = 2,
    config: Mapping[str, Any] | None = None,
    trained: Model | None = None,
) -> Path:
    """Save a checkpoint of ``model`` with its config."""
    save(trained or in_training(model), Run(stage=stage), root)
    model.config.save_pretrained(root)
    if config is not None:
        (root / "config.json").write_text(json.dumps(config))
    return root


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a folder's safetensors files."""
    from safetensors.torch import load_file

    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
