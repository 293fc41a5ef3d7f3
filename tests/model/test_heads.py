"""Heads that a model's class does not know: written beside it, never dropped, never in its way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Model, Run, edit, save
from tests.support.hf_models import (
    differing,
    load,
    tiny_config,
    tiny_model,
    write_checkpoint,
    write_config,
)
from zexport.errors import NamesMismatchError
from zexport.model.fit import ModelNames, as_it_is, best_fit, choose_class
from zexport.weights.model_class import head_names, without_value_heads

_SHAPES = {
    "model.embed.weight": (5, 3),
    "model.layers.0.q.weight": (3, 3),
    "lm_head.weight": (5, 3),
}
_NAMES = ModelNames("Small", _SHAPES, frozenset(), {}, (as_it_is(_SHAPES),), "a test")


def _heads(names: ModelNames, stored: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    return head_names(best_fit(names, stored), stored)


@pytest.mark.parametrize("wrap", ["", "pretrained_model.", "module.pretrained_model."])
def test_a_head_stands_beside_the_model_at_the_level_where_it_begins(wrap: str) -> None:
    outer = wrap.removesuffix("pretrained_model.")
    stored = {f"{wrap}{name}": shape for name, shape in _SHAPES.items()}
    head = {f"{outer}v_head.summary.weight": (1, 3), f"{outer}v_head.summary.bias": (1,)}
    assert _heads(_NAMES, {**stored, **head}) == head.keys()
    assert _heads(_NAMES, stored) == frozenset()


@pytest.mark.parametrize(
    "more",
    [
        {"model.layers.0.extra.weight": (3,)},
        {f"other.{number}": (3,) for number in range(17)},
        {"other.a": (3,), "model.layers.0.extra": (3,)},
    ],
)
def test_what_does_not_stand_apart_or_is_large_is_no_head(more: dict[str, Any]) -> None:
    assert _heads(_NAMES, {**_SHAPES, **more}) == frozenset()


def test_another_model_than_the_configs_is_no_model_with_a_head() -> None:
    stored = {
        "transformer.wte.weight": (5, 3),
        "transformer.h.0.w": (3, 3),
        "lm_head.weight": (5, 3),
    }
    assert _heads(_NAMES, stored) == frozenset()


@pytest.mark.parametrize("outer", ["", "module.", "module._orig_mod."])
def test_a_value_head_is_known_by_name_behind_what_wrappers_put_before_it(outer: str) -> None:
    trunk = {f"{outer}pretrained_model.{name}": shape for name, shape in _SHAPES.items()}
    stored = {**trunk, f"{outer}v_head.summary.weight": (1, 3)}
    assert without_value_heads(stored) == trunk


def test_what_transformers_passes_over_is_no_head() -> None:
    names = replace(_NAMES, ignored=(r"^mtp\.",))
    assert _heads(names, {**_SHAPES, "mtp.0.weight": (3,)}) == frozenset()
    assert _heads(_NAMES, {**_SHAPES, "mtp.0.weight": (3,)}) == {"mtp.0.weight"}


def test_of_classes_of_the_same_names_shapes_choose_none() -> None:
    """Sizes of a config may be those from before training; a class chosen by them is a guess."""
    one = replace(_NAMES, architecture="One")
    other = replace(one, architecture="Other", shapes={**_SHAPES, "lm_head.weight": (1, 3)})
    chosen = choose_class([one, other], {**_SHAPES, "lm_head.weight": (1, 3)})
    assert chosen is not None
    assert (chosen.architecture, chosen.shapes) == (None, other.shapes)
    another = replace(one, shapes={"else": (1,)}, layouts=())
    assert choose_class([one, another], dict(_SHAPES)) == one


class _WithValueHead(torch.nn.Module):
    """As TRL wraps a causal model: its own names, below ``pretrained_model``, and a head."""

    def __init__(self, model: torch.nn.Module, hidden: int = 16) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = torch.nn.ModuleDict({"summary": torch.nn.Linear(hidden, 1)})


def _as_the_state_dict_names(root: Path) -> None:
    """Leave the wrapper's part out of the names of the module, as its ``state_dict`` does."""

    def rename(state: dict[str, Any]) -> None:
        module = state["module"]
        state["module"] = {name.removeprefix("pretrained_model."): module[name] for name in module}

    for path in root.glob("global_step2/*model_states.pt"):
        edit(path, rename)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_a_value_head_lies_beside_a_model_that_loads(
    stage: int, tied: bool, tmp_path: Path
) -> None:
    config = tiny_config("Llama", tie_word_embeddings=tied)
    model = _WithValueHead(tiny_model("LlamaForCausalLM", config))
    root = write_checkpoint(model, tmp_path / "ckpt", Run(stage=stage))
    _as_the_state_dict_names(root)
    write_config(root, config, architectures=["LlamaForCausalLM"])
    out = tmp_path / "out"
    report = zexport.consolidate(root, out)
    loaded, problems = load(out)
    assert problems == {}
    assert differing(loaded, model.pretrained_model) == []
    head = load_file(out / "value_head.safetensors")
    assert head.keys() == {"v_head.summary.weight", "v_head.summary.bias"}
    assert all(value.equal(model.state_dict()[name]) for name, value in head.items())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    manifest = json.loads((out / "zexport_manifest.json").read_text())
    assert (manifest["loadable"], manifest["heads"]) == (True, sorted(head))
    assert any("value_head.safetensors" in warning for warning in report.warnings)
    assert "`v_head.summary.bias`" in (out / "README.md").read_text()
    assert zexport.verify_export(out, against=root).ok


