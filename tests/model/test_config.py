"""config.json: only the few keys that must change do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import edit_json, export, manifest_of, mentions, read_json, refused
from tests.support.hf_models import differing, load, tiny_config, tiny_model, write_run
from tests.support.live_models import FAMILIES, checkpoint_of, files_of, live_model
from tests.support.oracles import differences


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_export_equals_save_pretrained(family: str, tmp_path: Path) -> None:
    """Names and values of the weights, and the config of bf16 training as that of fp32 weights."""
    model, out, expected = live_model(family), tmp_path / "out", tmp_path / "expected"
    root = checkpoint_of(model, tmp_path / "run", stage=2 + len(family) % 2)
    model.save_pretrained(expected)
    model.bfloat16().save_pretrained(tmp_path / "trained")
    (root / "config.json").write_bytes((tmp_path / "trained" / "config.json").read_bytes())
    assert export(root, out)["loadable"]
    assert differences(files_of(out), files_of(expected)) == []
    assert (out / "config.json").read_bytes() == (expected / "config.json").read_bytes()
    loaded, problems = load(out)
    assert (type(loaded).__name__, problems) == (FAMILIES[family][0], {})
    assert differing(loaded, live_model(family)) == []


def test_only_dtypes_change(zero2: Path) -> None:
    config = {
        "zeta": 1e-05,
        "alpha": 123456789012345678901234567890,
        "torch_dtype": "bfloat16",
        "rope": {"theta": 1e-06, "dtype": "kept", "deep": [-0.0, 1.5e300, True, None]},
        "model_type": "no_such_model",
        "text_config": {"dtype": "bfloat16", "hidden_size": 8},
        "encoder": {"model_type": "bert", "torch_dtype": "float16"},
        "vision_config": {"dtype": None},
        "architectures": ["X"],
        "naïve": "日本",
    }
    (zero2 / "config.json").write_text(json.dumps(config))
    export(zero2, zero2.parent / "out")
    dtypes = {"torch_dtype": "float32", "dtype": "float32"}
    text = {"dtype": "float32", "hidden_size": 8}
    encoder = {"model_type": "bert", "torch_dtype": "float32"}
    expected = json.dumps(
        config | dtypes | {"text_config": text, "encoder": encoder}, indent=2, ensure_ascii=False
    )
    assert (zero2.parent / "out" / "config.json").read_text() == expected + "\n"


@pytest.mark.parametrize("stated", [None, [], "", "LlamaForCausalLM"])
def test_architectures_become_a_list(stated: Any, tmp_path: Path) -> None:
    name = "LlamaForCausalLM"
    root = write_run(tiny_model(name, tiny_config()), tmp_path / "ckpt", name)
    edit_json(root / "config.json", architectures=stated)
    export(root, tmp_path / "out")
    assert read_json(tmp_path / "out" / "config.json")["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stated", "tied", "wrap"), [(0, True, ""), (59, False, ""), (0, False, "module.")]
)
def test_vocab_size_is_that_of_the_weights(
    stated: int, tied: bool, wrap: str, tmp_path: Path
) -> None:
    """A config saved from ZeRO-3's placeholders has 0; one from before a resize, the old size."""
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
def test_vocab_size_of_an_inner_language_model_is_corrected(tmp_path: Path) -> None:
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
    names = {str(number): f"name {number}" for number in range(labels)}
    edit_json(root / "config.json", id2label=names, label2id={n: i for i, n in names.items()})
    export(root, tmp_path / "out", "--overwrite")
    assert read_json(tmp_path / "out" / "config.json")["id2label"] == names


@pytest.mark.parametrize(
    ("key", "own", "other"),
    [("sliding_window", None, 4096), ("attn_logit_softcapping", 30.0, None)],
)
def test_null_differs_from_a_value_of_the_base(
    key: str, own: object, other: object, tmp_path: Path
) -> None:
    model, base, out = live_model("llama"), tmp_path / "base", tmp_path / "out"
    root = checkpoint_of(model, tmp_path / "run")
    model.save_pretrained(base)
    edit_json(root / "config.json", **{key: own})
    edit_json(base / "config.json", **{key: other})
    refused(root, out, "--base", base, kind="usage", word=key, finding="base-mismatch")
    export(root, out, "--base", base, "--allow", "base-mismatch")
    assert read_json(out / "config.json")[key] == own
