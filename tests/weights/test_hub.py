"""Exports of live models' checkpoints, against what their own ``save_pretrained`` writes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import Model, Run, save
from tests.support.live_models import FAMILIES, checkpoint_of, files_of, in_training, live_model
from tests.support.real_cases import facts
from zexport import consolidate, verify_export
from zexport.errors import (
    DamagedCheckpointError,
    FrozenLeftOutError,
    NamesMismatchError,
    UnsupportedError,
)
from zexport.options import Engine, ExportDType, ExportOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.slow


def assert_loads(folder: Path, class_name: str) -> PreTrainedModel:
    """transformers loads the folder with nothing missing, unexpected or of another shape."""
    import transformers

    model, info = getattr(transformers, class_name).from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.architectures == [class_name]
    return model


def saved(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return files_of(folder)


def saved_with_prefixes(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """As a model is saved that was loaded from files with every prefix."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    return saved(model, folder)


def saved_transposed(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """As the experts of Qwen3-VL-MoE lie on the hub, and lay in memory under transformers 4."""

    tensors = saved(model, folder)
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def config_of(folder: Path) -> dict[str, object]:
    content = json.loads((folder / "config.json").read_text())
    assert isinstance(content, dict)
    return content


def flat_model(tensors: dict[str, torch.Tensor]) -> Model:
    return Model(groups=[tensors], dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_what_the_live_model_saves(family: str, tmp_path: Path) -> None:
    model = live_model(family)
    expected = saved(model, tmp_path / "live")
    root = checkpoint_of(model, tmp_path / "run", stage=2 + len(family) % 2)
    consolidate(root, tmp_path / "out")
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    loaded = assert_loads(tmp_path / "out", FAMILIES[family][0])
    assert facts(loaded.state_dict()) == facts(model.state_dict())


_OTHER_WAYS = [("gemma3", saved_with_prefixes), ("qwen3-vl-moe", saved_transposed)]


@pytest.mark.parametrize(("family", "save_base"), _OTHER_WAYS)
def test_a_base_decides_between_several_layouts_and_without_one_it_is_said(
    family: str,
    save_base: Callable[[PreTrainedModel, Path], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    model = live_model(family)
    unasked = saved(model, tmp_path / "live")
    root = checkpoint_of(model, tmp_path / "run")
    expected = save_base(model, tmp_path / "base")
    assert facts(expected) != facts(unasked)

    report = consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "base"))
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    assert not [warning for warning in report.warnings if "several layouts" in warning]
    assert verify_export(tmp_path / "out", against=root, base=tmp_path / "base").ok
    assert_loads(tmp_path / "out", FAMILIES[family][0])

    report = consolidate(root, tmp_path / "unasked")
    assert facts(files_of(tmp_path / "unasked")) == facts(unasked)
    assert [warning for warning in report.warnings if "--base" in warning and "layouts" in warning]


@pytest.mark.parametrize(("family", "save_hub"), [("mixtral", saved), *_OTHER_WAYS])
def test_names_that_are_the_hubs_already_are_kept(
    family: str,
    save_hub: Callable[[PreTrainedModel, Path], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    model = live_model(family)
    expected = save_hub(model, tmp_path / "live")
    root = checkpoint_of(model, tmp_path / "run", trained=flat_model(expected))
    report = consolidate(root, tmp_path / "out")
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    assert any("hub's names already" in warning for warning in report.notes)
    assert_loads(tmp_path / "out", FAMILIES[family][0])


def test_tied_weights_that_differ_are_both_written_and_untied(tmp_path: Path) -> None:
    model = live_model("llama-tied")
    trained = in_training(model)
    head = trained.masters["model.embed_tokens.weight"].clone()
    head[3, 2] += 1
    differing = replace(trained, groups=[{**trained.masters, "lm_head.weight": head}], tied={})
    root = checkpoint_of(model, tmp_path / "run", trained=differing)
    report = consolidate(root, tmp_path / "out")
    written = files_of(tmp_path / "out")
    assert facts({"": written["lm_head.weight"]}) == facts({"": head})
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    assert any("lm_head.weight differs" in warning for warning in report.warnings)
    assert_loads(tmp_path / "out", "LlamaForCausalLM")


def test_tied_weights_that_are_stored_twice_and_agree_are_written_once(tmp_path: Path) -> None:
    model = live_model("llama-tied")
    expected = saved(model, tmp_path / "live")
    trained = in_training(model)
    head = trained.masters["model.embed_tokens.weight"].clone()
    twice = replace(trained, groups=[{**trained.masters, "lm_head.weight": head}], tied={})
    root = checkpoint_of(model, tmp_path / "run", trained=twice)
    consolidate(root, tmp_path / "out")
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True


def test_what_transformers_keeps_in_float32_stays_float32_under_bf16(tmp_path: Path) -> None:
    import transformers

    model = live_model("deepseek-v3")
    expected = saved(model, tmp_path / "live")
    root = checkpoint_of(model, tmp_path / "run")
    consolidate(root, tmp_path / "out", ExportOptions(dtype=ExportDType.BF16))
    written = files_of(tmp_path / "out")
    as_loaded = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "live", dtype=torch.bfloat16
    )
    wide = {name for name, value in as_loaded.state_dict().items() if value.dtype == torch.float32}
    assert wide
    assert wide == {name for name, value in written.items() if value.dtype == torch.float32}
    cast = {name: value if name in wide else value.bfloat16() for name, value in expected.items()}
    assert facts(written) == facts(cast)


def _with_frozen_experts(tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """A Mixtral whose experts were frozen and left out of the save."""
    model = live_model("mixtral")
    whole = in_training(model).masters
    frozen = {name: value for name, value in whole.items() if ".experts." in name}
    trained = {name: value for name, value in whole.items() if name not in frozen}
    root = tmp_path / "run"
    save(
        Model([trained], frozen=frozen, dtype=torch.float32),
        Run(stage=3, exclude_frozen=True),
        root,
    )
    model.config.save_pretrained(root)
    return model, root


def test_frozen_experts_come_from_a_base_in_the_hubs_layout(tmp_path: Path) -> None:
    model, root = _with_frozen_experts(tmp_path)
    expected = saved(model, tmp_path / "base")
    with pytest.raises(FrozenLeftOutError, match=r"experts\.0\.w1"):
        consolidate(root, tmp_path / "out")
    report = consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "base"))
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    assert any("come from the base" in warning for warning in report.notes)
    assert_loads(tmp_path / "out", "MixtralForCausalLM")


def test_frozen_weights_come_from_the_files_of_the_model_inside(tmp_path: Path) -> None:
    """As GPT-2 lies on the hub, whose names have no ``transformer.`` before them."""
    model = live_model("gpt2")
    trained = in_training(model, frozen=("transformer.h.0.",))
    root = save(trained, Run(stage=2, exclude_frozen=True), tmp_path / "run")
    model.config.save_pretrained(root)
    base = {**saved(model.transformer, tmp_path / "base"), "h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file(base, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    report = consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "base"))
    assert facts(files_of(tmp_path / "out")) == facts(saved(model, tmp_path / "live"))
    assert any("come from the base" in warning for warning in report.notes)
    assert_loads(tmp_path / "out", "GPT2LMHeadModel")
    assert verify_export(tmp_path / "out", against=root, base=tmp_path / "base").ok


def _with_a_frozen_layer(family: str, layer: str, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    model = live_model(family)
    root = save(
        in_training(model, frozen=(layer,)), Run(stage=2, exclude_frozen=True), tmp_path / "run"
    )
    model.config.save_pretrained(root)
    return model, root


def test_frozen_layer_norms_come_from_files_of_berts_time(tmp_path: Path) -> None:
    """Whose gamma and beta transformers reads as weight and bias."""
    model, root = _with_a_frozen_layer("bert", "bert.encoder.layer.0.", tmp_path)
    base = saved(model, tmp_path / "base")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in base.items()
    }
    assert old.keys() != base.keys()
    save_file(old, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "base"))
    assert facts(files_of(tmp_path / "out")) == facts(base)


def test_of_two_base_weights_with_one_name_none_is_taken(tmp_path: Path) -> None:
    model, root = _with_a_frozen_layer("gpt2", "transformer.h.0.", tmp_path)
    base = saved(model, tmp_path / "base")
    twice = {**base, "h.0.ln_1.weight": base["transformer.h.0.ln_1.weight"] + 1}
    save_file(twice, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedCheckpointError, match=r"both transformer\.h\.0\.ln_1") as caught:
        consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "base"))
    assert caught.value.path == tmp_path / "base"


