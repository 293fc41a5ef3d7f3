"""Real trainings, each against what it began from: none is ever called a conversion error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.live_models import live_model
from zexport import consolidate, diff_models
from zexport.compare.verdict import Cause
from zexport.options import AdapterMode, ExportDType, ExportOptions
from zexport.train.model import make_model
from zexport.train.options import TrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIXTURES = Path(__file__).parents[2] / "fixtures"


def check(model: Path, base: Path, cause: Cause = Cause.TRAINING) -> None:
    """It looks like training, and in the other order it is at least no conversion error."""
    verdict = diff_models(model, base).verdict
    assert verdict.cause is cause, verdict.sentence
    words = "Looks like training" if cause is Cause.TRAINING else "Cannot tell"
    assert verdict.sentence.startswith(words)
    back = diff_models(base, model).verdict
    assert back.cause is not Cause.CONVERSION, back.sentence


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    whole = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    return folder


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    """A model as if it had been trained before: no two layers are alike, norms are near one."""
    model = live_model(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.1 if parameter.dim() > 1 or name.endswith("bias") else 0.05)
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter.add_(1)
    return model


def fresh(family: str) -> PreTrainedModel:
    """A model as transformers makes it."""
    torch.manual_seed(5)
    made = live_model(family)
    torch.manual_seed(5)
    return type(made)(made.config)


def train(
    model: PreTrainedModel,
    steps: int = 3,
    *,
    lr: float = 1e-3,
    only: str = "",
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
    labels: str = "labels",
) -> dict[str, torch.Tensor]:
    """The weights after some steps on random tokens."""
    torch.manual_seed(3)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(only, name) is not None)
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        tokens = torch.randint(3, 32, (2, 8))
        told = torch.randint(0, 2, (2,)) if labels == "classes" else tokens
        optimizer.zero_grad()
        model(input_ids=tokens, labels=told).loss.backward()
        optimizer.step()
    return dict(model.state_dict())


class Lion(torch.optim.Optimizer):
    """Every weight moves by the learning rate, in one direction or the other."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(group["lr"] * parameter.grad.sign())


def heavy_decay(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=3.0)


TRAININGS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any]]] = {
    "full": (lambda: model_of("llama"), {}),
    "one step": (lambda: model_of("llama"), {"steps": 1}),
    "one small step": (lambda: model_of("llama"), {"steps": 1, "lr": 1e-6}),
    "many steps": (lambda: model_of("llama"), {"steps": 300}),
    "from the start": (lambda: fresh("llama"), {"steps": 100, "lr": 3e-3}),
    "from the start, one step": (lambda: fresh("gpt2"), {"steps": 1}),
    "tied": (lambda: model_of("llama-tied"), {}),
    "GPT-2": (lambda: model_of("gpt2"), {"steps": 20}),
    "Gemma 3": (lambda: model_of("gemma3-text"), {"steps": 10}),
    "experts": (lambda: model_of("mixtral"), {"steps": 2}),
    "experts that decay": (lambda: model_of("mixtral"), {"steps": 5, "make": heavy_decay}),
    "biases alone": (lambda: model_of("gpt2"), {"only": "bias$"}),
    "biases alone, from zero": (lambda: fresh("gpt2"), {"only": "bias$", "steps": 2}),
    "norms alone": (lambda: model_of("llama"), {"only": "norm"}),
    "norms alone, from one": (lambda: fresh("llama"), {"only": "norm", "steps": 1}),
    "embeddings alone": (lambda: model_of("llama"), {"only": "embed", "steps": 20}),
    "the last layer": (lambda: model_of("llama"), {"only": r"layers\.1|lm_head"}),
    "SGD": (lambda: model_of("llama"), {"make": torch.optim.SGD, "lr": 0.1}),
    "Lion": (lambda: fresh("gpt2"), {"make": Lion, "steps": 4}),
    "in bf16": (lambda: model_of("llama"), {"dtype": torch.bfloat16, "lr": 1e-2}),
    "heavy decay": (lambda: model_of("llama"), {"make": heavy_decay, "steps": 100, "lr": 1e-3}),
}
UNTOLD = ("from the start", "biases alone, from zero", "norms alone, from one")
"""As far from its beginning as another model might be, or with nothing else that moved."""


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_looks_like_one(name: str, tmp_path: Path) -> None:
    make, how = TRAININGS[name]
    model = make()
    base = saved(tmp_path / "base", {n: t.clone() for n, t in model.state_dict().items()})
    cause = Cause.UNKNOWN if name in UNTOLD else Cause.TRAINING
    check(saved(tmp_path / "model", train(model, **how)), base, cause)


@pytest.mark.parametrize("dtype", [ExportDType.FP32, ExportDType.BF16, ExportDType.FP16])
@pytest.mark.parametrize(
    "case",
    ["z1_w2_bf16", "z1_w2_bf16opt", "z2_w2_fp16", "z2_w2_bf16_groups", "z3_w2_bf16", "z3_w2_fp32"],
)
def test_a_run_of_deepspeed_from_random_weights_is_training(
    case: str, dtype: ExportDType, tmp_path: Path
) -> None:
    consolidate(FIXTURES / case / "ckpt", tmp_path / "model", ExportOptions(dtype=dtype))
    check(tmp_path / "model", saved(tmp_path / "base", random_base()))


def random_base() -> dict[str, torch.Tensor]:
    """What the runs of ``fixtures/make.py`` began from."""
    options = TrainOptions(out=Path(), vocab_size=264, hidden_size=16, layers=2)
    return dict(make_model(options, 264).state_dict())


@pytest.mark.parametrize("case", ["z1_w2_bf16_frozen", "z3_w2_bf16_frozen"])
def test_what_was_frozen_is_equal_and_the_rest_trained(case: str, tmp_path: Path) -> None:
    consolidate(FIXTURES / case / "ckpt", tmp_path / "model")
    rounded = {name: value.bfloat16() for name, value in random_base().items()}
    check(tmp_path / "model", saved(tmp_path / "base", rounded))


def test_a_merged_adapter_is_training(tmp_path: Path) -> None:
    run = FIXTURES / "z2_w2_bf16_lora" / "ckpt"
    options = ExportOptions(adapter=AdapterMode.MERGE, base=run / "base")
    consolidate(run, tmp_path / "model", options)
    check(tmp_path / "model", run / "base")


def test_an_adapter_after_two_steps_is_that_after_one_and_more(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model_of("llama"), LoraConfig(r=4, target_modules="all-linear"))
    both = [saved(tmp_path / f"{steps}", train(adapted, 1, only="lora_")) for steps in (1, 2)]
    check(both[1], both[0])


def test_a_new_head_is_no_suspect(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    base = model_of("llama")
    torch.manual_seed(2)
    model = LlamaForSequenceClassification(base.config)
    model.model.load_state_dict(base.model.state_dict())
    trained = train(model, labels="classes")
    check(saved(tmp_path / "model", trained), saved(tmp_path / "base", dict(base.state_dict())))
    again = train(LlamaForSequenceClassification(base.config), labels="classes")
    other = {**trained, "score.weight": again["score.weight"]}
    check(saved(tmp_path / "other", other), saved(tmp_path / "one", dict(base.state_dict())))
    check(tmp_path / "model", tmp_path / "other")


def test_a_vocabulary_that_grew_is_no_suspect(tmp_path: Path) -> None:
    model = model_of("llama")
    base = saved(tmp_path / "base", dict(model.state_dict()))
    model.resize_token_embeddings(40)
    check(saved(tmp_path / "model", train(model)), base)
