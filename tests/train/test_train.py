"""``zexport train``: runs of two ranks on the CPU."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.train_runs import Run, run, trained
from zexport.model.hub_names import ModelNames
from zexport.model.names_client import Learner, NamesClient

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Twelve steps of ZeRO-3 in bf16, saved both ways after six and after twelve."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return out, trained(out, "--steps", 12, "--save-every", 6, "--save", "both")


@pytest.fixture(scope="module")
def continued(
    plain: tuple[Path, Run], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """The same run, resumed from its sixth step, in which one of the saves cannot be made."""
    out = tmp_path_factory.mktemp("continued") / "run"
    shutil.copytree(plain[0], out)
    shutil.rmtree(out / "global_step12")
    shutil.rmtree(out / "gathered")
    (out / "latest").write_text("global_step6")
    (out / "global_step8").write_text("a file where a folder has to go")
    keep = ("--steps", 12, "--resume", "--save", "partitioned", "--save-every", 2, "--keep", 2)
    return out, trained(out, *keep)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter trained with ZeRO-2, a part of it frozen."""
    out = tmp_path_factory.mktemp("adapted") / "run"
    trained(out, "--steps", 4, "--stage", 2, "--lora", "--freeze", r"layers\.0.*lora_A")
    return out


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Ranks that torchrun started, with a DeepSpeed configuration, and only gathered weights."""
    folder = tmp_path_factory.mktemp("torchrun")
    config = folder / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 1}, "train_batch_size": 16}))
    options = ("--steps", 3, "--save", "gathered", "--dtype", "fp32", "--ds-config", config)
    command = (*TORCHRUN, "-m", "zexport", "train")
    return folder / "run", trained(folder / "run", *options, command=command)


def log_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]


def full_weights(out: Path, tag: str) -> dict[str, torch.Tensor]:
    """The fp32 weights as DeepSpeed's own converter reads them."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(out), tag=tag)


@pytest.mark.deepspeed
@pytest.mark.slow
class TestARun:
    def test_loss_falls(self, plain: tuple[Path, Run]) -> None:
        losses = [line["loss"] for line in log_of(plain[0])]
        assert losses[0] - losses[-1] > 0.7

    def test_result_is_printed_as_json(self, plain: tuple[Path, Run]) -> None:
        out, done = plain
        log = log_of(out)
        assert done.result == {
            "schema": 2,
            "out": str(out),
            "tag": "global_step12",
            "steps": 12,
            "first_loss": log[0]["loss"],
            "last_loss": log[-1]["loss"],
            "checkpoints": ["global_step6", "global_step12"],
            "world_size": 2,
            "stage": 3,
            "partitioned": True,
            "save_error": "",
        }

    def test_gathered_weights_equal_master_weights(self, plain: tuple[Path, Run]) -> None:
        out, _ = plain
        for tag in ("global_step6", "global_step12"):
            gathered = load_file(out / "gathered" / tag / "model.safetensors")
            weights = full_weights(out, tag)
            assert gathered.keys() == weights.keys()
            for name, weight in gathered.items():
                assert torch.equal(weight, weights[name].to(torch.bfloat16)), name

    def test_source_description_has_the_exported_tensors(self, plain: tuple[Path, Run]) -> None:
        out, _ = plain
        source = json.loads((out / "zexport_source.json").read_text())
        with safe_open(out / "gathered/global_step12/model.safetensors", "pt") as file:
            saved = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        assert {name: entry["shape"] for name, entry in source["tensors"].items()} == saved
        assert {entry["dtype"] for entry in source["tensors"].values()} == {"bfloat16"}
        assert all(name == entry["stored_name"] for name, entry in source["tensors"].items())
        assert source["names_match_memory"] is True
        assert source["model_type"] == "llama"
        assert source["tied"] == {}
        assert source["frozen"] == source["buffers"] == []


