"""Checkpoints of FSDP in every form, and plain PEFT folders, through the command line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import zexport
from tests.support import fsdp_checkpoints, fsdp_frameworks
from tests.support.exports import export, invoke, manifest_of, mentions, refused, verify
from tests.support.hf_models import load, tiny_config, tiny_model, write_run
from tests.support.oracles import Tensors, differences
from zexport import EventKind, ExportOptions, UnsupportedError, WatchOptions, watch

ONCE = WatchOptions(once=True, interval_s=0.2)
EXPORTED = EventKind.EXPORTED

pytestmark = pytest.mark.slow  # torch makes them on several ranks


def written(out: Path) -> Tensors:
    """All tensors of an export, tied ones under each name."""
    found = {
        name: one for path in out.glob("*.safetensors") for name, one in load_file(path).items()
    }
    return found | {alias: found[name] for alias, name in manifest_of(out)["tied"].items()}


@pytest.mark.parametrize("form", fsdp_checkpoints.FORMS)
def test_export_equals_live_training(form: str, fsdp: Path, tmp_path: Path) -> None:
    case = fsdp / form
    report = export(case / "ckpt", tmp_path / "out")
    truth = load_file(case / "truth.safetensors")
    assert differences(written(tmp_path / "out"), truth) == []
    assert mentions(report, "weights only")
    verify(tmp_path / "out", "--against", case / "ckpt")
    shown = invoke("inspect", case / "ckpt")
    assert shown["verdict"]["exportable"]
    assert {file["kind"] for file in shown["checkpoint"]["files"]} == {"shard"}


def _saved(state: Tensors, form: str, folder: Path) -> Path:
    """A checkpoint of one rank: a DCP folder or a rank file."""
    if form == "dcp":
        dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)
    else:
        folder.mkdir()
        torch.save(state, folder / "model_world_size_1_rank_0.pt")
    return folder


@pytest.mark.parametrize("form", ["dcp", "ranks"])
def test_weights_keep_their_own_dtypes(form: str, tmp_path: Path) -> None:
    dtypes = torch.bfloat16, torch.float32, torch.float64
    cast = {str(one): torch.randn(3).to(one) for one in dtypes}
    fp8 = [torch.randn(3, 2).to(one) for one in (torch.float8_e4m3fn, torch.float8_e5m2)]
    others = [*fp8, torch.arange(3), torch.tensor(data=True), torch.randn(3) * 1j]
    kept = {f"kept.{number}": one for number, one in enumerate(others)}
    ckpt = _saved(cast | kept, form, tmp_path / "ckpt")
    export(ckpt, tmp_path / "own")
    assert differences(written(tmp_path / "own"), cast | kept) == []
    export(ckpt, tmp_path / "fp32", "--dtype", "fp32")
    found = {name: one.float() for name, one in cast.items()} | kept
    assert differences(written(tmp_path / "fp32"), found) == []
    wide = _saved({**cast, "c": torch.randn(3).cdouble()}, form, tmp_path / "wide")
    refused(wide, tmp_path / "no", kind="unsupported", word="c'")


@pytest.mark.parametrize("form", ["dcp", "ranks", "safetensors"])
@pytest.mark.parametrize("family", fsdp_checkpoints.FAMILIES)
def test_export_of_every_form_is_what_transformers_saves(
    family: str, form: str, fsdp: Path, tmp_path: Path
) -> None:
    config = tiny_config(family, **fsdp_checkpoints.FAMILIES[family])
    tiny_model(f"{family}ForCausalLM", config).save_pretrained(tmp_path / "saved")
    export(fsdp / f"{family}_{form}" / "ckpt", tmp_path / "out")
    found, saved = (load_file(tmp_path / one / "model.safetensors") for one in ("out", "saved"))
    assert differences(found, saved) == []
    assert load(tmp_path / "out")[1] == {}


@pytest.mark.parametrize(("framework", "form"), [("accelerate", "FULL"), ("trainer", "SHARDED")])
def test_folder_of_a_framework_loads_as_the_live_model(
    framework: str, form: str, tmp_path: Path
) -> None:
    run = fsdp_frameworks.made(framework, form, tmp_path / "run")
    export(run, tmp_path / "out", "--tag", "newest", "--base", tmp_path / "run.model")
    truth = load_file(tmp_path / "run.truth.safetensors")
    assert differences(written(tmp_path / "out"), truth) == []
    assert load(tmp_path / "out")[1] == {}
    options = ExportOptions(base=tmp_path / "run.model")
    events = [*watch(run, tmp_path / "outs", ONCE, options)]
    assert {one.event for one in events} == {EXPORTED}, [one.failure for one in events]
    shutil.rmtree(tmp_path / "outs" / ".zexport-watch")
    assert [*watch(run, tmp_path / "outs", ONCE, options)] == []  # the rank files are the same
    newest = max(path.name for path in (tmp_path / "outs").glob("checkpoint*"))
    assert differences(written(tmp_path / "outs" / newest), truth) == []


def test_run_of_verl_is_exported_with_its_config(tmp_path: Path) -> None:
    config = tiny_config(architectures=["FSDPLlamaForCausalLM"])
    model = tiny_model("LlamaForCausalLM", config)
    for step in (2, 10):
        actor = tmp_path / "run" / f"global_step_{step}" / "actor"
        (actor / "huggingface").mkdir(parents=True)
        config.save_pretrained(actor / "huggingface")
        torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    export(tmp_path / "run", tmp_path / "out")
    assert manifest_of(tmp_path / "out")["checkpoint"]["global_steps"] == 2
    verify(tmp_path / "out", "--against", tmp_path / "run")
    assert load(tmp_path / "out")[1] == {}
    assert "FSDP" not in (tmp_path / "out" / "config.json").read_text()
    shutil.copytree(actor, actor.with_name("critic"))
    events = {one.checkpoint: one for one in watch(tmp_path / "run", tmp_path / "outs", ONCE)}
    assert events["global_step_2"].event is EXPORTED
    assert "found actor, critic" in str(events["global_step_10"].failure)


def test_dcp_is_complete_once_its_metadata_is_written(fsdp: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        shutil.copytree(fsdp / "fsdp2_dcp" / "ckpt", run / f"step-{step}")
    (run / "step-2" / ".metadata").unlink()
    for _ in watch(run, tmp_path / "outs", ONCE):
        pass
    assert [one.name for one in (tmp_path / "outs").glob("step-*")] == ["step-1"]
    for name in ("ema", "model"):
        folder = shutil.copytree(run / "step-1", tmp_path / "two" / name)
    assert [tag["name"] for tag in invoke("inspect", folder)["tags"]] == ["model"]


@pytest.mark.parametrize("form", ["fsdp1_dcp", "fsdp2_dcp", "fsdp2_tp_dcp", "fsdp2_ranks"])
def test_one_flipped_bit_in_any_chunk_is_noticed(form: str, fsdp: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(fsdp / form / "ckpt", tmp_path / "ckpt")
    state = zexport.open_checkpoint(folder)
    read = [*_records(state)]
    assert len(read) > 8
    for path, record in read:
        whole = path.read_bytes()
        at = record.offset + record.nbytes // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(zexport.ZexportError, match=re.escape(path.name)):
            export(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        path.write_bytes(whole)
    export(folder, tmp_path / "out")


def _records(state: Any) -> Iterator[tuple[Path, Any]]:
    """The records that contain weights."""
    used = {
        (extent.path, extent.offset)
        for one in state.tensors
        for extent in one.source.extents(0, one.source.nbytes)
    }
    for file in state.torch_files:
        for record in file.records:
            span = range(record.offset, record.offset + record.nbytes)
            if any(path == file.path and offset in span for path, offset in used):
                yield file.path, record


def test_other_commands_refuse_fsdp_with_the_reason(fsdp: Path, tmp_path: Path) -> None:
    folder = fsdp / "fsdp2_dcp" / "ckpt"
    export(folder, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="torch reshards"):
        invoke("reshard", folder, tmp_path / "resharded", "--world-size", "2")
    with pytest.raises(UnsupportedError, match="only checkpoints of DeepSpeed"):
        invoke("prune", folder, "--export", tmp_path / "out")


def test_names_of_torchtitan_need_the_memory_layout(tmp_path: Path) -> None:
    state = {"tok_embeddings.weight": torch.randn(5, 2), "output.weight": torch.randn(5, 2)}
    dcp.save(state, checkpoint_id=tmp_path / "step-10", no_dist=True)
    refused(tmp_path / "step-10", tmp_path / "out", kind="unsupported", word="--layout memory")
    export(tmp_path / "step-10", tmp_path / "out", "--layout", "memory")
    assert differences(written(tmp_path / "out"), state) == []


def _adapted(base: Path, adapter: Path, **more: Any) -> tuple[Tensors, Tensors]:
    """Save a base model and a LoRA adapter; return the live weights, and as peft merges them."""
    import peft

    model = tiny_model("LlamaForCausalLM", tiny_config())
    model.save_pretrained(base)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], **more)
    trained = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    trained.save_pretrained(adapter)
    live = {name: one.clone() for name, one in trained.state_dict().items()}
    return live, trained.merge_and_unload().state_dict()


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_peft_folder_is_merged_as_peft_does(more: dict[str, Any], tmp_path: Path) -> None:
    _, merged = _adapted(tmp_path / "base", tmp_path / "adapter", **more)
    export(tmp_path / "adapter", tmp_path / "out", "--base", tmp_path / "base")
    found = written(tmp_path / "out")
    assert found.keys() == merged.keys()
    for name, one in merged.items():
        torch.testing.assert_close(found[name], one, rtol=1e-6, atol=1e-7)
    assert differences(found, load_file(tmp_path / "base" / "model.safetensors")) != []
    verify(tmp_path / "out", "--against", tmp_path / "adapter", "--base", tmp_path / "base")
    refused(tmp_path / "adapter", tmp_path / "no", "--adapter", "merge", kind="frozen_left_out")


def test_adapter_in_a_dcp_folder_is_kept_or_merged(tmp_path: Path) -> None:
    """As the Trainer saves it: adapter weights alone, without the adapter's name or config."""
    _, merged = _adapted(tmp_path / "base", tmp_path / "adapter")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    own = {name: one for name, one in adapter.items() if ".lora_" in name}
    dcp.save({"model": own}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    given = ("--adapter-config", tmp_path / "adapter" / "adapter_config.json")
    export(tmp_path / "ckpt", tmp_path / "kept", *given)
    kept = load_file(tmp_path / "kept" / "adapter_model.safetensors")
    assert differences(kept, own) == []
    export(tmp_path / "ckpt", tmp_path / "merged", *given, "--base", tmp_path / "base")
    for name, one in written(tmp_path / "merged").items():
        torch.testing.assert_close(one, merged[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["dcp", "ranks"])
def test_adapter_with_a_value_head_is_merged_with_the_weights_of_the_run(
    form: str, tmp_path: Path
) -> None:
    live, merged = _adapted(tmp_path / "base", tmp_path / "adapter", lora_alpha=3)
    head = {"v_head.summary.weight": torch.randn(1, 16), "v_head.summary.bias": torch.randn(1)}
    ckpt = _saved(live | head, form, tmp_path / "ckpt")
    shutil.copy(tmp_path / "base" / "config.json", ckpt)
    given: tuple[object, ...] = ("--adapter-config", tmp_path / "adapter")
    if form == "ranks":  # verl has no configuration
        given = ()
        (ckpt / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 3}')
    export(ckpt, tmp_path / "out", "--adapter", "merge", *given)
    for name, one in (merged | head).items():
        torch.testing.assert_close(written(tmp_path / "out")[name], one, rtol=1e-6, atol=1e-7)
    assert differences(load_file(tmp_path / "out" / "value_head.safetensors"), head) == []
    assert load(tmp_path / "out")[1] == {}


def test_weights_of_the_base_that_no_class_loads_are_kept_if_asked(tmp_path: Path) -> None:
    model = tiny_model("LlamaForCausalLM", tiny_config())
    run = write_run(model, tmp_path / "run", "LlamaForCausalLM")
    model.save_pretrained(tmp_path / "base")
    extra = torch.randn(4, 3).bfloat16()
    path = tmp_path / "base" / "model.safetensors"
    save_file({**load_file(path), "mtp.0.weight": extra}, path, {"format": "pt"})
    report = export(run, tmp_path / "without", "--base", tmp_path / "base")
    assert mentions(report, "mtp.0.weight", "--keep-unloaded")
    words = ("--base", tmp_path / "base", "--keep-unloaded")
    export(run, tmp_path / "with", *words)
    assert differences({"m": written(tmp_path / "with")["mtp.0.weight"]}, {"m": extra}) == []
    verify(tmp_path / "with", "--against", run, "--base", tmp_path / "base")
