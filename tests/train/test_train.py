"""What ``zexport train`` makes, by real runs of two ranks on the CPU."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.train_runs import Run, run, trained
from zexport.errors import UsageError
from zexport.model.names import ModelNames
from zexport.model.names_client import Learner, NamesClient
from zexport.train.model import freeze
from zexport.train.options import (
    TrainOptions,
    config_digest,
    read_ds_config,
    resumed,
    settled,
)
from zexport.train.rank_run import ds_config
from zexport.train.sidecar import describe_source
from zexport.train.text import Corpus, check_same

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
    def test_learns(self, plain: tuple[Path, Run]) -> None:
        losses = [line["loss"] for line in log_of(plain[0])]
        assert losses[0] - losses[-1] > 0.7

    def test_tells_what_it_made(self, plain: tuple[Path, Run]) -> None:
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

    def test_leaves_a_whole_checkpoint(self, plain: tuple[Path, Run]) -> None:
        out, _ = plain
        assert (out / "latest").read_text() == "global_step12"
        assert {path.name for path in (out / "global_step12").iterdir()} == {
            f"{name}_{rank}_mp_rank_00_{kind}.pt"
            for name, kind in (
                ("zero_pp_rank", "model_states"),
                ("bf16_zero_pp_rank", "optim_states"),
            )
            for rank in (0, 1)
        }
        assert not list(out.rglob(".*"))

    def test_puts_step_place_and_dice_into_every_file(self, plain: tuple[Path, Run]) -> None:
        folder = plain[0] / "global_step12"
        for path in folder.glob("*model_states.pt"):
            state = torch.load(path, weights_only=False)
            windows = 12 * 4 * 2
            assert (state["step"], state["data_position"]) == (12, windows)
            assert len(state["rng_states"]) == 2

    def test_gathers_the_live_weights(self, plain: tuple[Path, Run]) -> None:
        out, _ = plain
        for tag in ("global_step6", "global_step12"):
            gathered = load_file(out / "gathered" / tag / "model.safetensors")
            masters = full_weights(out, tag)
            assert gathered.keys() == masters.keys()
            for name, weight in gathered.items():
                assert torch.equal(weight, masters[name].to(torch.bfloat16)), name

    def test_gathers_a_model_that_transformers_loads(self, plain: tuple[Path, Run]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = plain[0] / "gathered" / "global_step12"
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert model.dtype == torch.bfloat16
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer("the tide came up two steps", return_tensors="pt")
        made = model.generate(**tokens, max_new_tokens=4, do_sample=False)
        assert tokenizer.decode(made[0]).startswith("the tide came up two steps")

    def test_describes_what_an_export_will_hold(self, plain: tuple[Path, Run]) -> None:
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
    def test_has_the_losses_of_an_uninterrupted_one(
        self, plain: tuple[Path, Run], continued: tuple[Path, Run]
    ) -> None:
        assert log_of(continued[0]) == log_of(plain[0])

    def test_ends_with_the_same_weights(
        self, plain: tuple[Path, Run], continued: tuple[Path, Run]
    ) -> None:
        uninterrupted = full_weights(plain[0], "global_step12")
        for name, weight in full_weights(continued[0], "global_step12").items():
            assert torch.equal(weight, uninterrupted[name]), name

    def test_keeps_the_newest_two(self, continued: tuple[Path, Run]) -> None:
        out, done = continued
        assert done.result["checkpoints"] == ["global_step10", "global_step12"]
        assert (out / "latest").read_text() == "global_step12"
        assert not (out / "global_step6").exists()

    def test_goes_on_after_a_save_that_failed(self, continued: tuple[Path, Run]) -> None:
        out, done = continued
        notes = [line for line in done.stderr.splitlines() if "not saved" in line]
        assert len(notes) == 1
        assert notes[0].startswith("global_step8 not saved, training goes on: rank 0: ")
        assert notes[0].endswith(("File exists", "Not a directory"))
        assert (out / "global_step8").is_file()

    def test_does_not_begin_past_its_end(self, plain: tuple[Path, Run]) -> None:
        done = run(plain[0], "--resume", "--steps", 12)
        assert done.status == 2
        assert "the run has already come this far (found step 12" in done.stderr

    def test_refuses_another_world_before_any_rank_starts(self, plain: tuple[Path, Run]) -> None:
        done = run(plain[0], "--resume", "--world-size", 3)
        assert done.status == 2
        assert "--world-size cannot change in a resumed run (found 3, expected 2)" in done.stderr


@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_run_goes_on_with_the_text_and_tokenizer_that_it_began_with_alone(tmp_path: Path) -> None:
    out, data, tokenizer = tmp_path / "run", tmp_path / "text", tmp_path / "tokenizer"
    shutil.copytree(Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt", tokenizer)
    data.write_text("All that glisters is not gold; often have you heard that told. " * 60)
    given = ("--data", data, "--tokenizer", tokenizer, "--world-size", 1, "--stage", 1)
    trained(out, *given, "--steps", 1)
    text, file = data.read_text(), tokenizer / "tokenizer.json"
    learned, kept = file.read_text(), (out / "tokenizer.json").read_bytes()
    content = json.loads(learned)
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    for place, changed, what in (
        (data, text.replace("gold", "lead"), "text"),
        (file, json.dumps(content), "tokenizer"),
    ):
        was = place.read_text()
        place.write_text(changed)
        done = run(out, "--resume", "--steps", 2)
        assert done.status == 2
        assert f"the {what} is another than the run began with" in done.stderr
        assert (out / "tokenizer.json").read_bytes() == kept
        place.write_text(was)
    assert trained(out, "--resume", "--steps", 2).result["steps"] == 2


@pytest.mark.deepspeed
@pytest.mark.slow
class TestAnAdapterRun:
    def test_lays_an_adapter_beside_that_peft_loads(self, adapted: Path) -> None:
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

    def test_moves_the_adapter_and_nothing_else(self, adapted: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(adapted / "base")
        before = dict(PeftModel.from_pretrained(base, adapted).base_model.named_parameters())
        state = full_weights(adapted, "global_step4")
        for name, weight in before.items():
            full = f"base_model.{name}"
            if "lora_" not in name:
                assert torch.equal(weight.to(torch.bfloat16).float(), state[full].float()), name
        grown = [name for name in state if "lora_B" in name and state[name].abs().sum() > 0]
        assert grown

    def test_says_what_is_frozen(self, adapted: Path) -> None:
        source = json.loads((adapted / "zexport_source.json").read_text())
        assert source["adapter"] is True
        frozen = set(source["frozen"])
        assert any("layers.0" in name and "lora_A" in name for name in frozen)
        assert not any("layers.1" in name and "lora_" in name for name in frozen)
        assert "base_model.model.model.embed_tokens.weight" in frozen


@pytest.mark.deepspeed
@pytest.mark.slow
class TestUnderTorchrun:
    def test_is_a_rank_of_the_launcher(self, under_torchrun: tuple[Path, Run]) -> None:
        out, done = under_torchrun
        assert done.result["world_size"] == 2
        assert done.result["stage"] == 1
        assert done.result["checkpoints"] == ["global_step3"]
        assert not (out / "latest").exists()

    def test_gathers_fp32_weights_in_sixteen_bits(self, under_torchrun: tuple[Path, Run]) -> None:
        folder = under_torchrun[0] / "gathered" / "global_step3"
        weights = load_file(folder / "model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert json.loads((under_torchrun[0] / "config.json").read_text())["dtype"] == "float32"

    def test_cannot_be_resumed_from_gathered_weights(
        self, under_torchrun: tuple[Path, Run]
    ) -> None:
        with pytest.raises(UsageError, match="holds no checkpoint to resume"):
            resumed(TrainOptions(out=under_torchrun[0], resume=True), ())


class TestOptions:
    def test_come_back_from_their_file(self, tmp_path: Path) -> None:
        options = TrainOptions(out=tmp_path, freeze=("a", "b"), ds_config={"x": {"y": 1}}, lr=0.1)
        assert TrainOptions.from_json(options.to_json()) == options

    def test_of_a_resumed_run_are_those_it_began_with(self, tmp_path: Path) -> None:
        stored = TrainOptions(out=tmp_path, stage=2, lr=0.1, keep=3, steps=5)
        (tmp_path / "zexport_train.json").write_text(stored.to_json())
        (tmp_path / "latest").write_text("global_step5")
        asked = TrainOptions(out=tmp_path, steps=9, resume=True)
        options = resumed(asked, {"steps"})
        assert (options.stage, options.lr, options.keep, options.steps) == (2, 0.1, 3, 9)
        assert options.resume

    def test_of_a_resumed_run_may_not_contradict_it(self, tmp_path: Path) -> None:
        (tmp_path / "zexport_train.json").write_text(TrainOptions(out=tmp_path).to_json())
        (tmp_path / "latest").write_text("global_step5")
        asked = TrainOptions(out=tmp_path, stage=1, resume=True)
        with pytest.raises(UsageError, match=r"--stage cannot change .*found 1, expected 3"):
            resumed(asked, {"stage"})

    @pytest.mark.parametrize("text", ["[]", "{", '{"schema": 2}', '{"schema": 1, "oat": 1}'])
    def test_that_cannot_be_read_are_a_usage_error(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "zexport_train.json").write_text(text)
        (tmp_path / "latest").write_text("global_step5")
        with pytest.raises(UsageError, match="cannot be read"):
            resumed(TrainOptions(out=tmp_path, resume=True), ())


class TestDeepSpeedConfiguration:
    def test_of_the_user_is_merged_over_ours(self, tmp_path: Path) -> None:
        theirs = {"zero_optimization": {"sub_group_size": 1000}, "gradient_clipping": 0.5}
        config = ds_config(TrainOptions(out=tmp_path, stage=3, ds_config=theirs))
        assert config["zero_optimization"]["stage"] == 3
        assert config["zero_optimization"]["sub_group_size"] == 1000
        assert config["gradient_clipping"] == 0.5
        assert config["bf16"] == {"enabled": True}

    def test_leaves_auto_to_us(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text('{"optimizer": {"params": {"lr": "auto", "eps": 1}}, "fp16": "auto"}')
        assert read_ds_config(path) == {"optimizer": {"params": {"eps": 1}}}

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_that_is_none_is_a_usage_error(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "ds.json"
        path.write_text(text)
        with pytest.raises(UsageError, match="JSON"):
            read_ds_config(path)

    def test_settles_stage_and_dtype(self, tmp_path: Path) -> None:
        theirs = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
        options = settled(TrainOptions(out=tmp_path, ds_config=theirs), ())
        assert (options.stage, options.dtype) == (1, "fp16")
        assert "bf16" not in ds_config(options)

    def test_may_not_contradict_what_was_typed(self, tmp_path: Path) -> None:
        theirs = {"zero_optimization": {"stage": 1}}
        options = TrainOptions(out=tmp_path, stage=2, ds_config=theirs)
        with pytest.raises(UsageError, match=r"contradicts --stage \(found 1, expected 2\)"):
            settled(options, {"stage"})


def test_quiet_run_prints_nothing(tmp_path: Path) -> None:
    words = ("-q", "--world-size", 1, "--steps", 1, "--dtype", "BFloat16", "--save", "Partitioned")
    assert run(tmp_path / "run", *words) == Run(0, "", "")
    assert json.loads((tmp_path / "run" / "zexport_train.json").read_text())["dtype"] == "bf16"


def test_a_run_goes_on_with_the_config_that_it_began_with(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"rms_norm_eps": 1e-6}')
    options = TrainOptions(out=tmp_path, model=tmp_path)
    began = config_digest(options)
    config.write_text('{ "rms_norm_eps" : 1e-6 }')
    assert config_digest(options) == began
    config.write_text('{"rms_norm_eps": 0.5}')
    tokenizer, corpus = _Words(), Corpus(torch.zeros(1, 2), 2, 0)
    with pytest.raises(UsageError, match="the model's config is another than the run began with"):
        check_same(replace(options, digests={"model's config": began}), tokenizer, "", corpus)  # type: ignore[arg-type]


class _Words:
    """A tokenizer of no word."""

    def get_vocab(self) -> dict[str, int]:
        """Nothing."""
        return {}


class TestText:
    corpus = Corpus(windows=torch.arange(10).reshape(5, 2), vocab_size=10, seed=3)

    def test_is_drawn_whole_in_every_epoch(self) -> None:
        for start in (0, 5, 50):
            rows = self.corpus.draw(start, 5)
            assert sorted(rows.flatten().tolist()) == list(range(10))

    def test_is_drawn_by_position_alone(self) -> None:
        row_by_row = torch.cat([self.corpus.draw(position, 1) for position in range(3, 17)])
        assert torch.equal(self.corpus.draw(3, 14), row_by_row)
        assert self.corpus.epoch(4) == 0
        assert self.corpus.epoch(5) == 1

    def test_is_drawn_otherwise_in_another_epoch_and_with_another_seed(self) -> None:
        other = Corpus(windows=self.corpus.windows, vocab_size=10, seed=4)
        assert not torch.equal(self.corpus.draw(0, 5), self.corpus.draw(5, 5))
        assert not torch.equal(self.corpus.draw(0, 5), other.draw(0, 5))


class TestFreezing:
    def test_stops_the_named_parameters(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        freeze(model, (r"^0\.", "1.bias"))
        assert [n for n, p in model.named_parameters() if p.requires_grad] == ["1.weight"]

    def test_of_nothing_is_a_usage_error(self) -> None:
        with pytest.raises(UsageError, match="--freeze embed matches no parameter"):
            freeze(torch.nn.Linear(2, 2), ("weight", "embed"))

    def test_of_everything_is_a_usage_error(self) -> None:
        with pytest.raises(UsageError, match="leaves no parameter to train"):
            freeze(torch.nn.Linear(2, 2), ("weight", "bias"))


@pytest.mark.slow
class TestTheSidecar:
    def test_has_the_names_that_save_pretrained_writes(self, tmp_path: Path) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        from zexport.train.model import meta_twin

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
