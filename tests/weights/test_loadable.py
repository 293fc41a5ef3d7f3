"""``loadable`` is said of just those folders that transformers loads with nothing amiss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zexport
from tests.support.checkpoints import Model
from tests.support.hf_models import load
from tests.support.live_models import FAMILIES, checkpoint_of, in_training, live_model
from zexport.errors import NamesMismatchError
from zexport.options import ExportOptions, NameLayout
from zexport.run.manifest import read_manifest

pytestmark = pytest.mark.slow

_PLAIN = ExportOptions()
_MEMORY = ExportOptions(layout=NameLayout.MEMORY)


def _is_told_loadable(root: Path, out: Path, options: ExportOptions = _PLAIN) -> bool:
    zexport.consolidate(root, out, options)
    told = read_manifest(out).provenance["loadable"]
    assert isinstance(told, bool)
    return told


def _loads(out: Path) -> bool:
    """Whether transformers finds every weight, in its shape, and no other."""
    try:
        return load(out)[1] == {}
    except (OSError, KeyError):
        return False


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_said_of_whole_models(family: str, tmp_path: Path) -> None:
    root = checkpoint_of(live_model(family), tmp_path / "run")
    assert _is_told_loadable(root, tmp_path / "out")
    assert _loads(tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "is_hubs"), [("llama", True), ("gpt2", True), ("gemma3", False)]
)
def test_in_memory_layout_it_is_said_where_names_are_the_hubs(
    family: str, is_hubs: bool, tmp_path: Path
) -> None:
    root = checkpoint_of(live_model(family), tmp_path / "run")
    assert _is_told_loadable(root, tmp_path / "out", _MEMORY) is is_hubs
    assert _loads(tmp_path / "out") or not is_hubs


def _with(trained: Model, more: dict[str, torch.Tensor]) -> Model:
    return replace(trained, groups=[{**trained.groups[0], **more}, *trained.groups[1:]])


def test_it_is_not_said_of_a_model_with_a_weight_too_many(tmp_path: Path) -> None:
    model = live_model("llama")
    trained = _with(in_training(model), {"model.layers.0.extra.weight": torch.ones(2)})
    root = checkpoint_of(model, tmp_path / "run", trained=trained)
    with pytest.raises(NamesMismatchError, match="would be loaded without"):
        zexport.consolidate(root, tmp_path / "out")
    assert not _is_told_loadable(root, tmp_path / "out", ExportOptions(layout=NameLayout.MEMORY))
    assert not _loads(tmp_path / "out")


@pytest.mark.parametrize("layout", NameLayout)
def test_it_is_not_said_of_a_model_without_its_frozen_weights(
    layout: NameLayout, tmp_path: Path
) -> None:
    model = live_model("llama")
    whole = in_training(model)
    frozen = {name: value for name, value in whole.masters.items() if "norm" in name}
    trained = {name: value for name, value in whole.masters.items() if name not in frozen}
    part = replace(whole, groups=[trained], frozen=frozen)
    root = checkpoint_of(model, tmp_path / "run", trained=part)
    options = ExportOptions(layout=layout, exclude_frozen=True)
    assert not _is_told_loadable(root, tmp_path / "out", options)
    assert not _loads(tmp_path / "out")


def test_it_is_not_said_without_a_config(tmp_path: Path) -> None:
    root = checkpoint_of(live_model("llama"), tmp_path / "run")
    (root / "config.json").unlink()
    assert not _is_told_loadable(root, tmp_path / "out")


def test_in_memory_layout_a_tie_that_the_config_does_not_have_leaves_a_name_out(
    tmp_path: Path,
) -> None:
    model = live_model("llama")
    whole = in_training(model)
    masters = {name: value for name, value in whole.masters.items() if name != "lm_head.weight"}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    root = checkpoint_of(
        model, tmp_path / "run", trained=replace(whole, groups=[masters], tied=tied)
    )
    assert _is_told_loadable(root, tmp_path / "hub")
    assert _loads(tmp_path / "hub")
    assert not _is_told_loadable(root, tmp_path / "memory", _MEMORY)
    assert not _loads(tmp_path / "memory")
