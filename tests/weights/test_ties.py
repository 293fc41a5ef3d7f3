"""Declared ties against the values that checkpoint and base hold: what is one weight, what two."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.test_adapters import assert_close, merge_of, merged_by_peft
from tests.support import peft_models
from tests.support.checkpoints import Model, Run, edit, save
from tests.support.hf_models import load, tiny_config, tiny_model, write_config
from tests.support.peft_models import FORMS, Form, Trained, llama
from zexport import ExportOptions, consolidate, verify_export
from zexport.options import NameLayout

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


def _edit_base(base: Path, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Add tensors to a model folder, or take some away."""
    path = base / "model.safetensors"
    content = {**load_file(path), **tensors}
    kept = {name: tensor for name, tensor in content.items() if tensor is not None}
    save_file(kept, path, {"format": "pt"})


def _fine_tuned(
    base: Path, root: Path, architecture: str, config: Any, trained: str
) -> dict[str, torch.Tensor]:
    """The state of a model that began from ``base``; the checkpoint has what was trained of it."""
    model = load(base, architecture)[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if trained in name:
                parameter.add_(0.01)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    own = {name: tensor for name, tensor in weights.items() if trained in name}
    frozen = {name: tensor for name, tensor in weights.items() if name not in own}
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {n: first[id(p)] for n, p in every.items() if first[id(p)] != n}
    zero = Model([own], frozen=frozen, tied=tied, dtype=torch.float32)
    save(zero, Run(stage=2, exclude_frozen=True), root)
    write_config(root, config, architectures=[architecture])
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["model.norm", "embed_tokens", "lm_head"])
@pytest.mark.parametrize("layout", NameLayout)
def test_a_base_whose_head_is_another_gives_both_weights(
    trained: str, layout: NameLayout, tmp_path: Path
) -> None:
    """Its config ties them; transformers does not, where a model folder has two that differ."""
    config, base, root = tiny_config(tie_word_embeddings=True), tmp_path / "b", tmp_path / "c"
    tiny_model("LlamaForCausalLM", config).save_pretrained(base)
    _edit_base(base, {HEAD: torch.randn(61, 16)})
    state = _fine_tuned(base, root, "LlamaForCausalLM", config, trained)
    assert not state[EMBEDDING].equal(state[HEAD])
    report = consolidate(root, tmp_path / "out", ExportOptions(base=base, layout=layout))
    loaded, problems = load(tmp_path / "out")
    assert problems == {}
    assert loaded.config.tie_word_embeddings is False
    found = loaded.state_dict()
    assert found.keys() == state.keys()
    assert all(found[name].equal(value) for name, value in state.items())
    assert any("differs from" in warning for warning in report.warnings)
    assert verify_export(tmp_path / "out", against=root, base=base).ok


@pytest.mark.slow
def test_a_config_that_unties_one_pair_leaves_no_name_of_another_out(tmp_path: Path) -> None:
    """BERT's output has a tied weight and a tied bias; its config has one word for both."""
    config, base = tiny_config("Bert", tie_word_embeddings=True), tmp_path / "base"
    tiny_model("BertForMaskedLM", config).save_pretrained(base)
    _edit_base(base, {"cls.predictions.decoder.weight": torch.randn(61, 16)})
    state = _fine_tuned(base, tmp_path / "run", "BertForMaskedLM", config, "layer.1.")
    consolidate(tmp_path / "run", tmp_path / "out", ExportOptions(base=base))
    loaded, problems = load(tmp_path / "out")
    assert problems == {}
    assert all(loaded.state_dict()[name].equal(value) for name, value in state.items())


@pytest.mark.slow
def test_a_base_that_has_its_tied_weight_twice_and_the_same_stays_tied(tmp_path: Path) -> None:
    config, base, root = tiny_config(tie_word_embeddings=True), tmp_path / "b", tmp_path / "c"
    model = tiny_model("LlamaForCausalLM", config)
    model.save_pretrained(base)
    _edit_base(base, {HEAD: model.state_dict()[EMBEDDING].clone()})
    _fine_tuned(base, root, "LlamaForCausalLM", config, "model.norm")
    consolidate(root, tmp_path / "out", ExportOptions(base=base))
    assert HEAD not in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.slow
def test_a_tied_weight_that_the_base_has_under_its_alias_alone_is_found(tmp_path: Path) -> None:
    config, base, root = tiny_config(tie_word_embeddings=True), tmp_path / "b", tmp_path / "c"
    model = tiny_model("LlamaForCausalLM", config)
    model.save_pretrained(base)
    _edit_base(base, {HEAD: model.state_dict()[EMBEDDING], EMBEDDING: None})
    state = _fine_tuned(base, root, "LlamaForCausalLM", config, "model.norm")
    consolidate(root, tmp_path / "out", ExportOptions(base=base))
    loaded, problems = load(tmp_path / "out")
    assert problems == {}
    assert all(loaded.state_dict()[name].equal(value) for name, value in state.items())


