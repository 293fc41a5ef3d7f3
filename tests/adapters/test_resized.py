"""Embeddings that were resized before training; only PEFT's own file contains them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from tests.support import peft_models
from tests.support.checkpoints import Run
from tests.support.exports import export, manifest_of, mentions, read_json, refused, verify
from tests.support.live_models import files_of
from tests.support.oracles import differences
from tests.support.peft_models import ATTENTION, Form, Trained

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, RESIZED = 50, 57
WITHOUT_BASE, ZERO3 = Run(stage=2, exclude_frozen=True), Run(stage=3, exclude_frozen=True)
FILE = "adapter_model.safetensors"
MERGE = ("--adapter", "merge", "--base")
EMBEDDINGS = {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"}
TARGETS = {"target_modules": ATTENTION}
FORM = Form(peft_models.llama, TARGETS, rows=RESIZED)
FORMS = {
    "resized": FORM,
    "tied": Form(lambda: peft_models.llama(tied=True), TARGETS, rows=RESIZED),
    "one trained": Form(
        peft_models.llama, {**TARGETS, "modules_to_save": ["lm_head"]}, rows=RESIZED
    ),
    "targeted": Form(
        peft_models.llama, {"target_modules": ["embed_tokens", "lm_head"]}, rows=RESIZED
    ),
}


def train(folder: Path, form: Form = FORM, run: Run = WITHOUT_BASE) -> Trained:
    """A checkpoint as the Trainer saves it, with peft's file of 16 bits in its folder."""
    trained = peft_models.train(form, folder, run)
    for path in trained.live.rglob(FILE):
        tensors = {name: value.bfloat16() for name, value in load_file(path).items()}
        save_file(tensors, trained.checkpoint / path.relative_to(trained.live), {"format": "pt"})
    return trained


def add_tokens(folder: Path, tokens: int = RESIZED) -> None:
    """A tokenizer whose last tokens were added."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(ROWS)}))
    added = [AddedToken(f"<{number}>", special=True) for number in range(tokens - ROWS)]
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))


def saved_embeddings(trained: Trained) -> dict[str, torch.Tensor]:
    """What peft saves, without the untrained originals of copied modules."""
    saved = load_file(trained.live / FILE)
    return {n: t for n, t in saved.items() if "original_module" not in n and "_save." not in n}


@pytest.mark.parametrize("form", FORMS)
def test_kept_adapter_has_the_embeddings_that_peft_saved(form: str, tmp_path: Path) -> None:
    trained, out = train(tmp_path, FORMS[form]), tmp_path / "out"
    export(trained.checkpoint, out, "--adapter", "keep")
    assert differences(load_file(out / FILE), saved_embeddings(trained)) == []
    assert verify(out, "--against", trained.checkpoint)["ok"]
    assert FILE in [source["path"] for source in manifest_of(out)["sources"]]


@pytest.mark.parametrize("form", FORMS)
def test_merge_uses_the_embeddings_that_peft_saved(form: str, tmp_path: Path) -> None:
    trained, out = train(tmp_path, FORMS[form]), tmp_path / "out"
    add_tokens(trained.checkpoint)
    report = export(trained.checkpoint, out, *MERGE, trained.base)
    trained.model.merge_and_unload().save_pretrained(tmp_path / "peft")
    found, wanted = files_of(out), files_of(tmp_path / "peft")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
    assert found["model.embed_tokens.weight"].shape[0] == RESIZED
    assert read_json(out / "config.json")["vocab_size"] == RESIZED
    assert mentions(report, "model.embed_tokens.weight", FILE)
    assert verify(out, "--against", trained.checkpoint, "--base", trained.base)["ok"]


def of_another_step(path: Path) -> None:
    tensors = load_file(path)
    tensors[next(name for name in tensors if "lora_B" in name)][-1, -1] += 1
    save_file(tensors, path, {"format": "pt"})


def of_half_an_adapter(path: Path) -> None:
    tensors = load_file(path)
    del tensors[next(name for name in tensors if "lora_A" in name)]
    save_file(tensors, path)


@pytest.mark.parametrize("spoil", [of_another_step, of_half_an_adapter])
def test_peft_file_of_another_adapter_is_not_used(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    trained, out = train(tmp_path), tmp_path / "out"
    add_tokens(trained.checkpoint)
    spoil(trained.checkpoint / FILE)
    export(trained.checkpoint, out, "--adapter", "keep")
    assert not load_file(out / FILE).keys() & EMBEDDINGS
    words = (*MERGE, trained.base)
    refused(trained.checkpoint, tmp_path / "merged", *words, kind="frozen_left_out", word="embed")


def test_base_without_rows_for_added_tokens_is_rejected(tmp_path: Path) -> None:
    """RESIZED_EMBEDDING: with ZeRO-3, PEFT's file has no embedding."""
    trained, out, words = train(tmp_path, run=ZERO3), tmp_path / "out", [*MERGE]
    (trained.checkpoint / FILE).unlink()
    add_tokens(trained.checkpoint)
    words.append(str(trained.base))
    refused(trained.checkpoint, out, *words, kind="frozen_left_out", word=str(RESIZED - 1))
    export(trained.checkpoint, out, *words, "--exclude-frozen")


@pytest.mark.parametrize("tokens", [ROWS, RESIZED])
def test_base_with_the_added_tokens_is_accepted(tokens: int, tmp_path: Path) -> None:
    trained = train(tmp_path, Form(peft_models.llama, TARGETS), ZERO3)
    for folder in (trained.checkpoint, trained.base):
        add_tokens(folder, tokens)
    report = export(trained.checkpoint, tmp_path / "out", *MERGE, trained.base)
    assert mentions(report, str(RESIZED - 1), "tokenizer.json") == (tokens > ROWS)


def test_targeted_embedding_comes_from_the_base_or_is_reported_missing(tmp_path: Path) -> None:
    form = Form(peft_models.llama, {"target_modules": ["embed_tokens", "q_proj"]})
    trained = peft_models.train(form, tmp_path, ZERO3)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    report = export(trained.checkpoint, tmp_path / "no base")
    assert any(name in warning for warning in report["warnings"])
    words = ("--adapter", "keep", "--base", trained.base)
    export(trained.checkpoint, tmp_path / "out", *words)
    kept = load_file(tmp_path / "out" / FILE)
    assert kept.keys() == load_file(trained.live / FILE).keys()
    assert kept[name].equal(files_of(trained.base)["model.embed_tokens.weight"])
