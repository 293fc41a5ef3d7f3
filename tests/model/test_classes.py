"""The model class is the trained one; weights that it lacks get their own file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from tests.support.checkpoints import Model, Run, save
from tests.support.exports import edit_json, export, manifest_of, mentions, refused, verify
from tests.support.hf_models import (
    differing,
    load,
    tiny_config,
    tiny_model,
    write_config,
    write_run,
)

pytestmark = pytest.mark.slow


def assert_loads_as(out: Path, architecture: str, model: Any) -> None:
    """transformers loads this class with equal weights and no key missing or unexpected."""
    loaded, problems = load(out)
    assert (type(loaded).__name__, problems) == (architecture, {})
    assert differing(loaded, model) == []


def save_part(model: torch.nn.Module, root: Path, is_trained: Callable[[str], bool]) -> None:
    """A checkpoint without its frozen weights."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    own = {name: tensor for name, tensor in weights.items() if is_trained(name)}
    frozen = {name: tensor for name, tensor in weights.items() if name not in own}
    save(Model([own], frozen=frozen, dtype=torch.float32), Run(stage=2, exclude_frozen=True), root)


@pytest.mark.parametrize(
    ("config_class", "trained", "family"),
    [
        ("LlamaForCausalLM", "LlamaForSequenceClassification", "Llama"),
        ("GPT2LMHeadModel", "GPT2DoubleHeadsModel", "GPT2"),
        ("BertForMaskedLM", "BertForQuestionAnswering", "Bert"),
        ("BertForMaskedLM", "BertForPreTraining", "Bert"),
        ("BertForMaskedLM", "BertModel", "Bert"),
    ],
)
def test_class_is_found_by_the_weights_if_the_config_names_another(
    config_class: str, trained: str, family: str, tmp_path: Path
) -> None:
    config = tiny_config(family, tie_word_embeddings=True, num_labels=5)
    model = tiny_model(trained, config)
    no_labels = dict.fromkeys(("num_labels", "id2label", "label2id"))
    root = write_run(model, tmp_path / "ckpt", config_class, **no_labels)
    out = tmp_path / "out"
    report = export(root, out)
    assert_loads_as(out, trained, model)
    assert {path.name for path in out.glob("*.safetensors")} == {"model.safetensors"}
    assert mentions(report, trained, config_class)


@pytest.mark.parametrize("named", ["BertForMultipleChoice", "BertForSequenceClassification"])
def test_classes_with_equal_weights_are_not_guessed(named: str, tmp_path: Path) -> None:
    config = tiny_config("Bert", num_labels=1)
    out = tmp_path / "out"
    root = write_run(tiny_model(named, config), tmp_path / "ckpt", "BertForMaskedLM")
    error = refused(root, out, kind="names_mismatch", word=named)
    assert {"BertForMultipleChoice", "BertForSequenceClassification"} <= {
        word.strip(",") for word in str(error.expected).split()
    }
    write_config(root, config, architectures=[named])
    export(root, out)
    assert type(load(out)[0]).__name__ == named


def classifier(architecture: str, base: Path, stored: str) -> Any:
    """A classifier made from the weights of one class with the config of another."""
    family = architecture.partition("For")[0]
    tiny_model(stored, tiny_config(family)).save_pretrained(base)
    edit_json(base / "config.json", architectures=[f"{family}ForMaskedLM"])
    cls = type(tiny_model(architecture, tiny_config(family)))
    return cls.from_pretrained(base, num_labels=3, dtype=torch.float32)


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_classes_that_differ_only_in_frozen_weights_are_not_guessed(
    task: str, tmp_path: Path
) -> None:
    trained, base, run, out = f"BertFor{task}", *(tmp_path / n for n in ("base", "run", "out"))
    model = classifier(trained, base, "BertForPreTraining")
    save_part(model, run, lambda name: name.startswith("classifier"))
    refused(run, out, "--base", base, kind="names_mismatch", word=trained)
    write_config(run, model.config, architectures=[trained])
    export(run, out, "--base", base)
    assert_loads_as(out, trained, model)


