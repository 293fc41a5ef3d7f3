"""One part of a module that holds several models, such as a live one and its moving average."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zexport
from tests.support.checkpoints import Model, Run, Tensors, save, values
from tests.support.hf_models import differing, load, tiny_config, tiny_model, write_config
from zexport.errors import UsageError
from zexport.options import ExportOptions, NameLayout

_LIVE = {"emb.weight": values((13, 7), 1), "out.weight": values((5, 7), 2)}
_EMA = {"emb.weight": values((13, 7), 3), "out.weight": values((5, 7), 4)}


def _under(part: str, tensors: Tensors) -> Tensors:
    return {f"{part}.{name}": tensor for name, tensor in tensors.items()}


def _two_models(root: Path, *, is_ema_trained: bool, stage: int = 3) -> Path:
    live, ema = _under("model", _LIVE), _under("ema_model", _EMA)
    model = Model([live, ema]) if is_ema_trained else Model([live], frozen=ema)
    return save(model, Run(stage=stage), root)


@pytest.mark.parametrize("part", ["model", "model.", "ema_model"])
@pytest.mark.parametrize("is_ema_trained", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_part_is_exported_under_its_own_names_and_the_rest_is_counted(
    tmp_path: Path, part: str, is_ema_trained: bool, stage: int
) -> None:
    root = _two_models(tmp_path / "ckpt", is_ema_trained=is_ema_trained, stage=stage)
    out = tmp_path / "out"
    report = zexport.consolidate(root, out, ExportOptions(only=part))
    expected = _EMA if part == "ema_model" else _LIVE
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    told = "2 tensors beside it, of 126 elements, are left out"
    assert any(told in warning for warning in report.warnings)
    manifest = json.loads((out / "zexport_manifest.json").read_text())
    assert manifest["options"]["only"] == part
    left_out = (126 if is_ema_trained else 0) if part != "ema_model" else 126
    assert manifest["accounting"]["left_out"] == left_out
    assert zexport.verify_export(out, against=root).ok


def test_a_part_that_is_all_there_is_leaves_nothing_to_warn_of(tmp_path: Path) -> None:
    root = save(Model([_under("model", _LIVE)]), Run(), tmp_path / "ckpt")
    report = zexport.consolidate(root, tmp_path / "out", ExportOptions(only="model"))
    assert not [warning for warning in report.warnings if "left out" in warning]


def test_a_part_that_no_name_begins_with_is_refused_with_those_that_there_are(
    tmp_path: Path,
) -> None:
    root = _two_models(tmp_path / "ckpt", is_ema_trained=True)
    with pytest.raises(UsageError, match="--only 'ema' names no part of the model") as caught:
        zexport.consolidate(root, tmp_path / "out", ExportOptions(only="ema"))
    assert caught.value.found == "ema_model, model"


def test_a_weight_that_another_part_shares_is_of_both(tmp_path: Path) -> None:
    tied = {"ema.table": "model.emb.weight", "ema.head": "model.emb.weight"}
    frozen = {"ema.norm": values((7,), 9)}
    root = save(Model([_under("model", _LIVE)], frozen, tied=tied), Run(), tmp_path / "ckpt")
    options = ExportOptions(only="ema", layout=NameLayout.MEMORY)
    zexport.consolidate(root, tmp_path / "out", options)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"table", "norm"}
    assert torch.equal(found["table"], _LIVE["emb.weight"])
    manifest = json.loads((tmp_path / "out" / "zexport_manifest.json").read_text())
    assert manifest["tied"] == {"head": "table"}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["module", "ema_model"])
def test_transformers_loads_the_part_that_was_asked_for(tmp_path: Path, part: str) -> None:
    config = tiny_config(tie_word_embeddings=True)
    models = {name: tiny_model("LlamaForCausalLM", config) for name in ("module", "ema_model")}
    with torch.no_grad():
        for parameter in models["ema_model"].parameters():
            parameter.mul_(0.5)
    both = nn.ModuleDict(models)
    masters = {name: parameter.detach() for name, parameter in both.named_parameters()}
    tied = {f"{one}.lm_head.weight": f"{one}.model.embed_tokens.weight" for one in models}
    root = save(Model([masters], tied=tied), Run(), tmp_path / "ckpt")
    write_config(root, config, architectures=["LlamaForCausalLM"])
    zexport.consolidate(root, tmp_path / "out", ExportOptions(only=part))
    model, wrong = load(tmp_path / "out")
    assert not wrong
    assert differing(model, models[part]) == []
