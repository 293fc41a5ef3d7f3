"""The class that was trained, if frozen weights are missing and the config names another class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import Model, Run, save
from tests.support.exports import edit_json, export, refused
from tests.support.hf_models import differing, load, tiny_config, tiny_model, write_config
from tests.support.live_models import checkpoint_of, in_training, live_model

pytestmark = pytest.mark.slow

CLASSIFIERS = ["BertForSequenceClassification", "BertForTokenClassification"]


@pytest.mark.parametrize("trained", CLASSIFIERS)
def test_ambiguous_model_class_is_refused(trained: str, tmp_path: Path) -> None:
    """The classes differ in the pooler, which was frozen and not saved."""
    base, out, config = tmp_path / "base", tmp_path / "out", tiny_config("Bert")
    tiny_model("BertForPreTraining", config).save_pretrained(base)
    edit_json(base / "config.json", architectures=["BertForMaskedLM"])
    cls = type(tiny_model(trained, config))
    model = cls.from_pretrained(base, num_labels=3, dtype=torch.float32)
    weights = in_training(model).masters
    head = {name: value for name, value in weights.items() if name.startswith("classifier")}
    frozen = {name: value for name, value in weights.items() if name not in head}
    run = Run(stage=2, exclude_frozen=True)
    root = save(Model([head], frozen, dtype=torch.float32), run, tmp_path / "run")
    for word in CLASSIFIERS:
        refused(root, out, "--base", base, kind="names_mismatch", word=word)
    write_config(root, model.config, architectures=[trained])
    export(root, out, "--base", base)
    loaded, problems = load(out)
    assert (type(loaded).__name__, problems, differing(loaded, model)) == (trained, {}, [])


def test_weights_select_the_class_if_the_config_names_none(tmp_path: Path) -> None:
    model = live_model("qwen3-moe")
    config = {k: v for k, v in model.config.to_dict().items() if k != "architectures"}
    root = checkpoint_of(model, tmp_path / "run", config=config)
    export(root, tmp_path / "out")
    loaded, problems = load(tmp_path / "out")
    assert (type(loaded).__name__, problems) == ("Qwen3MoeForCausalLM", {})
    assert differing(loaded, model) == []