@pytest.mark.deepspeed
@pytest.mark.slow
class TestAResumedRun:
    def test_losses_equal_an_uninterrupted_run(
        self, plain: tuple[Path, Run], continued: tuple[Path, Run]
    ) -> None:
        assert log_of(continued[0]) == log_of(plain[0])

    def test_weights_equal_an_uninterrupted_run(
        self, plain: tuple[Path, Run], continued: tuple[Path, Run]
    ) -> None:
        uninterrupted = full_weights(plain[0], "global_step12")
        for name, weight in full_weights(continued[0], "global_step12").items():
            assert torch.equal(weight, uninterrupted[name]), name

    def test_keep_2_leaves_the_newest_two(self, continued: tuple[Path, Run]) -> None:
        out, done = continued
        assert done.result["checkpoints"] == ["global_step10", "global_step12"]
        assert (out / "latest").read_text() == "global_step12"
        assert not (out / "global_step6").exists()

    def test_training_continues_after_a_failed_save(self, continued: tuple[Path, Run]) -> None:
        out, done = continued
        notes = [line for line in done.stderr.splitlines() if "not saved" in line]
        assert len(notes) == 1
        assert notes[0].startswith("global_step8 not saved, training continues: rank 0: ")
        assert notes[0].endswith(("File exists", "Not a directory"))
        assert (out / "global_step8").is_file()

    def test_another_world_size_is_rejected(self, plain: tuple[Path, Run]) -> None:
        done = run(plain[0], "--resume", "--world-size", 3)
        assert done.status == 2
        assert "--world-size cannot change in a resumed run (found 3, expected 2)" in done.stderr


@pytest.mark.deepspeed
@pytest.mark.slow
class TestAnAdapterRun:
    def test_peft_loads_the_adapter(self, adapted: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(adapted / "base")
        model = PeftModel.from_pretrained(base, adapted)
        live = full_weights(adapted, "global_step4")
        loaded = dict(model.named_parameters())
        adapter = [name for name in loaded if "lora_" in name]
        assert adapter
        for name in adapter:
            assert torch.equal(loaded[name], live[name].to(torch.bfloat16).float()), name

    def test_source_description_lists_frozen_weights(self, adapted: Path) -> None:
        source = json.loads((adapted / "zexport_source.json").read_text())
        assert source["adapter"] is True
        frozen = set(source["frozen"])
        assert any("layers.0" in name and "lora_A" in name for name in frozen)
        assert not any("layers.1" in name and "lora_" in name for name in frozen)
        assert "base_model.model.model.embed_tokens.weight" in frozen


@pytest.mark.deepspeed
@pytest.mark.slow
class TestUnderTorchrun:
    def test_command_is_a_rank_of_the_launcher(self, under_torchrun: tuple[Path, Run]) -> None:
        out, done = under_torchrun
        assert done.result["world_size"] == 2
        assert done.result["stage"] == 1
        assert done.result["checkpoints"] == ["global_step3"]
        assert not (out / "latest").exists()

    def test_gathered_weights_cannot_be_resumed(self, under_torchrun: tuple[Path, Run]) -> None:
        done = run(under_torchrun[0], "--resume")
        assert (done.status, "no checkpoint to resume" in done.stderr) == (2, True)


def test_quiet_run_prints_nothing(tmp_path: Path) -> None:
    words = ("-q", "--world-size", 1, "--steps", 1, "--dtype", "BFloat16", "--save", "Partitioned")
    assert run(tmp_path / "run", *words) == Run(0, "", "")
    assert json.loads((tmp_path / "run" / "zexport_train.json").read_text())["dtype"] == "bf16"


@pytest.mark.slow
class TestTheSidecar:
    def test_names_equal_those_of_save_pretrained(self, tmp_path: Path) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        from zexport.train.model import describe_source, meta_twin

        config = MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
            tie_word_embeddings=True,
        )  # fmt: skip
        model = MixtralForCausalLM(config).to(torch.bfloat16)
        twin = meta_twin(model, torch.bfloat16)
        source = json.loads(describe_source(model, torch.bfloat16, twin, adapter=False))
        model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        told = {name: tuple(entry["shape"]) for name, entry in source["tensors"].items()}
        assert told == {name: tuple(tensor.shape) for name, tensor in saved.items()}
        assert source["names_match_memory"] is False
        assert source["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
        embedding = source["tensors"]["model.embed_tokens.weight"]
        assert embedding["stored_name"] == "model.embed_tokens.weight"
        expert = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
        assert "stored_name" not in source["tensors"][expert]
        names = Learner(source, NamesClient()).names(None, {})
        assert isinstance(names, ModelNames)
        assert names.layouts[0].shapes == told