class _Critic(torch.nn.Module):
    """As RLHF trainers build a critic: the model without its head, and one of its own."""

    def __init__(self, model: Any, head: str) -> None:
        super().__init__()
        self.model = model.model
        setattr(self, head, torch.nn.Linear(16, 1, bias=False))


@pytest.mark.slow
def test_a_critic_on_the_config_of_a_causal_model_is_a_model_and_a_head(tmp_path: Path) -> None:
    config = tiny_config("Llama")
    critic = _Critic(tiny_model("LlamaForCausalLM", config), "value_head")
    root = write_checkpoint(critic, tmp_path / "ckpt")
    write_config(root, config, architectures=["LlamaForCausalLM"])
    out = tmp_path / "out"
    zexport.consolidate(root, out)
    loaded, problems = load(out)
    assert (type(loaded).__name__, problems) == ("LlamaModel", {})
    assert differing(loaded, critic.model) == []
    assert load_file(out / "value_head.safetensors")["value_head.weight"].shape == (1, 16)


@pytest.mark.slow
def test_a_reward_model_on_the_config_of_a_causal_model_is_a_classifier(tmp_path: Path) -> None:
    config = tiny_config("Llama")
    critic = _Critic(tiny_model("LlamaForCausalLM", config), "score")
    root = write_checkpoint(critic, tmp_path / "ckpt")
    write_config(root, config, architectures=["LlamaForCausalLM"])
    out = tmp_path / "out"
    report = zexport.consolidate(root, out)
    loaded, problems = load(out)
    assert problems == {}
    assert type(loaded).__name__ == "LlamaForSequenceClassification"
    assert loaded.config.num_labels == 1
    assert differing(loaded, critic) == []
    assert any("was LlamaForCausalLM" in warning for warning in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_class", "trained", "family"),
    [
        ("LlamaForCausalLM", "LlamaForSequenceClassification", "Llama"),
        ("LlamaForCausalLM", "LlamaForTokenClassification", "Llama"),
        ("GPT2LMHeadModel", "GPT2DoubleHeadsModel", "GPT2"),
        ("BertForMaskedLM", "BertForQuestionAnswering", "Bert"),
        ("BertForMaskedLM", "BertForSequenceClassification", "Bert"),
        ("BertForMaskedLM", "BertForPreTraining", "Bert"),
        ("BertForMaskedLM", "BertModel", "Bert"),
    ],
)
def test_a_model_on_the_config_of_another_of_its_kind_is_what_it_is(
    config_class: str, trained: str, family: str, tmp_path: Path
) -> None:
    """Also where the config's class lacks no weight, since its output is tied to its input."""
    config = tiny_config(family, tie_word_embeddings=True, num_labels=5)
    model = tiny_model(trained, config)
    root = write_checkpoint(model, tmp_path / "ckpt")
    stated = {"num_labels": None, "id2label": None, "label2id": None}
    write_config(root, config, architectures=[config_class], **stated)
    out = tmp_path / "out"
    report = zexport.consolidate(root, out)
    loaded, problems = load(out)
    assert (type(loaded).__name__, problems) == (trained, {})
    assert differing(loaded, model) == []
    assert {path.name for path in out.glob("*.safetensors")} == {"model.safetensors"}
    assert any(f"was {config_class}" in warning for warning in report.notes)


def _with_buffer(root: Path, name: str) -> None:
    """As older versions of transformers saved it, which worked out less at the start."""

    def add(state: dict[str, Any]) -> None:
        state["module"][name] = torch.ones(4)
        state["buffer_names"] = [*state["buffer_names"], name]

    for path in root.rglob("*model_states.pt"):
        edit(path, add)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_class", "trained", "family", "buffer"),
    [
        (
            "LlamaForCausalLM",
            "LlamaForSequenceClassification",
            "Llama",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
        ),
        (
            "GPT2LMHeadModel",
            "GPT2ForSequenceClassification",
            "GPT2",
            "transformer.h.0.attn.masked_bias",
        ),
    ],
)
def test_buffers_of_older_versions_do_not_hide_the_class(
    config_class: str, trained: str, family: str, buffer: str, tmp_path: Path
) -> None:
    config = tiny_config(family, tie_word_embeddings=True, num_labels=5)
    model = tiny_model(trained, config)
    root = write_checkpoint(model, tmp_path / "ckpt")
    _with_buffer(root, buffer)
    write_config(root, config, architectures=[config_class])
    zexport.consolidate(root, tmp_path / "out")
    loaded, problems = load(tmp_path / "out")
    assert type(loaded).__name__ == trained
    assert problems.keys() <= {"unexpected_keys"}
    assert differing(loaded, model) == []


