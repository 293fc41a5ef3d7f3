"""A config that names a class of one model type, and another model type, is not exported unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from transformers.models.auto import modeling_auto

from tests.support.live_models import checkpoint_of, live_model
from zexport import consolidate
from zexport.errors import DamagedCheckpointError
from zexport.model.names_process import _other_type


def with_keys(root: Path, **keys: object) -> Path:
    path = root / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return root


def other_type(architecture: str, model_type: str) -> str:
    return _other_type(getattr(transformers, architecture), transformers.CONFIG_MAPPING[model_type])


@pytest.mark.parametrize("model_type", ["qwen2", "gemma"])
def test_a_class_of_another_model_type_is_refused(model_type: str, tmp_path: Path) -> None:
    root = with_keys(checkpoint_of(live_model("llama"), tmp_path / "run"), model_type=model_type)
    with pytest.raises(DamagedCheckpointError) as caught:
        consolidate(root, tmp_path / "out")
    assert f"{model_type} in config.json's model_type" in str(caught.value)
    assert "llama in LlamaForCausalLM of its architectures" in str(caught.value)
    assert "--base" in (caught.value.hint or "")


def test_code_of_its_own_may_have_any_model_type(tmp_path: Path) -> None:
    root = checkpoint_of(live_model("llama"), tmp_path / "run")
    code = {"AutoModelForCausalLM": "nobody/model--modeling.Own"}
    consolidate(with_keys(root, model_type="qwen2", auto_map=code), tmp_path / "out")


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("LlamaForCausalLM", "internlm3"),
        ("GPT2LMHeadModel", "gpt-sw3"),
        ("Gemma3ForCausalLM", "gemma3"),
        ("Gemma3ForConditionalGeneration", "gemma3_text"),
        ("LlavaForConditionalGeneration", "llama"),
        ("T5EncoderModel", "t5"),
    ],
)
def test_classes_that_serve_several_model_types_are_of_each(
    architecture: str, model_type: str
) -> None:
    assert other_type(architecture, model_type) == ""


def test_no_class_is_of_another_model_type_than_transformers_has_it_for() -> None:
    tables = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES)
    pairs = {
        (name, model_type)
        for table in tables
        for model_type, names in table.items()
        for name in ([names] if isinstance(names, str) else names)
        if model_type in transformers.CONFIG_MAPPING and "llama" in model_type + name.lower()
    }
    assert len(pairs) > 5
    assert not [pair for pair in pairs if other_type(*pair)]