def test_a_stale_name_changes_nothing_for_the_others(tmp_path: Path) -> None:
    model, root = _with_a_frozen_layer("gpt2", "transformer.h.0.", tmp_path)
    base = {**saved(model.transformer, tmp_path / "base"), "transformer.old.weight": torch.ones(2)}
    save_file(base, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "base"))
    assert facts(files_of(tmp_path / "out")) == facts(saved(model, tmp_path / "live"))


def test_of_a_bases_file_and_its_shards_what_transformers_would_load_is_taken(
    tmp_path: Path,
) -> None:
    model, root = _with_a_frozen_layer("gpt2", "transformer.h.0.", tmp_path)
    base = saved(model.transformer, tmp_path / "base")
    save_file({n: torch.zeros_like(t) for n, t in base.items()}, tmp_path / "base/old.safetensors")
    index = {"weight_map": dict.fromkeys(base, "old.safetensors")}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "base"))
    assert facts(files_of(tmp_path / "out")) == facts(saved(model, tmp_path / "live"))


def test_a_base_in_torchs_files_alone_is_told_to_be_none(tmp_path: Path) -> None:
    model, root = _with_a_frozen_layer("gpt2", "transformer.h.0.", tmp_path)
    model.config.save_pretrained(tmp_path / "base")
    torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    with pytest.raises(FrozenLeftOutError, match="no safetensors files"):
        consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "base"))


