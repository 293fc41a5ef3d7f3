"""The model card has metadata that the Hub accepts, and no local paths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.support.checkpoints import Run, save, small_model
from tests.support.exports import export


def card(root: Path, *words: object, **config: Any) -> ModelCard:
    if config:
        content = {"model_type": "no_such_model", **config}
        (root / "config.json").write_text(json.dumps(content))
    out = root.parent / "out"
    export(root, out, "--overwrite", *words)
    text = (out / "README.md").read_text()
    assert str(root.parent) not in text
    return ModelCard(text)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForCausalLM", "text-generation"),
        ("LlamaForSequenceClassification", "text-classification"),
        ("LlavaForConditionalGeneration", None),
    ],
)
def test_task_is_that_of_the_class(architecture: str, task: str | None, zero2: Path) -> None:
    data = card(zero2, architectures=[architecture]).data
    assert (data.pipeline_tag, data.library_name) == (task, "transformers")


def test_card_names_checkpoint_step_and_versions(zero2: Path) -> None:
    text = str(card(zero2, "--dtype", "bf16"))
    for fact in ("ZeRO-2", "zero2/global_step2", "2 ranks", "0.19.8", "2 steps", "bfloat16"):
        assert fact in text


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "/data/models/llama", "a/b\nlicense: mit"])
def test_base_model_must_be_a_hub_id(name: str, zero2: Path) -> None:
    data = card(zero2, _name_or_path=name).data
    assert (data.base_model, data.license) == (name if "Qwen" in name else None, None)


@pytest.mark.parametrize("written", ["org/name", '"org/name"', "\n- org/name"])
@pytest.mark.parametrize("license_name", ["llama3", "3.1", "no", "ä"])
def test_license_and_base_model_are_those_of_the_base_card(
    written: str, license_name: str, zero2: Path, tmp_path: Path
) -> None:
    (base := tmp_path / "base").mkdir()
    own = f"license: other\nlicense_name: {license_name}\nlicense_link: LICENSE"
    (base / "README.md").write_text(f"---\n{own}\nbase_model: {written}\n---\nx")
    data = card(zero2, "--base", base).data
    assert (data.base_model, data.license, data.license_link) == ("org/name", "other", "LICENSE")
    assert data.license_name == license_name


def test_tag_cannot_write_into_the_card(tmp_path: Path) -> None:
    root = save(small_model(), Run(), tmp_path / "ckpt", tag="a`<b>[c](d)")
    text = str(card(root))
    assert not re.search(r"<b>|\[c\]|a`", text)
