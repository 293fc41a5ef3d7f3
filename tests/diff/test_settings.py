"""Equal tensors that do not do the same: what else two sides say is compared as well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.real_cases import FIXTURES
from zexport import Cause, ReshardOptions, diff_models, diff_states, reshard, verify_export

WEIGHTS = {"layer.weight": torch.ones(3, 2)}
CONFIG = {"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "use_cache": True}
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "inference_mode": True}


def _folder(folder: Path, file: str, config: str, content: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(WEIGHTS, folder / file)
    (folder / config).write_text(json.dumps(content))
    return folder


def _told(a: Path, b: Path) -> list[tuple[str, str, str]]:
    report = diff_models(a, b)
    assert (report.verdict.cause is Cause.NONE) == (not report.settings)
    return [(one.about, one.a, one.b) for one in report.settings]


def test_configs_that_compute_something_else_are_a_difference(tmp_path: Path) -> None:
    files = ("model.safetensors", "config.json")
    a = _folder(tmp_path / "a", *files, CONFIG)
    same = _folder(tmp_path / "same", *files, CONFIG | {"use_cache": False})
    b = _folder(tmp_path / "b", *files, CONFIG | {"rms_norm_eps": 1e-5, "rope_theta": 1e6})
    assert _told(a, same) == []
    assert _told(a, b) == [
        ("config.json: rms_norm_eps", "1e-06", "1e-05"),
        ("config.json: rope_theta", "10000.0", "1000000.0"),
    ]


def test_inner_keys_and_rope_of_either_transformers_version_are_compared(tmp_path: Path) -> None:
    files = ("model.safetensors", "config.json")
    old = {"vocab_size": 3, "id2label": {"0": "cat"}, "text_config": {"vocab_size": 3}}
    new = {"vocab_size": 3, "id2label": {"0": "dog"}, "text_config": {"vocab_size": 5}}
    a = _folder(tmp_path / "a", *files, CONFIG | old)
    b = _folder(tmp_path / "b", *files, CONFIG | new | {"rope_parameters": {"rope_theta": 7.0}})
    assert _told(a, _folder(tmp_path / "unsaid", *files, CONFIG)) == []
    assert _told(a, b) == [
        ("config.json: id2label.0", "cat", "dog"),
        ("config.json: rope_theta", "10000.0", "7.0"),
        ("config.json: text_config.vocab_size", "3", "5"),
    ]


def test_adapters_of_another_scale_are_different(tmp_path: Path) -> None:
    files = ("adapter_model.safetensors", "adapter_config.json")
    a = _folder(tmp_path / "a", *files, ADAPTER)
    same = _folder(tmp_path / "same", *files, ADAPTER | {"inference_mode": False})
    b = _folder(tmp_path / "b", *files, ADAPTER | {"lora_alpha": 600})
    assert _told(a, same) == []
    assert _told(a, b) == [("adapter_config.json: lora_alpha", "6", "600")]
    key = "base_model_name_or_path"
    one, moved, other = (
        _folder(tmp_path / name, *files, ADAPTER | {key: f"{name}/base{name == 'other'}"})
        for name in ("one", "moved", "other")
    )
    assert _told(one, moved) == []
    assert _told(one, other) == [(f"adapter_config.json: {key}", "one/baseFalse", "other/baseTrue")]


@pytest.mark.parametrize("name", ["z2_w2_bf16_groups", "z3_w2_bf16"])
def test_trainings_that_go_on_otherwise_are_different(name: str, tmp_path: Path) -> None:
    """A learning rate of one group, and the steps taken."""

    source, out, other = FIXTURES / name / "ckpt", tmp_path / "out", tmp_path / "other"
    reshard(source, out, ReshardOptions(world_size=3))
    assert diff_states(source, out).verdict.cause is Cause.NONE
    assert verify_export(out, against=source).problems == ()
    shutil.copytree(source, other)
    for path in other.rglob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)
        kept = state["optimizer_state_dict"]
        inner = kept.get("base_optimizer_state") or kept["optimizer_state_dict"]
        inner["param_groups"][0]["lr"] = 0.5
        torch.save(state, path)
    report = diff_states(source, other)
    assert [(one.about, one.b) for one in report.settings] == [("lr of group 0", "0.5")]
    assert report.verdict.cause is Cause.SETTINGS
    problems = verify_export(out, against=other).problems
    assert {one.file for one in problems} >= {
        str(path.relative_to(out)) for path in out.rglob("*optim_states.pt")
    }
    told = {one.problem for one in problems if one.file.endswith("optim_states.pt")}
    assert all("other settings" in problem for problem in told)