def test_frozen_weights_come_from_the_files_of_a_model_around(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    around = BertForSequenceClassification(live_model("bert").config)
    saved(around, tmp_path / "base")
    model = around.bert
    model.config.architectures = ["BertModel"]
    trained = in_training(model, frozen=("embeddings.", "encoder.layer.0."))
    root = save(trained, Run(stage=3, exclude_frozen=True), tmp_path / "run")
    model.config.save_pretrained(root)
    consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "base"))
    assert facts(files_of(tmp_path / "out")) == facts(saved(model, tmp_path / "live"))
    assert_loads(tmp_path / "out", "BertModel")


def test_left_out_on_purpose_the_rest_has_the_hubs_names(tmp_path: Path) -> None:
    model, root = _with_frozen_experts(tmp_path)
    rest = {n: v for n, v in saved(model, tmp_path / "live").items() if ".experts." not in n}
    consolidate(root, tmp_path / "out", ExportOptions(exclude_frozen=True))
    assert facts(files_of(tmp_path / "out")) == facts(rest)


def test_a_head_that_the_class_does_not_have_is_written_and_said(tmp_path: Path) -> None:
    model = live_model("mixtral")
    expected = {**saved(model, tmp_path / "live"), "v_head.summary.weight": torch.ones(1, 16)}
    trained = {**in_training(model).masters, "v_head.summary.weight": torch.ones(1, 16)}
    root = checkpoint_of(model, tmp_path / "run", trained=flat_model(trained))
    report = consolidate(root, tmp_path / "out")
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    assert any("v_head.summary.weight" in warning for warning in report.warnings)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    root = checkpoint_of(
        live_model("mixtral"), tmp_path / "run", trained=in_training(live_model("gpt2"))
    )
    with pytest.raises(NamesMismatchError) as caught:
        consolidate(root, tmp_path / "out")
    assert "unexpected: transformer.wpe.weight" in str(caught.value.found)
    assert not (tmp_path / "out").exists()


_ONE_LAYER = {"num_hidden_layers": 1}
_A_BIAS = {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}
_WITHIN = {"model.extra.weight": torch.ones(3)}


