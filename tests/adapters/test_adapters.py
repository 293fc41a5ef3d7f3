"""Adapters, kept and merged, against peft itself: its live model, and what it saves of it."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support import peft_models
from tests.support.checkpoints import Model, Run, save, small_model
from tests.support.forked import typed
from tests.support.peft_models import FORMS, Form, Trained
from tests.support.train_runs import trained as trained_by_command
from zexport import ExportOptions, consolidate, verify_export
from zexport.errors import (
    DamagedCheckpointError,
    FrozenLeftOutError,
    NotACheckpointError,
    UnsupportedError,
    UsageError,
    ZexportError,
)
from zexport.inspect.inspect import inspect_checkpoint
from zexport.options import AdapterMode, ExportDType, NameLayout
from zexport.report.inspect import print_inspection
from zexport.report.inspect_json import inspection_json

ULPS = 8
"""How far a merged weight may be from peft's, in units of the last place of the larger term: two
libraries round a matrix product differently."""

RUNS = {
    "zero2_without_base": Run(stage=2, exclude_frozen=True),
    "zero3_without_base": Run(stage=3, exclude_frozen=True),
    "zero1": Run(stage=1),
    "zero3": Run(stage=3),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


def train(tmp_path: Path, form: str, run: str = "zero2_without_base") -> Trained:
    return peft_models.train(FORMS[form], tmp_path, RUNS[run])


def merge_of(trained: Trained, out: Path, *, base: bool) -> dict[str, torch.Tensor]:
    options = ExportOptions(
        adapter=AdapterMode.MERGE,
        base=trained.base if base else None,
        max_shard_nbytes=30_000,
    )
    consolidate(trained.checkpoint, out, options)
    tensors: dict[str, torch.Tensor] = {}
    for path in out.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def merged_by_peft(trained: Trained) -> PreTrainedModel:
    merged: PreTrainedModel = trained.model.merge_and_unload()
    return merged


def saved(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes of a model."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = torch.finfo(torch.float32).eps * max(1.0, float(value.abs().max()))
        assert found[name].dtype is torch.float32
        assert (found[name] - value).abs().max() <= ULPS * scale, name


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(8)[None] + 3).logits
    return result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", ["zero2_without_base", "zero3"])
def test_a_kept_adapter_is_what_peft_saves_bit_for_bit(tmp_path: Path, form: str, run: str) -> None:
    """Names, shapes and values; but for the frozen embeddings that a save may have left out."""
    trained = train(tmp_path, form, run)
    consolidate(trained.checkpoint, tmp_path / "out", ExportOptions(adapter=AdapterMode.KEEP))
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    wanted = load_file(trained.live / "adapter_model.safetensors")
    left_out = {n for n in wanted if ".base_layer.weight" in n and run.endswith("without_base")}
    assert found.keys() == wanted.keys() - left_out
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert not (tmp_path / "out" / "config.json").exists()
    assert verify_export(tmp_path / "out", against=trained.checkpoint).ok


@pytest.mark.parametrize("form", FORMS)
def test_peft_loads_a_kept_adapter_onto_the_base(tmp_path: Path, form: str) -> None:
    """With no missing and no unexpected key, and the logits of the live model."""
    trained = train(tmp_path, form)
    consolidate(trained.checkpoint, tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(trained.base)
    base.load_state_dict({n: peft_models.rounded(v) for n, v in base.state_dict().items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
        loaded = PeftModel.from_pretrained(base, tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(trained.model))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", RUNS)
def test_a_merged_model_is_what_peft_merges(tmp_path: Path, form: str, run: str) -> None:
    """Over the base as training saw it: from the checkpoint, or rounded from the folder."""
    trained = train(tmp_path, form, run)
    out = tmp_path / "out"
    (trained.checkpoint / "config.json").write_bytes((trained.base / "config.json").read_bytes())
    merged = merged_by_peft(trained)
    found = merge_of(trained, out, base=run.endswith("without_base"))
    assert_close(found, saved(merged, tmp_path / "peft"))
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] == merged.config.tie_word_embeddings


def test_an_adapter_is_merged_into_the_files_of_the_model_inside(tmp_path: Path) -> None:
    """As GPT-2 lies on the hub, whose names have no ``transformer.`` before them."""
    trained = train(tmp_path, "conv1d")
    (trained.checkpoint / "config.json").write_bytes((trained.base / "config.json").read_bytes())
    weights = load_file(trained.base / "model.safetensors")
    inner = {name.removeprefix("transformer."): value for name, value in weights.items()}
    save_file(inner, trained.base / "model.safetensors", metadata={"format": "pt"})
    found = merge_of(trained, tmp_path / "out", base=True)
    assert_close(found, saved(merged_by_peft(trained), tmp_path / "peft"))


def test_a_classifiers_adapter_is_merged_into_the_files_of_its_encoder(tmp_path: Path) -> None:
    """Whose config names the encoder's class, and whose names have no ``bert.``."""
    form = Form(peft_models.bert_classifier, {"target_modules": ["query"], "task_type": "SEQ_CLS"})
    trained = peft_models.train(form, tmp_path, RUNS["zero2_without_base"])
    encoder = trained.model.get_base_model().bert
    weights = load_file(trained.base / "model.safetensors")
    inner = {n.removeprefix("bert."): v for n, v in weights.items() if n.startswith("bert.")}
    encoder.config.architectures = ["BertModel"]
    encoder.config.save_pretrained(trained.base)
    save_file(inner, trained.base / "model.safetensors", metadata={"format": "pt"})
    found = merge_of(trained, tmp_path / "out", base=True)
    assert_close(found, saved(merged_by_peft(trained), tmp_path / "peft"))


