"""What an export changes in a config, and that all else stays as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import tiny_config, tiny_model
from zexport.model.config import ConfigFile
from zexport.ranges.dtypes import DType
from zexport.store.json import Json


def _config(content: Mapping[str, Json]) -> ConfigFile:
    return ConfigFile(Path("config.json"), content)


def test_only_the_element_type_is_edited() -> None:
    content: dict[str, Json] = {
        "torch_dtype": "bfloat16",
        "rope": {"theta": 1e-06, "dtype": "kept"},
        "text_config": {"dtype": "bfloat16", "hidden_size": 8},
        "encoder": {"model_type": "bert", "torch_dtype": "float16"},
        "vision_config": {"dtype": None},
        "quantization_config": {"dtype": "kept"},
        "architectures": ["X"],
        "name": "ä",
    }
    edited = json.loads(_config(content).edited(DType.F32, "Y"))
    assert edited == {
        **content,
        "dtype": "float32",
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32", "hidden_size": 8},
        "encoder": {"model_type": "bert", "torch_dtype": "float32"},
    }
    assert list(edited) == [*content, "dtype"]


def test_all_else_stays_as_it_was_to_the_byte() -> None:
    text = """{
  "zeta": 1e-05,
  "alpha": 123456789012345678901234567890,
  "architectures": [
    "X"
  ],
  "dtype": "float32",
  "beta": 10000.0,
  "empty": {},
  "list": [],
  "naïve": "日本",
  "nothing": null,
  "nested": {
    "deep": [
      -0.0,
      1.5e+300,
      true
    ]
  }
}
"""
    assert _config(json.loads(text)).edited(DType.F32).decode() == text


@pytest.mark.parametrize("architectures", [None, [], ""])
def test_the_architecture_is_written_where_there_is_none(architectures: Json) -> None:
    config = _config({"model_type": "x", "architectures": architectures})
    assert json.loads(config.edited(DType.BF16, "Y"))["architectures"] == ["Y"]
    edited = _config({"model_type": "x"}).edited(DType.BF16, "Y")
    assert json.loads(edited) == {"model_type": "x", "architectures": ["Y"], "dtype": "bfloat16"}


def test_one_architecture_as_a_string_becomes_the_list_that_readers_expect() -> None:
    config = _config({"architectures": "XForCausalLM"})
    assert config.architectures == ("XForCausalLM",)
    assert json.loads(config.edited(DType.F32, "Y"))["architectures"] == ["XForCausalLM"]
    assert json.loads(config.serialized())["architectures"] == ["XForCausalLM"]


def test_the_tie_is_written_at_the_top_and_where_the_language_model_states_it() -> None:
    config = _config(
        {
            "text_config": {"tie_word_embeddings": True},
            "vision_config": {"tie_word_embeddings": True},
            "decoder": {"hidden_size": 8},
        }
    )
    edited = json.loads(config.edited(DType.F32, tie_word_embeddings=False))
    assert edited["tie_word_embeddings"] is edited["text_config"]["tie_word_embeddings"] is False
    assert edited["vision_config"]["tie_word_embeddings"] is True
    assert edited["decoder"] == {"hidden_size": 8}
    assert "tie_word_embeddings" not in json.loads(config.edited(DType.F32))


def test_how_weights_were_packed_goes_when_they_are_written_plain() -> None:
    content: dict[str, Json] = {
        "quantization_config": {"quant_method": "fp8"},
        "text_config": {"compression_config": {"quant_method": "x"}, "hidden_size": 8},
        "other": {"quantization_config": "kept"},
    }
    plain = _config(content).without_quantization()
    assert plain.content == {"text_config": {"hidden_size": 8}, "other": content["other"]}
    assert plain.mended
    assert plain.without_quantization() is plain


def test_a_vocabulary_is_written_wherever_it_is_stated() -> None:
    flat = _config({"vocab_size": 0, "hidden_size": 8}).with_vocab_size(7)
    assert flat.content == {"vocab_size": 7, "hidden_size": 8}
    inner = _config({"text_config": {"vocab_size": 5}, "vision_config": {"vocab_size": 1}})
    assert inner.with_vocab_size(7).content == {
        "text_config": {"vocab_size": 7},
        "vision_config": {"vocab_size": 1},
    }
    both = _config({"vocab_size": 5, "text_config": {"hidden_size": 8}}).with_vocab_size(7)
    assert both.content == {"vocab_size": 7, "text_config": {"hidden_size": 8, "vocab_size": 7}}
    assert _config({"model_type": "x"}).with_vocab_size(7).content["vocab_size"] == 7


@pytest.mark.slow
def test_labels_are_those_that_transformers_would_write(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(num_labels=3).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    edited = _config({"num_labels": 5, "id2label": {"0": "A"}}).with_num_labels(3).content
    assert edited["id2label"] == written["id2label"]
    assert edited["label2id"] == written["label2id"]
    assert "num_labels" not in edited


_GEMMA_TEXT = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4}
_SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 28}
_ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2}
_NESTED = {
    "text_config": {**_GEMMA_TEXT, **_ONE_LAYER, "num_key_value_heads": 1},
    "vision_config": {**_SIGLIP, **_ONE_LAYER},
}
_FAMILIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Llama", "LlamaForCausalLM", {}),
    ("Llama", "LlamaForSequenceClassification", {"num_labels": 1}),
    ("Qwen3", "Qwen3ForCausalLM", {"head_dim": 4}),
    ("Mixtral", "MixtralForCausalLM", {"num_local_experts": 4}),
    ("GPT2", "GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2}),
    ("T5", "T5ForConditionalGeneration", {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4}),
    ("Bert", "BertForMaskedLM", {}),
    ("Mamba", "MambaForCausalLM", {"state_size": 4}),
    ("Gemma3Text", "Gemma3ForCausalLM", {"head_dim": 4}),
    ("Gemma3", "Gemma3ForConditionalGeneration", _NESTED),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "architecture", "more"), [pytest.param(*row, id=row[1]) for row in _FAMILIES]
)
def test_the_config_of_a_bf16_training_becomes_what_save_pretrained_writes_of_its_masters(
    family: str, architecture: str, more: dict[str, Any], tmp_path: Path
) -> None:
    import torch

    bare = tiny_config(family, **more)
    bare.save_pretrained(tmp_path / "bare")
    model = tiny_model(architecture, bare)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "trained")
    model.to(torch.float32).save_pretrained(tmp_path / "expected")
    expected = (tmp_path / "expected" / "config.json").read_bytes()

    def edited(folder: str) -> bytes:
        path = tmp_path / folder / "config.json"
        return ConfigFile(path, json.loads(path.read_bytes())).edited(DType.F32, architecture)

    assert edited("trained") == expected
    assert json.loads(edited("bare")) == json.loads(expected) | _without_dtype(edited("bare"))


def _without_dtype(content: bytes) -> dict[str, Any]:
    """The configs of sub-models, to which no type is added that they did not state."""
    return {key: value for key, value in json.loads(content).items() if isinstance(value, dict)}
