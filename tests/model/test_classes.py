"""The class that was trained, where frozen weights are left out and the config names another."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.support.checkpoints import Model, Run, save
from tests.support.hf_models import differing, load, tiny_config, tiny_model, write_config
from zexport import ExportOptions, consolidate
from zexport.errors import FrozenLeftOutError, NamesMismatchError

pytestmark = pytest.mark.slow


def _save(model: torch.nn.Module, root: Path, is_trained: Callable[[str], bool]) -> None:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    own = {name: tensor for name, tensor in weights.items() if is_trained(name)}
    frozen = {name: tensor for name, tensor in weights.items() if name not in own}
    save(Model([own], frozen=frozen, dtype=torch.float32), Run(stage=2, exclude_frozen=True), root)


def _classifier(architecture: str, base: Path, named: str, stored: str) -> Any:
    """A classifier that begins from ``base``: the weights of one class, the config of another."""
    family = architecture.partition("For")[0]
    tiny_model(stored, tiny_config(family)).save_pretrained(base)
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [named]}))
    return type(tiny_model(architecture, tiny_config(family))).from_pretrained(
        base, num_labels=3, dtype=torch.float32
    )


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_classes_that_differ_in_what_was_left_out_are_not_guessed_apart(
    task: str, tmp_path: Path
) -> None:
    """One of them has a pooler, which was frozen with all but the head."""
    trained, base = f"BertFor{task}", tmp_path / "base"
    model = _classifier(trained, base, "BertForMaskedLM", "BertForPreTraining")
    _save(model, tmp_path / "run", lambda name: name.startswith("classifier"))
    with pytest.raises(NamesMismatchError, match="several have these weights") as caught:
        consolidate(tmp_path / "run", tmp_path / "out", ExportOptions(base=base))
    assert {"BertForTokenClassification", "BertForSequenceClassification"} <= set(
        str(caught.value.expected).replace(",", "").split()
    )
    write_config(tmp_path / "run", model.config, architectures=[trained])
    consolidate(tmp_path / "run", tmp_path / "out", ExportOptions(base=base))
    loaded, problems = load(tmp_path / "out")
    assert (type(loaded).__name__, problems) == (trained, {})
    assert differing(loaded, model) == []


def _with_adapter(model: Any, task: str, root: Path) -> Any:
    adapter = LoraConfig(task_type=task, r=2, target_modules=["query", "query_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, adapter)
    own = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    _save(adapted, root, own.__contains__)
    adapted.peft_config["default"].save_pretrained(root)
    return adapted.merge_and_unload()


@pytest.mark.parametrize(
    ("task", "architecture"),
    [("SEQ_CLS", "BertForSequenceClassification"), ("TOKEN_CLS", "BertForTokenClassification")],
)
def test_an_adapters_task_tells_the_class(task: str, architecture: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = _classifier(architecture, base, "BertForMaskedLM", "BertForPreTraining")
    merged = _with_adapter(model, task, tmp_path / "run")
    consolidate(tmp_path / "run", tmp_path / "out", ExportOptions(base=base))
    loaded, problems = load(tmp_path / "out")
    assert (type(loaded).__name__, problems) == (architecture, {})
    assert loaded.state_dict().keys() == merged.state_dict().keys()


def test_a_new_pooler_that_was_frozen_and_left_out_is_missed_aloud(tmp_path: Path) -> None:
    """The base has none; without it the model would pass for a classifier of tokens."""
    base, trained = tmp_path / "base", "DebertaV2ForSequenceClassification"
    model = _classifier(trained, base, "DebertaV2ForMaskedLM", "DebertaV2ForMaskedLM")
    _with_adapter(model, "SEQ_CLS", tmp_path / "run")
    with pytest.raises(FrozenLeftOutError, match=r"pooler\.dense"):
        consolidate(tmp_path / "run", tmp_path / "out", ExportOptions(base=base))


def test_a_class_of_whose_head_nothing_was_stored_is_not_taken_for_the_trained(
    tmp_path: Path,
) -> None:
    """GPT-2's causal model has no head of its own; others of its classes have one to train."""
    config, base = tiny_config("GPT2"), tmp_path / "base"
    model = tiny_model("GPT2LMHeadModel", config)
    model.transformer.save_pretrained(base)
    _save(model, tmp_path / "run", lambda name: ".h.1." in name)
    consolidate(tmp_path / "run", tmp_path / "out", ExportOptions(base=base))
    loaded, problems = load(tmp_path / "out")
    assert (type(loaded).__name__, problems) == ("GPT2LMHeadModel", {})
    assert differing(loaded, model) == []
