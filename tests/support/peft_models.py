"""Live peft models of every kind, and the ZeRO checkpoints that training them would leave."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from tests.support import checkpoints

_SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


def llama(*, tied: bool = False, bias: bool = False) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=24,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_bias=bias,
        **_SIZES,
        **_HEADS,
    )
    return LlamaForCausalLM(config)


def gpt2() -> PreTrainedModel:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **_SIZES)
    return GPT2LMHeadModel(config)


def bert_classifier() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4}
    config = BertConfig(num_hidden_layers=2, vocab_size=50, num_labels=3, **sizes)
    return BertForSequenceClassification(config)


def mixtral() -> PreTrainedModel:
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=24,
        num_local_experts=3,
        num_experts_per_tok=2,
        **_SIZES,
        **_HEADS,
    )
    return MixtralForCausalLM(config)


def gpt_oss() -> PreTrainedModel:
    """Experts stored as (experts, inputs, outputs), some of them square."""
    config = GptOssConfig(
        hidden_size=32,
        intermediate_size=32,
        num_local_experts=3,
        num_experts_per_tok=2,
        head_dim=8,
        **_SIZES,
        **_HEADS,
    )
    return GptOssForCausalLM(config)


@dataclass(frozen=True)
class Form:
    """A kind of adapter.

    Attributes:
        base: makes the base model.
        keys: of the adapter's configuration.
        rows: how many the embeddings are resized to before training; all remain where ``None``.
        method: class of the configuration.
        by_hand: part of the names of base weights that are trained too, without peft.
    """

    base: Callable[[], PreTrainedModel]
    keys: Mapping[str, Any] = field(default_factory=dict)
    rows: int | None = None
    method: type[Any] = LoraConfig
    by_hand: str = ""

    def config(self) -> Any:
        sizes = {"r": 4, "lora_alpha": 6} if self.method is LoraConfig else {}
        return self.method(**{"task_type": "CAUSAL_LM", **sizes, **self.keys})


ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

FORMS = {
    "plain": Form(llama, {"target_modules": ATTENTION}),
    "everything": Form(llama, {"target_modules": "all-linear"}),
    "saved_modules": Form(llama, {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "dora": Form(llama, {"target_modules": ATTENTION, "use_dora": True}),
    "rslora": Form(llama, {"target_modules": ATTENTION, "use_rslora": True}),
    "patterns": Form(
        llama,
        {
            "target_modules": ATTENTION,
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 7},
            "alpha_pattern": {"v_proj": 3},
        },
    ),
    "embeddings": Form(llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "dora_embeddings": Form(llama, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "head": Form(llama, {"target_modules": ["lm_head", "q_proj"]}),
    "own_bias": Form(
        lambda: llama(bias=True), {"target_modules": ATTENTION, "lora_bias": True, "bias": "none"}
    ),
    "all_biases": Form(lambda: llama(bias=True), {"target_modules": ATTENTION, "bias": "all"}),
    "their_biases": Form(
        lambda: llama(bias=True), {"target_modules": ATTENTION, "bias": "lora_only"}
    ),
    "conv1d": Form(gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "dora_conv1d": Form(
        gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}
    ),
    "experts": Form(mixtral, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "one_of_the_experts": Form(
        mixtral, {"target_modules": [], "target_parameters": [EXPERTS[1]], "r": 2}
    ),
    "transposed_experts": Form(gpt_oss, {"target_modules": [], "target_parameters": EXPERTS}),
    "all_of_a_mixture": Form(mixtral, {"target_modules": "all-linear"}),
    "tied_embeddings": Form(lambda: llama(tied=True), {"target_modules": ["embed_tokens"]}),
    "tied_saved": Form(
        lambda: llama(tied=True),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "tied_saved_head": Form(
        lambda: llama(tied=True), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    ),
    "tied_saved_both": Form(
        lambda: llama(tied=True),
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens", "lm_head"],
            "ensure_weight_tying": True,
        },
    ),
}


@dataclass(frozen=True)
class Trained:
    """A live model and its files.

    Attributes:
        model: in fp32; what is frozen holds values of bf16.
        checkpoint: the folder with ``latest`` and the adapter's configuration.
        base: the base model's folder, in fp32 with more digits than bf16 has.
        live: peft's own ``save_pretrained`` of ``model``.
    """

    model: PeftModel
    checkpoint: Path
    base: Path
    live: Path


def train(
    form: Form, folder: Path, run: checkpoints.Run, *, adapters: tuple[str, ...] = ("default",)
) -> Trained:
    """A peft model with random weights in every part of its adapters, saved as ``run`` says."""
    torch.manual_seed(7)
    base = form.base()
    base.save_pretrained(folder / "base")
    if form.rows is not None:
        base.name_or_path = str(folder / "base")  # where peft looks for the size it had
        base.resize_token_embeddings(form.rows, mean_resizing=False)
    base.load_state_dict({name: rounded(value) for name, value in base.state_dict().items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights and of fan_in_fan_out
        model = get_peft_model(base, form.config(), adapter_name=adapters[0])
        for name in adapters[1:]:
            config = form.config()
            config.base_model_name_or_path = base.name_or_path  # peft sets it only on the first
            model.add_adapter(name, config)
        for name, parameter in model.named_parameters():
            if form.by_hand and form.by_hand in name and "lora" not in name:
                parameter.requires_grad_(requires_grad=True)
        for parameter in trained(model, adapters).values():
            noise = torch.randn_like(parameter) / 8
            parameter.data = noise if form.method is LoraConfig else parameter.data + noise / 8
        live = folder / "live"
        model.save_pretrained(live)
    checkpoint = checkpoints.save(zero_model(model, adapters), run, folder / "run")
    for config in live.rglob("adapter_config.json"):
        copy = checkpoint / config.relative_to(live)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(config.read_bytes())
    return Trained(model, checkpoint, folder / "base", live)


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().to(value.dtype) if value.is_floating_point() else value


def trained(model: PeftModel, adapters: tuple[str, ...]) -> dict[str, torch.nn.Parameter]:
    """What is trained, of every adapter: peft trains one at a time."""
    parameters = dict(model.named_parameters())
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.requires_grad or any(f".{a}." in name or name.endswith(a) for a in adapters)
    }


def zero_model(model: PeftModel, adapters: tuple[str, ...]) -> checkpoints.Model:
    """The same model as DeepSpeed's engine would hold it: trained in fp32, frozen in bf16."""
    own = trained(model, adapters)
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    every = dict(model.named_parameters(remove_duplicate=False))
    return checkpoints.Model(
        groups=[{name: parameter.detach() for name, parameter in own.items()}],
        frozen={
            name: parameter.detach().bfloat16()
            for name, parameter in parameters.items()
            if name not in own
        },
        tied={
            name: names[id(parameter)]
            for name, parameter in every.items()
            if names[id(parameter)] != name
        },
    )