def test_another_adapter_is_not_the_one_asked_for(tmp_path: Path) -> None:
    """Of two adapters each is kept in the folder that peft gives it, and one is merged by name."""
    form = Form(peft_models.llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    trained = peft_models.train(form, tmp_path, RUNS["zero3"], adapters=("default", "second"))
    out = tmp_path / "out"
    consolidate(trained.checkpoint, out)
    for folder in ("", "second"):
        found = load_file(out / folder / "adapter_model.safetensors")
        wanted = load_file(trained.live / folder / "adapter_model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in found)
        assert (out / folder / "adapter_config.json").exists()
    assert verify_export(out).ok
    assert verify_export(out, against=trained.checkpoint).ok


def test_values_are_in_the_type_asked_for(tmp_path: Path) -> None:
    """Masters by default; with auto, what the module held."""
    trained = train(tmp_path, "plain")
    for dtype, wanted in ((ExportDType.AUTO, torch.bfloat16), (ExportDType.FP16, torch.float16)):
        out = tmp_path / dtype.value
        consolidate(trained.checkpoint, out, ExportOptions(dtype=dtype))
        live = load_file(trained.live / "adapter_model.safetensors")
        for name, value in load_file(out / "adapter_model.safetensors").items():
            assert torch.equal(value, live[name].to(wanted))


def test_one_of_several_adapters_is_merged_by_its_name(tmp_path: Path) -> None:
    """Without the name, nothing is."""
    form = Form(peft_models.llama, {"target_modules": ["q_proj"]})
    trained = peft_models.train(form, tmp_path, RUNS["zero3"], adapters=("default", "second"))
    with pytest.raises(UsageError, match="--adapter-name"):
        merge_of(trained, tmp_path / "neither", base=False)
    options = ExportOptions(adapter=AdapterMode.MERGE, adapter_name="second")
    consolidate(trained.checkpoint, tmp_path / "out", options)
    trained.model.set_adapter("second")
    wanted = saved(merged_by_peft(trained), tmp_path / "peft")
    assert_close(load_file(tmp_path / "out" / "model.safetensors"), wanted)
    with pytest.raises(UsageError, match="'third'"):
        consolidate(trained.checkpoint, tmp_path / "no", ExportOptions(adapter_name="third"))


def test_the_base_decides_what_auto_does(tmp_path: Path) -> None:
    """Without one the adapter is kept, with one it is merged, and a merge is verified as such."""
    trained = train(tmp_path, "plain")
    consolidate(trained.checkpoint, tmp_path / "kept")
    assert not list((tmp_path / "kept").glob("model*"))
    out = tmp_path / "merged"
    consolidate(trained.checkpoint, out, ExportOptions(base=trained.base))
    assert (out / "model.safetensors").exists()
    assert not list(out.glob("adapter*"))
    assert verify_export(out, against=trained.checkpoint, base=trained.base).ok
    loaded = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(loaded), logits(trained.model))


def test_names_in_memory_are_left_alone(tmp_path: Path) -> None:
    trained = train(tmp_path, "plain")
    options = ExportOptions(layout=NameLayout.MEMORY, exclude_frozen=True)
    consolidate(trained.checkpoint, tmp_path / "out", options)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(".default." in name for name in found)
    keep = ExportOptions(layout=NameLayout.MEMORY, adapter=AdapterMode.KEEP)
    with pytest.raises(UsageError, match="--layout memory"):
        consolidate(trained.checkpoint, tmp_path / "no", keep)


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
def test_a_model_without_adapters_has_none_to_keep_or_merge(
    tmp_path: Path, mode: AdapterMode
) -> None:
    root = save(small_model(), Run(), tmp_path / "run")
    with pytest.raises(UsageError, match="checkpoint of a peft model"):
        consolidate(root, tmp_path / "out", ExportOptions(adapter=mode))


REFUSALS: dict[str, tuple[dict[str, object], type[ZexportError], str]] = {
    "a_variant": ({"alora_invocation_tokens": [1]}, UnsupportedError, "alora_invocation_tokens"),
    "a_changed_base": ({"init_lora_weights": "pissa"}, UnsupportedError, "pissa"),
    "no_scale": ({"lora_alpha": None}, DamagedCheckpointError, "lora_alpha"),
    "a_pattern": ({"rank_pattern": {"(": 2}}, DamagedCheckpointError, "rank_pattern"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_be_merged_wrongly_is_refused(tmp_path: Path, case: str) -> None:
    """A configuration that says something else than the tensors, or than plain LoRA."""
    change, error, words = REFUSALS[case]
    trained = train(tmp_path, "plain")
    config = trained.checkpoint / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(error, match=words):
        merge_of(trained, tmp_path / "out", base=True)


def test_a_rank_that_the_base_tells_to_be_another_is_refused(tmp_path: Path) -> None:
    """Factors of fused experts have it as often as there are experts."""
    trained = train(tmp_path, "one_of_the_experts")
    config = trained.checkpoint / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": 3}))
    with pytest.raises(DamagedCheckpointError, match="the rank is 3"):
        merge_of(trained, tmp_path / "out", base=True)


def test_without_the_base_there_is_no_merge(tmp_path: Path) -> None:
    trained = train(tmp_path, "plain")
    with pytest.raises(FrozenLeftOutError, match="--base"):
        merge_of(trained, tmp_path / "out", base=False)


@pytest.mark.parametrize("named", ["by the adapter", "beside the export", "in the hub's cache"])
def test_a_merge_is_verified_with_the_base_of_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    trained, base = train(tmp_path, "plain"), tmp_path / "base"
    if named == "in the hub's cache":
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        model = tmp_path / "hub" / "models--owner--name"
        base = model / "snapshots" / ("a" * 40)
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("a" * 40)
    elif named == "by the adapter":
        base = tmp_path / "elsewhere" / "models" / "base"
        config = trained.checkpoint / "adapter_config.json"
        content = json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}
        config.write_text(json.dumps(content))
    shutil.move(trained.base, base)
    out = tmp_path / "out"
    consolidate(trained.checkpoint, out, ExportOptions(adapter=AdapterMode.MERGE, base=base))
    done = typed("verify", out, "--against", trained.checkpoint)
    assert (done.returncode, done.stderr) == (0, "")
    shutil.rmtree(base)
    assert "in --base MODEL" in typed("verify", out, "--against", trained.checkpoint).stderr


def test_an_adapter_needs_its_configuration(tmp_path: Path) -> None:
    """Which may lie elsewhere."""
    trained = train(tmp_path, "plain")
    config = (trained.checkpoint / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    config = config.rename(config.parent / "live" / "adapter_config.json")
    with pytest.raises(NotACheckpointError, match="--adapter-config"):
        consolidate(trained.checkpoint, tmp_path / "out", ExportOptions(adapter=AdapterMode.KEEP))
    consolidate(trained.checkpoint, tmp_path / "as_stored", ExportOptions(exclude_frozen=True))
    assert (tmp_path / "as_stored" / "model.safetensors").exists()
    consolidate(trained.checkpoint, tmp_path / "out", ExportOptions(adapter_config=config))
    assert (tmp_path / "out" / "adapter_config.json").exists()
    verified = verify_export(tmp_path / "out", against=trained.checkpoint, adapter_config=config)
    assert verified.ok


@pytest.mark.parametrize("where", ["--base", "the checkpoint"])
def test_no_adapter_of_unknown_kind_is_put_beside_a_models_config(
    where: str, tmp_path: Path
) -> None:
    """Accelerate saves no adapter_config.json. Such a folder loads, with none of its weights."""
    trained = train(tmp_path, "plain", "zero3")
    (trained.checkpoint / "adapter_config.json").unlink()
    base = trained.base if where == "--base" else None
    if base is None:
        (trained.base / "config.json").rename(trained.checkpoint / "config.json")
    with pytest.raises(NotACheckpointError, match=r"has no adapter_config.json.*--adapter-config"):
        consolidate(trained.checkpoint, tmp_path / "out", ExportOptions(base=base))
    options = ExportOptions(base=base, layout=NameLayout.MEMORY)
    consolidate(trained.checkpoint, tmp_path / "as_stored", options)


def test_a_configuration_that_is_given_may_have_any_name(tmp_path: Path) -> None:
    """If it is one."""
    trained = train(tmp_path, "plain")
    given = (trained.checkpoint / "adapter_config.json").rename(tmp_path / "mine.json")
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpointError, match="is no adapter_config"):
        consolidate(trained.checkpoint, tmp_path / "out", ExportOptions(adapter_config=empty))
    consolidate(trained.checkpoint, tmp_path / "out", ExportOptions(adapter_config=given))
    found = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert found == json.loads(given.read_text()) | {"inference_mode": True}
    given.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(NotACheckpointError, match="peft_type"):
        consolidate(trained.checkpoint, tmp_path / "other", ExportOptions(adapter_config=given))


def test_a_method_that_saves_more_than_tensors_is_refused_by_name(tmp_path: Path) -> None:
    trained = train(tmp_path, "plain")
    config = trained.checkpoint / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "VBLORA"}))
    with pytest.raises(UnsupportedError, match="VBLORA"):
        consolidate(trained.checkpoint, tmp_path / "out")