def _untied_llama() -> Any:
    """A model whose config ties what its weights do not: as transformers loads such a folder."""
    model = llama(tied=True)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.all_tied_weights_keys = {}
    return model


UNTIED = {
    "neither": {"target_modules": ["q_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["lm_head", "embed_tokens"]},
    "saved_embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("form", UNTIED)
@pytest.mark.parametrize("base", [True, False])
def test_an_adapter_is_merged_into_each_of_two_weights_that_the_config_ties(
    form: str, base: bool, tmp_path: Path
) -> None:
    run = Run(stage=2, exclude_frozen=base)
    trained = peft_models.train(Form(_untied_llama, UNTIED[form]), tmp_path, run)
    assert {EMBEDDING, HEAD} <= load_file(trained.base / "model.safetensors").keys()
    found = _merged(trained, tmp_path / "out", base=base)
    wanted = merged_by_peft(trained).state_dict()
    assert not wanted[EMBEDDING].equal(wanted[HEAD])
    assert_close(found, wanted)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("form", ["plain", "tied_embeddings", "tied_saved"])
def test_an_adapter_is_merged_into_a_base_that_has_the_alias_alone(
    form: str, tmp_path: Path
) -> None:
    kind = replace(FORMS[form], base=lambda: llama(tied=True))
    trained = peft_models.train(kind, tmp_path, Run(stage=2, exclude_frozen=True))
    weight = load_file(trained.base / "model.safetensors")[EMBEDDING]
    _edit_base(trained.base, {HEAD: weight, EMBEDDING: None})
    found = _merged(trained, tmp_path / "out", base=True)
    wanted = merged_by_peft(trained)
    wanted.save_pretrained(tmp_path / "peft")
    assert_close(found, load_file(tmp_path / "peft" / "model.safetensors"))


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("known", [True, False])
def test_the_untrained_original_of_a_head_that_was_trained_as_the_embedding_is_left_out(
    saved: list[str], known: bool, tmp_path: Path
) -> None:
    """DeepSpeed drops a frozen weight under its first name, and leaves its alias in the module."""
    keys = {"target_modules": ["q_proj"], "modules_to_save": saved, "ensure_weight_tying": True}
    form = Form(lambda: llama(tied=True), keys)
    trained = peft_models.train(form, tmp_path, Run(stage=2, exclude_frozen=True))
    original = load_file(trained.base / "model.safetensors")[EMBEDDING].bfloat16()
    _leave_in_module(trained, "lm_head.original_module.weight", original)
    if not known:
        (trained.base / "config.json").unlink()
    found = _merged(trained, tmp_path / "out", base=True, config=known)
    wanted = merged_by_peft(trained).state_dict()
    assert wanted[EMBEDDING].equal(wanted[HEAD])
    assert_close(found, {name: wanted[name] for name in wanted if name != HEAD})


@pytest.mark.parametrize("target", ["embed_tokens", "q_proj"])
def test_an_embedding_is_merged_into_although_its_original_goes_by_the_heads_name(
    target: str, tmp_path: Path
) -> None:
    form = Form(lambda: llama(tied=True), {"target_modules": [target]})
    trained = peft_models.train(form, tmp_path, Run(stage=2, exclude_frozen=True))
    original = load_file(trained.base / "model.safetensors")[EMBEDDING].bfloat16()
    _leave_in_module(trained, "lm_head.weight", original)
    found = _merged(trained, tmp_path / "out", base=True)
    wanted = merged_by_peft(trained).state_dict()
    assert_close(found, {name: wanted[name] for name in wanted if name != HEAD})


def _leave_in_module(trained: Trained, name: str, tensor: torch.Tensor) -> None:
    def add(state: dict[str, Any]) -> None:
        state["module"][f"base_model.model.{name}"] = tensor

    for path in trained.checkpoint.rglob("*model_states.pt"):
        edit(path, add)


def _merged(
    trained: Trained, out: Path, *, base: bool, config: bool = True
) -> dict[str, torch.Tensor]:
    if config:
        content = (trained.base / "config.json").read_bytes()
        (trained.checkpoint / "config.json").write_bytes(content)
    return merge_of(trained, out, base=base)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_tie_whose_names_are_stored_apart_and_equal_holds(target: str, tmp_path: Path) -> None:
    """As in a save with experts, which clones every tensor."""
    form = Form(lambda: llama(tied=True), {"target_modules": [target]})
    trained = peft_models.train(form, tmp_path, Run(stage=2))
    weight = load_file(trained.base / "model.safetensors")[EMBEDDING].bfloat16()
    other = {"embed_tokens": "lm_head.weight", "lm_head": "model.embed_tokens.weight"}[target]
    _leave_in_module(trained, other, weight)
    for path in trained.checkpoint.rglob("*model_states.pt"):
        edit(path, _store_apart)
    found = _merged(trained, tmp_path / "out", base=False)
    wanted = merged_by_peft(trained).state_dict()
    assert_close(found, {name: wanted[name] for name in wanted if name != HEAD})


def _store_apart(state: dict[str, Any]) -> None:
    state["shared_params"] = {}
