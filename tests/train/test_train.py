"""``zexport train``: runs of two ranks on the CPU."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.train_runs import Run, fixture_run, run, trained
from zexport import ReshardOptions, reshard
from zexport.model.hub_names import ModelNames
from zexport.model.names_client import Learner

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
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """An adapter, a part of it frozen; torchrun starts the ranks, a file configures DeepSpeed."""
    folder = tmp_path_factory.mktemp("adapted")
    config = folder / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 16}))
    options = ("--steps", 4, "--lora", "--freeze", r"layers\.0.*lora_A", "--ds-config", config)
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
class TestAnAdapterRunUnderTorchrun:
    def test_peft_loads_the_adapter(self, adapted: tuple[Path, Run]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        out, _ = adapted
        base = AutoModelForCausalLM.from_pretrained(out / "base")
        model = PeftModel.from_pretrained(base, out)
        live = full_weights(out, "global_step4")
        loaded = dict(model.named_parameters())
        adapter = [name for name in loaded if "lora_" in name]
        assert adapter
        for name in adapter:
            assert torch.equal(loaded[name], live[name].to(torch.bfloat16).float()), name

    def test_command_is_a_rank_of_the_launcher(self, adapted: tuple[Path, Run]) -> None:
        result = adapted[1].result
        assert (result["world_size"], result["stage"]) == (2, 2)
        assert result["checkpoints"] == ["global_step4"]


@pytest.mark.deepspeed
@pytest.mark.slow
def test_quiet_resharded_run_resumes_on_one_rank_and_prints_nothing(tmp_path: Path) -> None:
    """It saves only gathered weights, which cannot be resumed."""
    out = tmp_path / "on-1"
    reshard(fixture_run(tmp_path / "run"), out, ReshardOptions(world_size=1, stage=2))
    words = ("-q", "--resume", "--steps", 4, "--dtype", "BFloat16", "--save", "Gathered")
    assert run(out, *words) == Run(0, "", "")
    options = json.loads((out / "zexport_train.json").read_text())
    found = [options[key] for key in ("world_size", "stage", "steps", "dtype", "save")]
    assert found == [1, 2, 4, "bf16", "gathered"]
    losses = [line["loss"] for line in log_of(out)]
    assert len(losses) == 4
    assert losses[3] < losses[1]
    assert (out / "gathered" / "global_step4" / "model.safetensors").exists()
    assert (out / "latest").read_text() == "global_step2"
    assert not (out / "global_step4").exists()


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
        source = json.loads(describe_source(twin, adapter=False))
        model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        names = Learner(source).names(None, {})
        assert isinstance(names, ModelNames)
        assert names.tied == {"lm_head.weight": "model.embed_tokens.weight"}
        assert names.layouts[0].shapes == {name: tuple(one.shape) for name, one in saved.items()}
