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
from zexport import ReshardOptions, diff_models, diff_states, reshard, verify_export
from zexport.compare.verdict import Cause

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
    save_file(WEIGHTS, same / "adapter_model.safetensors")
    assert _told(a, same) == [("adapter_model.safetensors beside the model", "False", "True")]


def test_what_one_config_alone_says_is_held_against_what_the_class_takes(tmp_path: Path) -> None:
    files = ("model.safetensors", "config.json")
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    a = _folder(tmp_path / "a", *files, known | {"rms_norm_eps": 0.1, "rope_theta": 7.0})
    unsaid = _folder(tmp_path / "unsaid", *files, known)
    usual = _folder(tmp_path / "usual", *files, known | {"rms_norm_eps": 1e-6, "rope_theta": 1e4})
    assert _told(usual, unsaid) == _told(unsaid, usual) == []
    assert _told(a, unsaid) == [
        ("config.json: rms_norm_eps", "0.1", "1e-06 (unstated)"),
        ("config.json: rope_theta", "7.0", "10000.0 (unstated)"),
    ]
    assert _told(unsaid, a)[0] == ("config.json: rms_norm_eps", "1e-06 (unstated)", "0.1")


def test_what_decides_how_weights_are_loaded_is_a_difference(tmp_path: Path) -> None:
    files = ("model.safetensors", "config.json")
    own = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "vocab_size": 3}
    own |= {"id2label": {"0": "cat", "1": "dog"}, "text_config": {"vocab_size": 3}}
    a = _folder(tmp_path / "a", *files, CONFIG | own)
    assert _told(a, _folder(tmp_path / "unsaid", *files, CONFIG)) == []
    other = {"architectures": ["LlamaModel"], "tie_word_embeddings": True, "vocab_size": 4}
    other |= {"id2label": {"0": "cat"}, "text_config": {"vocab_size": 5}}
    other["quantization_config"] = {"quant_method": "awq", "bits": 4}
    b = _folder(tmp_path / "b", *files, CONFIG | other)
    assert _told(a, b) == [
        ("config.json: architectures", "['LlamaForCausalLM']", "['LlamaModel']"),
        ("config.json: tie_word_embeddings", "False", "True"),
        ("config.json: vocab_size", "3", "4"),
        ("config.json: quantization_config", "none", "awq"),
        ("config.json: id2label", "2 classes", "1 classes"),
        ("config.json: text_config.vocab_size", "3", "5"),
    ]
    eight = other | {"quantization_config": {"quant_method": "awq", "bits": 8}}
    c = _folder(tmp_path / "c", *files, CONFIG | eight)
    assert _told(b, c) == [("config.json: quantization_config.bits", "4", "8")]


def test_tokenizers_templates_and_how_is_generated_are_a_difference(tmp_path: Path) -> None:
    files = ("model.safetensors", "config.json")

    def made(name: str, end: int, template: str, vocabulary: dict[str, int]) -> Path:
        folder = _folder(tmp_path / name, *files, CONFIG)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        (folder / "chat_template.jinja").write_text(template)
        model = {"type": "BPE", "vocab": vocabulary, "merges": []}
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": model}))
        return folder

    a = made("a", 2, "{{ messages }}", {"the": 0, "a": 1})
    assert _told(a, made("same", 2, "{{ messages }}", {"the": 0, "a": 1})) == []
    told = _told(a, made("b", 5, "{{ bos_token }}", {"the": 1, "a": 0}))
    assert [about for about, *_ in told] == [
        "chat template",
        "tokenizer: 2 of 2 tokens, such as 'the'",
        "generation_config.json, eos_token_id",
    ]
    assert told[1:] == [(told[1][0], "0", "1"), (told[2][0], "2", "5")]


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