@pytest.mark.parametrize(
    ("change", "more"),
    [(_ONE_LAYER, {}), ({}, _A_BIAS), ({}, _WITHIN)],
    ids=["a layer", "a bias", "within"],
)
def test_a_config_that_has_fewer_weights_than_the_checkpoint_is_refused(
    change: dict[str, object], more: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = live_model("llama")
    trained = {**in_training(model).masters, **more}
    config = {**model.config.to_dict(), **change}
    root = checkpoint_of(model, tmp_path / "run", config=config, trained=flat_model(trained))
    with pytest.raises(NamesMismatchError, match="would be loaded without"):
        consolidate(root, tmp_path / "out")


def test_weights_that_transformers_passes_over_are_the_models_files_own(tmp_path: Path) -> None:
    """Those of a draft head: engines read them from the same files, transformers does not."""
    import transformers

    model = live_model("deepseek-v3")
    draft = {"model.layers.61.eh_proj.weight": torch.ones(16, 32)}
    trained = flat_model({**in_training(model).masters, **draft})
    trained = replace(trained, buffers=in_training(model).buffers)
    root = checkpoint_of(model, tmp_path / "run", trained=trained)
    report = consolidate(root, tmp_path / "out")
    assert draft.keys() < files_of(tmp_path / "out").keys()
    assert not (tmp_path / "out" / "value_head.safetensors").exists()
    assert any("model.layers.61.eh_proj.weight" in warning for warning in report.notes)
    _, info = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_a_class_that_the_config_does_not_name_is_told_by_the_weights(tmp_path: Path) -> None:
    model = live_model("qwen3-moe")
    expected = saved(model, tmp_path / "live")
    config = config_of(tmp_path / "live")
    del config["architectures"]
    root = checkpoint_of(model, tmp_path / "run", config=config)
    consolidate(root, tmp_path / "out")
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    assert_loads(tmp_path / "out", "Qwen3MoeForCausalLM")


def test_a_model_with_code_of_its_own_keeps_its_names(tmp_path: Path) -> None:
    model = live_model("mixtral")
    trained = in_training(model)
    config = {"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoModel": "own.Own"}}
    root = checkpoint_of(model, tmp_path / "run", config=config, trained=trained)
    report = consolidate(root, tmp_path / "out")
    assert facts(files_of(tmp_path / "out")) == facts(trained.masters)
    assert any("were not checked" in warning for warning in report.warnings)


def test_transformers_is_asked_once_for_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = checkpoint_of(live_model("mixtral"), tmp_path / "run")
    consolidate(root, tmp_path / "one")
    monkeypatch.setattr(subprocess, "Popen", None)
    consolidate(root, tmp_path / "two")
    assert facts(files_of(tmp_path / "two")) == facts(files_of(tmp_path / "one"))


@pytest.mark.deepspeed
@pytest.mark.parametrize("family", ["mixtral", "hrm-text"])
def test_deepspeeds_own_converter_gives_the_same_files(family: str, tmp_path: Path) -> None:
    model = live_model(family)
    expected = saved(model, tmp_path / "live")
    root = checkpoint_of(model, tmp_path / "run", stage=3)
    consolidate(root, tmp_path / "out", ExportOptions(engine=Engine.DEEPSPEED))
    assert facts(files_of(tmp_path / "out")) == facts(expected)


def test_parts_of_several_types_cannot_be_one_tensor(tmp_path: Path) -> None:
    """A joined tensor needs all its parts, in one type."""
    model = live_model("hrm-text")
    trained = in_training(model)
    name = next(name for name in trained.masters if name.endswith("q_proj.weight"))
    rest = {other: value for other, value in trained.masters.items() if other != name}
    frozen = {name: trained.masters[name].bfloat16()}
    mixed = replace(trained, groups=[rest], frozen=frozen)
    root = checkpoint_of(model, tmp_path / "run", trained=mixed)
    with pytest.raises(UnsupportedError, match="several types"):
        consolidate(root, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="not all of which"):
        consolidate(root, tmp_path / "out", ExportOptions(exclude_frozen=True))
