"""Sizes that training changes: the config says what the weights have; nothing else is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

import zexport
from tests.support.hf_models import (
    differing,
    load,
    tiny_config,
    tiny_model,
    write_checkpoint,
    write_config,
)
from zexport.model.config import ConfigFile, mend_sizes
from zexport.store.json import Json

Shapes = dict[str, tuple[int, ...]]


class _Llama:
    """A model whose shapes follow from its config, counting how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, config: ConfigFile) -> Shapes | None:
        self.asked += 1
        vocabulary = config.content.get("vocab_size", 50)
        labels = len(config.content.get("id2label", "12"))  # type: ignore[arg-type]
        hidden = config.content.get("hidden_size", 8)
        assert isinstance(vocabulary, int)
        assert isinstance(hidden, int)
        if vocabulary <= 0:
            return None
        return {
            "model.embed_tokens.weight": (vocabulary, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (vocabulary, hidden),
            "score.weight": (labels, hidden),
        }


def _stored(vocabulary: int = 50, head: int = 50, labels: int = 2, prefix: str = "") -> Shapes:
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocabulary, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (head, 8),
        "score.weight": (labels, 8),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def _mended(content: Mapping[str, Json], stored: Shapes) -> tuple[ConfigFile, int]:
    ask = _Llama()
    return mend_sizes(ConfigFile(Path("config.json"), content), stored, ask), ask.asked


def test_a_config_that_fits_stays_and_is_asked_about_once() -> None:
    config, asked = _mended({"vocab_size": 50}, _stored())
    assert (config.content, config.mended, asked) == ({"vocab_size": 50}, (), 1)


@pytest.mark.parametrize("stated", [0, 48, -1, None])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_resized_or_lost_vocabulary_is_that_of_the_weights(stated: Json, prefix: str) -> None:
    content = {} if stated is None else {"vocab_size": stated}
    config, _ = _mended(content, _stored(53, 53, prefix=prefix))
    assert config.content["vocab_size"] == 53
    (note,) = config.mended
    assert note.startswith("vocab_size is 53")


def test_a_vocabulary_that_the_weights_disagree_about_stays() -> None:
    config, _ = _mended({"vocab_size": 50}, _stored(53, 54))
    assert (config.content, config.mended) == ({"vocab_size": 50}, ())


def test_a_difference_of_another_kind_stays() -> None:
    config, _ = _mended({"vocab_size": 50, "hidden_size": 16}, _stored())
    assert (config.content, config.mended) == ({"vocab_size": 50, "hidden_size": 16}, ())


def test_classes_are_counted_by_the_head() -> None:
    config, _ = _mended({"vocab_size": 50}, _stored(labels=1))
    assert config.content["id2label"] == {"0": "LABEL_0"}
    assert config.mended == ("num_labels is 1, as the weights have it (was unstated)",)
    both, _ = _mended({"vocab_size": 0, "id2label": {"0": "A"}}, _stored(53, 53, labels=3))
    assert len(both.mended) == 2
    assert both.content["vocab_size"] == 53


@pytest.mark.slow
@pytest.mark.parametrize("stated", [0, 59])
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_with_a_mended_vocabulary_loads(stated: int, tied: bool, tmp_path: Path) -> None:
    config = tiny_config("Llama", tie_word_embeddings=tied)
    model = tiny_model("LlamaForCausalLM", config)
    root = write_checkpoint(model, tmp_path / "ckpt")
    architectures = ["LlamaForCausalLM"]
    write_config(root, config, vocab_size=stated, architectures=architectures)
    report = zexport.consolidate(root, tmp_path / "out")
    loaded, problems = load(tmp_path / "out")
    assert problems == {}
    assert differing(loaded, model) == []
    assert any("vocab_size is 61" in warning for warning in report.notes)
    manifest = json.loads((tmp_path / "out" / "zexport_manifest.json").read_text())
    assert manifest["loadable"] is True
    assert manifest["mended"] == [f"vocab_size is 61, as the weights have it (was {stated})"]


@pytest.mark.slow
def test_a_vocabulary_in_the_config_of_the_language_model_is_mended_there(tmp_path: Path) -> None:
    text = tiny_config("Qwen2").to_dict()
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "embed_dim": 16, "in_channels": 3}
    config = tiny_config("Qwen2VL", text_config=text, vision_config=vision)
    model = tiny_model("Qwen2VLForConditionalGeneration", config)
    root = write_checkpoint(model, tmp_path / "ckpt")
    path = write_config(root, config, architectures=["Qwen2VLForConditionalGeneration"])
    content = json.loads(path.read_text())
    content["text_config"]["vocab_size"] = 0
    path.write_text(json.dumps(content))
    zexport.consolidate(root, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["text_config"]["vocab_size"] == 61
    assert written["vision_config"] == content["vision_config"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_loads_with_as_many_classes_as_its_head_has(
    task: str, labels: int, tmp_path: Path
) -> None:
    config = tiny_config("Llama", num_labels=labels)
    model = tiny_model(f"LlamaFor{task}", config)
    root = write_checkpoint(model, tmp_path / "ckpt")
    named = {"architectures": [f"LlamaFor{task}"], "id2label": None, "label2id": None}
    write_config(root, config, **named)
    zexport.consolidate(root, tmp_path / "out")
    loaded, problems = load(tmp_path / "out")
    assert problems == {}
    assert differing(loaded, model) == []
    assert loaded.config.num_labels == labels


@pytest.mark.slow
def test_names_of_classes_that_fit_are_kept(tmp_path: Path) -> None:
    names = {0: "bad", 1: "good", 2: "odd"}
    config = tiny_config("Llama", id2label=names, label2id={n: i for i, n in names.items()})
    root = write_checkpoint(tiny_model("LlamaForSequenceClassification", config), tmp_path / "ckpt")
    write_config(root, config, architectures=["LlamaForSequenceClassification"])
    zexport.consolidate(root, tmp_path / "out")
    assert load(tmp_path / "out")[0].config.id2label == names
