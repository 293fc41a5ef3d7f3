"""Tied weights: one tensor if all copies agree, two tensors and an untied config if not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import peft_models
from tests.support.checkpoints import Model, Run, edit, save
from tests.support.exports import export, manifest_of, mentions, verify
from tests.support.hf_models import differing, load, tiny_config, tiny_model, write_config
from tests.support.live_models import checkpoint_of, files_of, in_training, live_model
from tests.support.peft_models import Form, Trained, llama
from tests.support.real_cases import facts

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WITHOUT_FROZEN = Run(stage=2, exclude_frozen=True)


def is_tied(out: Path) -> object:
    return json.loads((out / "config.json").read_text())["tie_word_embeddings"]


# --- both names in the checkpoint ---


@pytest.mark.slow
@pytest.mark.parametrize("differs", [False, True])
def test_tied_weights_stored_twice_are_compared(differs: bool, tmp_path: Path) -> None:
    model = live_model("llama-tied")
    trained = in_training(model)
    head = trained.trained[EMBEDDING].clone()
    head[3, 2] += differs
    twice = replace(trained, groups=[{**trained.trained, HEAD: head}], tied={})
    root, out = checkpoint_of(model, tmp_path / "run", trained=twice), tmp_path / "out"
    report = export(root, out)
    expected = twice.trained if differs else trained.trained
    assert facts(files_of(out)) == facts(expected)
    assert (is_tied(out), mentions(report, HEAD)) == (not differs, differs)
    assert manifest_of(out)["tied"] == ({} if differs else {HEAD: EMBEDDING})
    loaded, problems = load(out)
    assert problems == {}
    assert loaded.state_dict()[HEAD].equal(head)


@pytest.mark.slow
@pytest.mark.parametrize("trained_name", [EMBEDDING, HEAD])
def test_one_name_of_a_tied_weight_is_enough(trained_name: str, tmp_path: Path) -> None:
    """The weight is written under the name that the model's class loads it by."""
    model = live_model("llama-tied")
    whole = in_training(model)
    trained = {trained_name if n == EMBEDDING else n: t for n, t in whole.trained.items()}
    root = checkpoint_of(model, tmp_path / "run", trained=replace(whole, groups=[trained], tied={}))
    assert export(root, tmp_path / "out")["loadable"]
    assert facts(files_of(tmp_path / "out")) == facts(whole.trained)


@pytest.mark.slow
def test_tie_that_the_config_lacks_is_written_twice(tmp_path: Path) -> None:
    model = live_model("llama")
    whole = in_training(model)
    trained = {name: value for name, value in whole.trained.items() if name != HEAD}
    tied = replace(whole, groups=[trained], tied={HEAD: EMBEDDING})
    root = checkpoint_of(model, tmp_path / "run", trained=tied)
    report = export(root, tmp_path / "out")
    assert report["loadable"]
    assert facts(files_of(tmp_path / "out")) == facts({**trained, HEAD: trained[EMBEDDING]})
    assert not export(root, tmp_path / "memory", "--layout", "memory")["loadable"]


# --- one of them in the base ---


def fine_tune(base: Path, root: Path, model_class: str, config: Any, trained: str) -> Any:
    """A model trained from ``base``; its checkpoint contains only what was trained."""
    model = load(base, model_class)[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if trained in name:
                parameter.add_(0.01)
    whole = in_training(model)
    own = {name: tensor for name, tensor in whole.trained.items() if trained in name}
    frozen = {name: tensor for name, tensor in whole.trained.items() if name not in own}
    state = Model([own], frozen=frozen, tied=whole.tied, dtype=torch.float32)
    write_config(save(state, WITHOUT_FROZEN, root), config, architectures=[model_class])
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "edits", "trained", "stays_tied"),
    [
        ("LlamaForCausalLM", {HEAD: "other"}, "model.norm", False),
        ("LlamaForCausalLM", {HEAD: "other"}, "lm_head", False),
        ("LlamaForCausalLM", {HEAD: "same"}, "model.norm", True),
        ("LlamaForCausalLM", {HEAD: "same", EMBEDDING: None}, "model.norm", True),
        ("BertForMaskedLM", {"cls.predictions.decoder.weight": "other"}, "layer.1.", False),
    ],
)
def test_base_decides_whether_weights_are_tied(
    model_class: str, edits: Any, trained: str, stays_tied: bool, tmp_path: Path
) -> None:
    """transformers ignores the config's tie if a model folder has two values that differ."""
    config = tiny_config(model_class.partition("For")[0], tie_word_embeddings=True)
    base, root, out = tmp_path / "base", tmp_path / "run", tmp_path / "out"
    model = tiny_model(model_class, config)
    model.save_pretrained(base)
    torch.manual_seed(5)
    made = {"other": torch.randn(61, 16), "same": model.state_dict().get(EMBEDDING), None: None}
    tensors = {**files_of(base), **{name: made[one] for name, one in edits.items()}}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, base / "model.safetensors", {"format": "pt"})
    live = fine_tune(base, root, model_class, config, trained)
    export(root, out, "--base", base)
    loaded, problems = load(out)
    assert (problems, differing(loaded, live)) == ({}, [])
    assert is_tied(out) is stays_tied
    assert verify(out, "--against", root, "--base", base)["ok"]


# --- adapters ---


def check_merge(trained: Trained, out: Path, *options: object) -> None:
    """Merge the adapter; the result must be peft's, up to the rounding of a product."""
    export(trained.checkpoint, out, "--adapter", "merge", *options)
    trained.model.merge_and_unload().save_pretrained(out.parent / "peft")
    found, wanted = files_of(out), files_of(out.parent / "peft")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def untied_llama() -> Any:
    """A model with two weights that its config ties."""
    model = llama(tied=True)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.all_tied_weights_keys = {}
    return model


@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=["neither", "both", "saved embedding"],
)
def test_adapter_is_merged_into_two_weights_that_the_config_ties(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    trained = peft_models.train(Form(untied_llama, keys), tmp_path, WITHOUT_FROZEN)
    shutil.copy(trained.base / "config.json", trained.checkpoint)
    check_merge(trained, tmp_path / "out", "--base", trained.base)
    assert is_tied(tmp_path / "out") is False


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_untrained_copy_under_an_alias_is_not_exported(saved: list[str], tmp_path: Path) -> None:
    """DeepSpeed leaves it in the module states."""
    keys = {"target_modules": ["q_proj"], "modules_to_save": saved, "ensure_weight_tying": True}
    trained = peft_models.train(Form(lambda: llama(tied=True), keys), tmp_path, WITHOUT_FROZEN)
    original = load_file(trained.base / "model.safetensors")[EMBEDDING].bfloat16()
    name = "base_model.model.lm_head.original_module.weight"
    for path in trained.checkpoint.rglob("*model_states.pt"):
        edit(path, lambda state: state["module"].update({name: original}))
    shutil.copy(trained.base / "config.json", trained.checkpoint)
    check_merge(trained, tmp_path / "out", "--base", trained.base)