def test_the_type_of_the_base_can_be_said(tmp_path: Path) -> None:
    """By default it is the one that DeepSpeed cast it to; in fp32 the folder's own digits count."""
    trained = train(tmp_path, "plain")
    given = load_file(trained.base / "model.safetensors")
    name = "model.norm.weight"
    for dtype, wanted in (
        (ExportDType.AUTO, peft_models.rounded(given[name])),
        (ExportDType.FP32, given[name]),
    ):
        out = tmp_path / dtype.value
        consolidate(trained.checkpoint, out, ExportOptions(base=trained.base, base_dtype=dtype))
        assert torch.equal(load_file(out / "model.safetensors")[name], wanted)


@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_real_run_gives_the_adapter_back_both_ways(tmp_path: Path) -> None:
    """Against peft, which loads what was kept, and merges what was loaded; by ZeRO-3.

    A real run by ZeRO-2 is among the fixtures.
    """
    run = tmp_path / "run"
    trained_by_command(run, "--steps", 4, "--stage", 3, "--lora")
    consolidate(run, tmp_path / "kept", ExportOptions(adapter=AdapterMode.KEEP))
    consolidate(run, tmp_path / "merged", ExportOptions(base=run / "base"))
    base = AutoModelForCausalLM.from_pretrained(run / "base", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "kept").merge_and_unload()
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert_close(found, saved(merged, tmp_path / "peft"))


