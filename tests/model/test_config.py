"""config.json keeps every byte but the few keys that must change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import edit_json, export, manifest_of, mentions, read_json, refused
from tests.support.hf_models import (
    differing,
    load,
    tiny_config,
    tiny_model,
    write_run,
)
from tests.support.live_models import FAMILIES, checkpoint_of, files_of, live_model
from tests.support.oracles import differences


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_export_equals_save_pretrained(family: str, tmp_path: Path) -> None:
    """Names and values of the weights, and the config of bf16 training as that of fp32 weights."""
    model, out, expected = live_model(family), tmp_path / "out", tmp_path / "expected"
    root = checkpoint_of(model, tmp_path / "run", stage=3)
    model.save_pretrained(expected)
    model.bfloat16().save_pretrained(tmp_path / "trained")
    (root / "config.json").write_bytes((tmp_path / "trained" / "config.json").read_bytes())
    export(root, out)
    assert differences(files_of(out), files_of(expected)) == []
    assert (out / "config.json").read_bytes() == (expected / "config.json").read_bytes()
    loaded, problems = load(out)
    assert (type(loaded).__name__, problems) == (FAMILIES[family][0], {})
    assert differing(loaded, live_model(family)) == []


def edited(root: Path, config: dict[str, Any], *words: object) -> dict[str, Any]:
    (root / "config.json").write_text(json.dumps(config))
    export(root, root.parent / "out", "--overwrite", *words)
    return read_json(root.parent / "out" / "config.json")


def test_only_dtypes_change(zero2: Path) -> None:
    config = {
        "model_type": "no_such_model",
        "torch_dtype": "bfloat16",
        "rope": {"theta": 1e-06, "dtype": "kept"},
        "text_config": {"dtype": "bfloat16", "hidden_size": 8},
        "encoder": {"model_type": "bert", "torch_dtype": "float16"},
        "vision_config": {"dtype": None},
        "architectures": ["X"],
        "name": "ä",
    }
    expected = {
        **config,
        "dtype": "float32",
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32", "hidden_size": 8},
        "encoder": {"model_type": "bert", "torch_dtype": "float32"},
    }
    found = edited(zero2, config)
    assert (found, list(found)) == (expected, [*config, "dtype"])


def test_other_bytes_stay(zero2: Path) -> None:
    text = """{
  "zeta": 1e-05,
  "alpha": 123456789012345678901234567890,
  "architectures": [
    "X"
  ],
  "model_type": "no_such_model",
  "dtype": "float32",
  "beta": 10000.0,
  "empty": {},
  "naïve": "日本",
  "nested": {
    "deep": [
      -0.0,
      1.5e+300,
      true,
      null
    ]
  }
}
"""
    (zero2 / "config.json").write_text(text)
    export(zero2, zero2.parent / "out")
    assert (zero2.parent / "out" / "config.json").read_text() == text


@pytest.mark.parametrize("stated", [None, [], "", "LlamaForCausalLM"])
def test_architectures_become_a_list(stated: Any, tmp_path: Path) -> None:
    name = "LlamaForCausalLM"
    root = write_run(tiny_model(name, tiny_config()), tmp_path / "ckpt", name)
    edit_json(root / "config.json", architectures=stated)
    export(root, tmp_path / "out")
    assert read_json(tmp_path / "out" / "config.json")["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.slow
@pytest.mark.parametrize("stated", [0, 59])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wrap", ["", "module."])
def test_vocab_size_is_that_of_the_weights(
    stated: int, tied: bool, wrap: str, tmp_path: Path
) -> None:
    """ZeRO-3's placeholders make it 0 when the config is saved; a resize leaves the old size."""
    config, out = tiny_config("Llama", tie_word_embeddings=tied), tmp_path / "out"
    model = tiny_model("LlamaForCausalLM", config)
    changed = {"wrap": wrap, "vocab_size": stated}
    root = write_run(model, tmp_path / "ckpt", "LlamaForCausalLM", **changed)
    report = export(root, out)
    loaded, problems = load(out)
    assert (loaded.config.vocab_size, problems, differing(loaded, model)) == (61, {}, [])
    assert mentions(report, "vocab_size", "61", str(stated))
    assert (manifest_of(out)["loadable"], len(manifest_of(out)["mended"])) == (True, 1)


@pytest.mark.slow
def test_vocab_size_of_a_language_model_inside_is_corrected_there(tmp_path: Path) -> None:
    model = live_model("qwen2-vl")
    root = checkpoint_of(model, tmp_path / "run")
    before = read_json(root / "config.json")
    before["text_config"]["vocab_size"] = 0
    (root / "config.json").write_text(json.dumps(before))
    export(root, tmp_path / "out")
    after = read_json(tmp_path / "out" / "config.json")
    assert after["text_config"]["vocab_size"] == 32
    assert after["vision_config"] == before["vision_config"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("labels", [1, 3])
def test_num_labels_is_that_of_the_head(task: str, labels: int, tmp_path: Path) -> None:
    config = tiny_config("Llama", num_labels=labels)
    model = tiny_model(f"LlamaFor{task}", config)
    unstated = dict.fromkeys(("id2label", "label2id"))
    root = write_run(model, tmp_path / "ckpt", f"LlamaFor{task}", **unstated)
    export(root, tmp_path / "out")
    loaded, problems = load(tmp_path / "out")
    assert (loaded.config.num_labels, problems, differing(loaded, model)) == (labels, {}, [])


@pytest.mark.slow
def test_names_of_labels_that_fit_are_kept(tmp_path: Path) -> None:
    names = {0: "bad", 1: "good", 2: "odd"}
    config = tiny_config("Llama", id2label=names, label2id={n: i for i, n in names.items()})
    name = "LlamaForSequenceClassification"
    root = write_run(tiny_model(name, config), tmp_path / "ckpt", name)
    export(root, tmp_path / "out")
    assert load(tmp_path / "out")[0].config.id2label == names


# --- compared with the base's config ---


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint whose base has the same config, in ``base`` next to it."""
    model = live_model("llama")
    checkpoint = checkpoint_of(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "base")
    return checkpoint


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-3}),
        ({"num_key_value_heads": 2}, {"num_key_value_heads": 4}),
        ({"sliding_window": None}, {"sliding_window": 4096}),
        ({"attn_logit_softcapping": 30.0}, {"attn_logit_softcapping": None}),
    ],
    ids=str,
)
def test_base_built_in_another_way_is_rejected(
    own: dict[str, Any], other: dict[str, Any], root: Path
) -> None:
    """A training does not change these keys, and null is a value."""
    base = root.parent / "base"
    edit_json(root / "config.json", **own)
    edit_json(base / "config.json", **other)
    words, out, (key,) = ("--base", base), root.parent / "out", own
    refused(root, out, *words, kind="usage", word=key, finding="base-mismatch")
    export(root, out, *words, "--allow", "base-mismatch")
    assert read_json(out / "config.json")[key] == own[key]