def save_adapter(model: Any, task: str, root: Path) -> None:
    adapter = LoraConfig(task_type=task, r=2, target_modules=["query", "query_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, adapter)
    own = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    save_part(adapted, root, own.__contains__)
    adapted.peft_config["default"].save_pretrained(root)


@pytest.mark.parametrize(
    ("task", "architecture"),
    [("SEQ_CLS", "BertForSequenceClassification"), ("TOKEN_CLS", "BertForTokenClassification")],
)
def test_task_of_an_adapter_decides_the_class(task: str, architecture: str, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    save_adapter(classifier(architecture, base, "BertForPreTraining"), task, tmp_path / "run")
    export(tmp_path / "run", out, "--base", base)
    loaded, problems = load(out)
    assert (type(loaded).__name__, problems) == (architecture, {})


def test_unsaved_new_frozen_weight_is_reported_missing(tmp_path: Path) -> None:
    """The base has no pooler; without it the model would pass for a token classifier."""
    base = tmp_path / "base"
    model = classifier("DebertaV2ForSequenceClassification", base, "DebertaV2ForMaskedLM")
    save_adapter(model, "SEQ_CLS", tmp_path / "run")
    words = ("--base", base)
    refused(tmp_path / "run", tmp_path / "out", *words, kind="frozen_left_out", word="pooler.dense")


@pytest.mark.parametrize("model_type", ["qwen2", "gemma"])
def test_model_type_of_another_class_is_rejected(model_type: str, tmp_path: Path) -> None:
    """MODEL_TYPE: unless the config names code of its own."""
    name, changed = "LlamaForCausalLM", {"model_type": model_type}
    root = write_run(tiny_model(name, tiny_config()), tmp_path / "ckpt", name, **changed)
    refused(root, tmp_path / "out", kind="damaged", word=model_type)
    own = {"AutoModelForCausalLM": "owner/model--modeling.Own"}
    edit_json(root / "config.json", auto_map=own)
    export(root, tmp_path / "out")


# --- heads that the class does not have ---


class WithHead(torch.nn.Module):
    """A model with another head: TRL's, DeepSpeed-Chat's reward model, or one with both heads."""

    def __init__(self, path: str, inner: torch.nn.Module, lm_head: Any = None) -> None:
        super().__init__()
        name, _, head = path.partition(".")
        self.add_module(name, inner)
        if lm_head is not None:
            self.lm_head = lm_head
        self.add_module(head, torch.nn.Linear(16, 16 if lm_head else 1, bias=False))


HEADS: dict[str, tuple[Callable[[Any], torch.nn.Module], str, str, str]] = {
    "TRL": (
        lambda model: WithHead("pretrained_model.v_head", model),
        "LlamaForCausalLM",
        "value_head",
        "v_head.weight",
    ),
    "DeepSpeed-Chat": (
        lambda model: WithHead("rwtransformer.v_head", model.model),
        "LlamaModel",
        "value_head",
        "v_head.weight",
    ),
    "draft": (
        lambda model: WithHead("model.medusa_head", model.model, model.lm_head),
        "LlamaForCausalLM",
        "other_weights",
        "medusa_head.weight",
    ),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", HEADS)
def test_head_that_the_class_lacks_has_its_own_file(kind: str, stage: int, tmp_path: Path) -> None:
    wrap, architecture, file, name = HEADS[kind]
    config, out = tiny_config("Llama"), tmp_path / "out"
    causal = tiny_model("LlamaForCausalLM", config)
    model = wrap(causal)
    prefix = "module." if kind == "DeepSpeed-Chat" else ""
    run = Run(stage=stage)
    root = write_run(model, tmp_path / "ckpt", "LlamaForCausalLM", config, run, wrap=prefix)
    report = export(root, out)
    assert_loads_as(out, architecture, causal if "Causal" in architecture else causal.model)
    head = load_file(out / f"{file}.safetensors")
    assert name in head
    assert all(value.equal(model.state_dict()[n]) for n, value in head.items())
    manifest = manifest_of(out)
    assert (manifest["loadable"], manifest["heads"]) == (True, sorted(head))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    assert mentions(report, f"{file}.safetensors")
    assert name in (out / "README.md").read_text()
    assert verify(out, "--against", root)["ok"]


def test_reward_model_with_a_score_is_a_classifier(tmp_path: Path) -> None:
    config, out = tiny_config("Llama"), tmp_path / "out"
    reward = WithHead("model.score", tiny_model("LlamaForCausalLM", config).model)
    root = write_run(reward, tmp_path / "ckpt", "LlamaForCausalLM", config)
    export(root, out)
    assert_loads_as(out, "LlamaForSequenceClassification", reward)