def test_inspect_tells_of_the_adapter(tmp_path: Path) -> None:
    """Its method, rank and targets, and whether the base model is there."""
    trained = train(tmp_path, "saved_modules")
    inspection = inspect_checkpoint(trained.checkpoint)
    (told,) = inspection_json(inspection)["checkpoint"]["adapters"]
    assert told["method"] == "LORA"
    assert told["rank"] == 4
    assert sorted(told["targets"]) == ["q_proj", "v_proj"]
    assert told["saved_modules"] == ["lm_head"]
    assert not told["has_base"]
    assert inspection.verdict.next_step.endswith("OUT --base MODEL")
    console = Console(width=200, record=True, file=io.StringIO())
    print_inspection(console, inspection)
    assert "default: LoRA of rank 4" in console.export_text()
    (trained.checkpoint / "adapter_config.json").unlink()
    (told,) = inspection_json(inspect_checkpoint(trained.checkpoint))["checkpoint"]["adapters"]
    assert told["method"] is None


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
def test_a_method_whose_tensors_have_other_names_is_named(
    mode: AdapterMode, tmp_path: Path
) -> None:
    """Its tensors alone would tell that this is no peft model; its configuration tells better."""
    tensors = {"base_model.model.q_proj.vblora_logits_A.default": torch.ones(3)}
    root = save(Model([tensors]), Run(), tmp_path)
    (root / "adapter_config.json").write_text(json.dumps({"peft_type": "VBLORA"}))
    with pytest.raises(UnsupportedError, match="VBLORA"):
        consolidate(root, tmp_path / "out", ExportOptions(adapter=mode))
    (root / "adapter_config.json").unlink()
    with pytest.raises(UsageError, match="peft model"):
        consolidate(root, tmp_path / "out", ExportOptions(adapter=mode))