@pytest.mark.slow
@pytest.mark.parametrize(("buffer", "tied"), [("", True), ("model.rotary_emb.inv_freq", False)])
def test_the_class_is_found_also_where_frozen_weights_were_left_out(
    buffer: str, tied: bool, tmp_path: Path
) -> None:
    config = tiny_config("Llama", tie_word_embeddings=tied, num_labels=5)
    model = tiny_model("LlamaForSequenceClassification", config)
    base = tiny_model("LlamaForCausalLM", config)
    base.model.load_state_dict(model.model.state_dict())
    base.save_pretrained(tmp_path / "base")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    trained = {n: t for n, t in weights.items() if n.startswith(("score.", "model.layers.1."))}
    frozen = {n: t.bfloat16() for n, t in weights.items() if n not in trained}
    run = Run(stage=2, exclude_frozen=True)
    root = save(Model([trained], frozen=frozen), run, tmp_path / "ckpt")
    if buffer:
        _with_buffer(root, buffer)
    zexport.consolidate(root, tmp_path / "out", zexport.ExportOptions(base=tmp_path / "base"))
    loaded, problems = load(tmp_path / "out")
    assert (type(loaded).__name__, problems) == ("LlamaForSequenceClassification", {})
    assert differing(loaded, model) == []


@pytest.mark.slow
@pytest.mark.parametrize("named", ["BertForMultipleChoice", "BertForSequenceClassification"])
def test_of_two_classes_with_the_same_weights_only_the_config_decides(
    named: str, tmp_path: Path
) -> None:
    config = tiny_config("Bert", num_labels=1)
    root = write_checkpoint(tiny_model(named, config), tmp_path / "ckpt")
    write_config(root, config, architectures=["BertForMaskedLM"])
    with pytest.raises(NamesMismatchError, match="several have these weights") as caught:
        zexport.consolidate(root, tmp_path / "out")
    assert {"BertForMultipleChoice", "BertForSequenceClassification"} <= set(
        str(caught.value.expected).replace(",", "").split()
    )
    write_config(root, config, architectures=[named])
    zexport.consolidate(root, tmp_path / "out")
    assert type(load(tmp_path / "out")[0]).__name__ == named


class _WithDraft(torch.nn.Module):
    """A causal model, and small weights beside it that are no value head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.lm_head = model.model, model.lm_head
        self.medusa_head = torch.nn.Linear(16, 16)


@pytest.mark.slow
def test_weights_beside_a_model_that_are_no_value_head_have_a_file_of_their_own(
    tmp_path: Path,
) -> None:
    config = tiny_config("Llama")
    model = _WithDraft(tiny_model("LlamaForCausalLM", config))
    root = write_checkpoint(model, tmp_path / "ckpt")
    write_config(root, config, architectures=["LlamaForCausalLM"])
    out = tmp_path / "out"
    report = zexport.consolidate(root, out)
    assert load(out)[1] == {}
    assert load_file(out / "other_weights.safetensors").keys() == {
        "medusa_head.weight",
        "medusa_head.bias",
    }
    assert not (out / "value_head.safetensors").exists()
    assert any("other_weights.safetensors" in warning for warning in report.warnings)
    assert "`other_weights.safetensors` holds" in (out / "README.md").read_text()
    assert zexport.verify_export(out, against=root).ok


@pytest.mark.slow
def test_a_reward_model_of_deepspeed_chat_is_a_model_and_a_head(tmp_path: Path) -> None:
    """Trunk and head below a wrapper: the head's names lose it as the model's do."""
    config = tiny_config("Llama")
    reward = torch.nn.Module()
    reward.rwtransformer = tiny_model("LlamaModel", config)
    reward.v_head = torch.nn.Linear(16, 1, bias=False)
    root = write_checkpoint(reward, tmp_path / "ckpt", wrap="module.")
    write_config(root, config, architectures=["LlamaForCausalLM"])
    out = tmp_path / "out"
    zexport.consolidate(root, out)
    loaded, problems = load(out)
    assert (type(loaded).__name__, problems) == ("LlamaModel", {})
    assert differing(loaded, reward.rwtransformer) == []
    assert load_file(out / "value_head.safetensors").keys() == {"v_head.weight"}


@pytest.mark.slow
def test_layout_memory_keeps_a_head_among_the_weights(tmp_path: Path) -> None:
    config = tiny_config("Llama")
    model = _WithValueHead(tiny_model("LlamaForCausalLM", config))
    root = write_checkpoint(model, tmp_path / "ckpt")
    write_config(root, config, architectures=["LlamaForCausalLM"])
    options = zexport.ExportOptions(layout=zexport.NameLayout.MEMORY)
    zexport.consolidate(root, tmp_path / "out", options)
    assert "v_head.summary.bias" in load_file(tmp_path / "out" / "model.safetensors")