@pytest.mark.slow
def test_a_bias_that_the_base_has_no_place_for_is_refused_as_that(tmp_path: Path) -> None:
    keys = {"target_modules": ["q_proj"], "lora_bias": True}
    trained = peft_models.train(Form(peft_models.llama, keys), tmp_path, RUNS["zero3_without_base"])
    with pytest.raises(UnsupportedError, match="no place for") as caught:
        merge_of(trained, tmp_path / "out", base=True)
    assert "--adapter keep" in caught.value.hint


@pytest.mark.slow
def test_an_embedding_that_is_adapted_comes_from_the_base_or_is_missed_aloud(
    tmp_path: Path,
) -> None:
    trained = train(tmp_path, "embeddings", "zero3_without_base")
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    report = consolidate(trained.checkpoint, tmp_path / "alone", ExportOptions())
    assert any(name in warning for warning in report.warnings)
    options = ExportOptions(adapter=AdapterMode.KEEP, base=trained.base)
    report = consolidate(trained.checkpoint, tmp_path / "out", options)
    kept = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert kept.keys() == load_file(trained.live / "adapter_model.safetensors").keys()
    embedding = load_file(trained.base / "model.safetensors")["model.embed_tokens.weight"]
    assert kept[name].equal(embedding)
    assert not any(name in warning for warning in report.warnings)
