"""Errors that no other test causes in its own process: one cause each, and what is said of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zexport
from tests.support.checkpoints import Run, edit, save, small_model
from tests.support.expert_checkpoints import MoeRun, rewrite, save_moe
from tests.support.model_parallel import cells, joined_ranks, joined_stages, save_grid
from zexport.checkpoint.contents import Role, StoredTensor
from zexport.checkpoint.layouts.tensor_parallel import join_tensor_ranks
from zexport.checkpoint.opening import open_checkpoint
from zexport.checkpoint.ranks import Save
from zexport.cli import main
from zexport.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    MissingExtraError,
    OutputError,
    TrainingError,
    UnsupportedError,
    UsageError,
    ZexportError,
)
from zexport.formats.inert import StorageRef
from zexport.formats.torch_file import LegacyRecords
from zexport.model import custom_code
from zexport.model.fit import ModelNames, NamesUnknown, best_fit
from zexport.model.hub_layout import Box, HubLayout, HubTensor
from zexport.options import ExportOptions
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Extent
from zexport.store.contents import same_bytes
from zexport.train import launch
from zexport.train.options import TrainOptions, TrainSummary, resumed
from zexport.weights.autoep_experts import fuse_experts
from zexport.weights.hub_names import settle_names
from zexport.weights.hub_tensors import lay_out
from zexport.weights.named import Weights

FIXTURES = Path(__file__).parents[2] / "fixtures"
TAG = "global_step2"


def copied(case: str, tmp_path: Path) -> Path:
    """The tag folder of a copy of a fixture's checkpoint."""
    return shutil.copytree(FIXTURES / case / "ckpt", tmp_path / "run") / TAG


def again(path: Path, name: str) -> None:
    """The same content under another name, written as torch writes a file of that name."""
    rewrite(Path(shutil.copy(path, path.with_name(name))), lambda _: None)


def problem(tag_dir: Path, words: str, kind: type[ZexportError]) -> None:
    """The one that stands in the way of an export says this."""
    problems = open_checkpoint(tag_dir).problems
    assert any(words in str(one) and isinstance(one, kind) for one in problems), problems


# --- checkpoints ---


def test_experts_under_tensor_parallelism_are_refused(tmp_path: Path) -> None:
    tag = copied("moe_z2_w2_ep2_frozen", tmp_path)
    again(tag / "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt")
    for path in tag.glob("mp_rank_*"):
        degrees = {"pp_degree": 1, "tp_degree": 2}
        edit(path, lambda state, to=degrees: state.update(checkpoint_parallel_dimensions=to))
    problem(tag, "combines experts with tensor", UnsupportedError)


def test_files_of_more_tensor_ranks_than_are_recorded_are_refused(tmp_path: Path) -> None:
    tag = copied("tp2_z1_w2_bf16_tied", tmp_path)
    for name in ("mp_rank_{}_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_{}_optim_states.pt"):
        again(tag / name.format("01"), name.format("02"))
    problem(tag, "more than it records", DamagedCheckpointError)


def test_impossible_degrees_are_refused(tmp_path: Path) -> None:
    tag = copied("tp2_z1_w2_bf16_tied", tmp_path)
    degrees = {"pp_degree": 1, "tp_degree": 0}
    for path in tag.glob("mp_rank_*"):
        edit(path, lambda state: state.update(checkpoint_parallel_dimensions=degrees))
    problem(tag, "impossible degrees", DamagedCheckpointError)


def test_two_files_of_one_expert_are_refused(tmp_path: Path) -> None:
    tag = copied("moe_z2_w2_ep2_frozen", tmp_path)
    name = "layer_0_expert_{}_mp_rank_00_model_states.pt"
    again(tag / name.format("1"), name.format("01"))
    problem(tag, "second file of the same expert", DamagedCheckpointError)


def test_unequal_shares_of_fused_experts_are_refused(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(autoep=True), tmp_path)
    shares = [{"rank": 0, "experts": [0, 1, 2]}, {"rank": 1, "experts": [3]}]

    def claim(state: dict[str, Any]) -> None:
        for layer in state["ds_autoep_layers"]:
            layer["expert_placement"]["ranks"] = shares

    for path in folder.glob("*mp_rank_00_model_states.pt"):
        if "ds_autoep_layers" in torch.load(path, weights_only=False):
            rewrite(path, claim)
    problem(folder, "unequal numbers of the experts", UnsupportedError)


def test_fused_weights_that_do_not_fit_each_other_are_refused() -> None:
    shapes = {"w1": (2, 3, 4), "w2": (2, 4, 3), "w3": (2, 5, 4)}
    names = {f"mlp.experts.{name}": shape for name, shape in shapes.items()}
    tensors = {
        name: StoredTensor(name, shape, DType.F32, Role.TRAINABLE, None)
        for name, shape in names.items()
    }
    with pytest.raises(DamagedCheckpointError, match="do not fit each other"):
        fuse_experts(Weights(tensors, {}))


def test_a_copy_that_vanishes_while_it_is_compared_is_told(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be read"):
        same_bytes(tmp_path / "one", tmp_path / "gone")


def test_stages_and_tensor_ranks_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    shards = {place: {f"{place[0]}.w": torch.ones(2)} for place in ((0, 0), (0, 1), (1, 0))}
    buffers: dict[tuple[int, int], dict[str, torch.Tensor]] = {place: {} for place in shards}
    with pytest.raises(UnsupportedError, match="does not say how its ranks form"):
        joined_stages(save_grid(tmp_path / "tag", shards, buffers, None, 2))


def test_a_weight_of_a_stage_without_its_layer_file_has_no_shape(tmp_path: Path) -> None:
    tag = copied("pp2_z0_w4_bf16_tied", tmp_path)
    edit(tag / "layer_01-model_states.pt", lambda state: state.pop("fc.weight"))
    problem(tag, "does not record the shape", UnsupportedError)


def test_a_buffer_that_differs_between_tensor_ranks_is_refused(tmp_path: Path) -> None:
    tag = copied("tp2_z1_w2_bf16_tied", tmp_path)

    def add(state: dict[str, Any], numel: int) -> None:
        state["module"]["extra"] = torch.ones(numel)
        state["buffer_names"] = [*state["buffer_names"], "extra"]

    for numel, path in enumerate(sorted(tag.glob("mp_rank_*")), start=1):
        edit(path, lambda state, numel=numel: add(state, numel))
    problem(tag, "in different shapes on different tensor ranks", UnsupportedError)


def test_tensor_ranks_without_any_model_states_are_refused(tmp_path: Path) -> None:
    tag = copied("tp2_z1_w2_bf16_tied", tmp_path)
    for path in tag.glob("mp_rank_*"):
        path.unlink()
    with pytest.raises(DamagedCheckpointError, match="no model states that can be read"):
        join_tensor_ranks(Save(tag, (), cells(tag)), {})


def test_a_pipeline_without_layer_files_is_incomplete(tmp_path: Path) -> None:
    tag = copied("tp2_z1_w2_bf16_tied", tmp_path)
    degrees = {"pp_degree": 2, "tp_degree": 1}
    for path in tag.glob("mp_rank_*"):
        edit(path, lambda state: state.update(checkpoint_parallel_dimensions=degrees))
    with pytest.raises(IncompleteCheckpointError, match="lacks the layer files"):
        joined_ranks(tag)


def test_a_tag_that_no_checkpoint_of_a_run_has_is_told_with_those_there_are(tmp_path: Path) -> None:
    for step in (1, 2):
        save(small_model(), Run(stage=3), tmp_path / "run" / f"checkpoint-{step}")
    with pytest.raises(CheckpointError, match="no tag or checkpoint 'checkpoint-3'"):
        open_checkpoint(tmp_path / "run", tag="checkpoint-3")


def test_the_newest_of_several_folders_is_not_guessed(zero3: Path) -> None:
    with pytest.raises(UsageError, match="of several folders none tells"):
        open_checkpoint([zero3, zero3], tag="newest")


def test_an_impossible_number_of_ranks_is_damage(zero3: Path) -> None:
    for path in (zero3 / TAG).glob("*_optim_states.pt"):
        edit(path, lambda state: state["optimizer_state_dict"].update(partition_count=1 << 40))
    problem(zero3, "impossible number of ranks", DamagedCheckpointError)


def test_a_storage_that_an_old_file_lacks_is_damage(tmp_path: Path) -> None:
    records = LegacyRecords(tmp_path / "old.pt", {})
    with pytest.raises(DamagedCheckpointError, match="is not in the file"):
        records.place(StorageRef(DType.F32, "94001", "cpu", 4))


def test_masters_without_names_that_are_not_the_weights_they_are_like_are_refused(
    tmp_path: Path,
) -> None:
    tag = copied("z0_w2_bf16", tmp_path)

    def change(state: dict[str, Any]) -> None:
        weight = state["module"]["lm_head.weight"].clone()
        weight.view(-1)[1000] += 0.5
        state["module"]["lm_head.weight"] = weight

    rewrite(tag / "mp_rank_00_model_states.pt", change)
    with pytest.raises(DamagedCheckpointError, match="does not belong to the module's weight"):
        zexport.consolidate(tag, tmp_path / "out")


# --- the names of the model's files ---


def tensor(name: str, shape: tuple[int, ...], dtype: DType = DType.F32) -> StoredTensor:
    source = Extent(Path("rank"), 0, prod(shape) * dtype.itemsize)
    return StoredTensor(name, shape, dtype, Role.TRAINABLE, source)


def half(source: str, start: int, offset: int = 0) -> Box:
    """Two of the four rows of a hub tensor, as ``source`` holds them."""
    return Box(source, offset, (2, 1), (start, 0), (2, 2))


FUSED = HubLayout("", {"up_down": HubTensor((4, 2), (half("up", 0), half("down", 2)))})
SHAPES = {"up": (2, 2), "down": (2, 2)}


@pytest.mark.parametrize(
    ("tensors", "layout", "words"),
    [
        ([tensor("up", (2, 2))], FUSED, "not all of which are exported"),
        ([tensor("up", (2, 2)), tensor("down", (4, 2))], FUSED, "does not have the shape"),
        (
            [tensor("up", (2, 2)), tensor("down", (2, 2), DType.BF16)],
            FUSED,
            "stored in several types",
        ),
        (
            [tensor("up", (2, 2)), tensor("down", (2, 2)), tensor("up_down", (1,))],
            FUSED,
            "would be written as 'up_down'",
        ),
        (
            [tensor("up", (2, 2)), tensor("down", (2, 2))],
            HubLayout("", {"up_down": HubTensor((4, 2), (half("up", 0), half("down", 2, 9)))}),
            "reaches outside",
        ),
    ],
    ids=["missing", "shape", "types", "clash", "layout"],
)
def test_parts_that_do_not_make_the_model_s_tensor_are_refused(
    tensors: list[StoredTensor], layout: HubLayout, words: str
) -> None:
    with pytest.raises(ZexportError, match=words):
        lay_out({one.name: one for one in tensors}, layout, SHAPES)


def test_a_model_whose_names_are_not_known_is_refused(tmp_path: Path) -> None:
    stored = Weights({"w": tensor("w", (2,))}, {}, ())
    names = ModelNames(
        architecture="Odd",
        shapes={"w": (2,)},
        buffers=frozenset(),
        tied={},
        layouts=(),
        provenance="a test",
        refused="a conversion that adds noise",
    )
    with pytest.raises(UnsupportedError, match="cannot be told from its conversions"):
        settle_names(stored, best_fit(names, stored.shapes), {}, ExportOptions(), tmp_path)
    unknown = NamesUnknown("config.json names a model without a head", is_contradiction=True)
    with pytest.raises(UnsupportedError, match="without a head"):
        settle_names(stored, unknown, {}, ExportOptions(), tmp_path)


def test_a_tokenizer_that_vanishes_is_told(tmp_path: Path) -> None:
    root = shutil.copytree(FIXTURES / "z3_w2_bf16" / "ckpt", tmp_path / "run")
    (root / "tokenizer.json").write_text("{}")
    plan = zexport.plan_export(zexport.open_checkpoint(root), tmp_path / "out")
    (root / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        zexport.run_export(plan)


# --- code beside a config ---


def test_a_module_that_is_no_module_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modeling.py").write_text("from . import one, two\n")
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setattr(custom_code, "_FILES_MAX", 2)
    with pytest.raises(DamagedCheckpointError, match="too many modules"):
        custom_code.code_files(tmp_path, {"auto_map": "modeling.Model"})
    monkeypatch.setattr(custom_code, "_SOURCE_NBYTES_MAX", 4)
    with pytest.raises(DamagedCheckpointError, match="too large"):
        custom_code.code_files(tmp_path, {"auto_map": "modeling.Model"})


def test_a_module_that_the_disk_does_not_give_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modeling.py").write_text("")

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(custom_code, "read_regular", fail)
    with pytest.raises(DamagedCheckpointError, match="Input/output error"):
        custom_code.code_files(tmp_path, {"auto_map": "modeling.Model"})


# --- the command line ---


def test_a_usage_error_of_the_command_line_is_an_object_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zexport", "inspect", "--json"])
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        main.main()
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "usage"


# --- training ---


def options(tmp_path: Path, **chosen: Any) -> TrainOptions:
    return TrainOptions(out=tmp_path / "run", **chosen)


def quiet(_: str) -> None:
    """Progress that nobody follows."""


def test_a_folder_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint to resume"):
        resumed(options(tmp_path, resume=True), ())


def test_a_package_that_training_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="deepspeed"):
        launch.train(options(tmp_path), progress=quiet)


def test_training_needs_a_transformers_that_knows_how_files_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    monkeypatch.setattr(launch, "lack_for_names", lambda: "transformers 4.57.6")
    with pytest.raises(MissingExtraError, match="found transformers 4"):
        launch.train(options(tmp_path), progress=quiet)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [({"freeze": ("(",)}, "no regular expression"), ({"hidden_size": 12}, "a multiple of 8")],
)
def test_options_that_cannot_be_meant_are_refused(
    chosen: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        launch.train(options(tmp_path, **chosen), progress=quiet)


def test_a_launcher_of_other_ranks_than_the_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="another number of ranks"):
        launch.train(options(tmp_path), {"world_size"}, progress=quiet)


def test_a_last_save_that_failed_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = TrainSummary(
        out=tmp_path,
        tag="global_step2",
        steps=4,
        first_loss=1.0,
        last_loss=1.0,
        checkpoints=("global_step2",),
        world_size=2,
        stage=3,
        save_error="No space left on device",
    )
    monkeypatch.setattr(launch, "_run_launched", lambda *_: summary)
    with pytest.raises(OutputError, match="The last good one is global_step2"):
        launch.train(options(tmp_path), progress=quiet)


def test_a_first_step_that_does_not_come_is_a_failure(tmp_path: Path) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as sleeper,
        pytest.raises(TrainingError, match="first step was not done after 1 seconds"),
    ):
        launch._relay(sleeper, tmp_path, 1, quiet)


def test_a_rank_that_fails_says_how_and_where_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from zexport.train.worker import run_worker

    def fail(*_: object) -> None:
        raise ValueError("the model has no head")

    monkeypatch.setitem(
        sys.modules,
        "zexport.train.rank_run",
        SimpleNamespace(run_rank=fail),  # type: ignore[arg-type]
    )
    monkeypatch.setenv("RANK", "1")
    with capfd.disabled(), pytest.raises(TrainingError, match="ValueError: the model has no head"):
        run_worker(options(tmp_path), tmp_path / "rank1.log", quiet)
    assert "Traceback" in (tmp_path / "rank1.log").read_text()


def test_a_folder_that_cannot_be_made_or_written_is_an_output_error(tmp_path: Path) -> None:
    from zexport.train.rank_run import claim_folder, describe_run

    (tmp_path / "file").write_text("")
    below = TrainOptions(out=tmp_path / "file" / "run")
    model: Any = SimpleNamespace(config=SimpleNamespace(save_pretrained=_no_space))
    with pytest.raises(OutputError, match="cannot be made"):
        claim_folder(below, model, torch.float32)
    with pytest.raises(OutputError, match="cannot be written"):
        describe_run(below, model, model, "{}")


def _no_space(_: Path) -> None:
    raise OSError(28, "No space left on device")


class Engine:
    """As much of DeepSpeed's engine as is asked where a run stood."""

    def __init__(self, client_state: dict[str, int]) -> None:
        self._client_state = client_state

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str, dict[str, int]]:
        return f"{folder}/{tag}", self._client_state


@pytest.mark.parametrize(
    ("client_state", "kind"),
    [({}, CheckpointError), ({"step": 20, "data_position": 0}, UsageError)],
    ids=["foreign", "done"],
)
def test_a_run_that_cannot_go_on_says_why(
    client_state: dict[str, int], kind: type[ZexportError], tmp_path: Path
) -> None:
    from zexport.train.loop import resumed_place

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("global_step2")
    engine: Any = Engine(client_state)
    ranks: Any = None
    with pytest.raises(kind):
        resumed_place(engine, ranks, options(tmp_path, steps=20))


def test_a_model_that_cannot_be_trained_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from zexport.train.model import make_model

    def fail(*_: object, **__: object) -> None:
        raise OSError("no file named config.json.\nSee the manual.")

    chosen = options(tmp_path, model=tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
        with pytest.raises(UsageError, match="holds no causal language model"):
            make_model(chosen, 10)
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=5,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="the tokenizer does not fit the model"):
        make_model(chosen, 10)


def test_texts_that_cannot_be_trained_on_are_refused(tmp_path: Path) -> None:
    from zexport.train.text import make_corpus, make_tokenizer, read_text

    (tmp_path / "latin").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="UTF-8"):
        read_text(tmp_path / "latin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no tokenizer"):
        make_tokenizer(options(tmp_path, tokenizer=tmp_path / "empty"), "text")
    chosen = options(tmp_path, seq_len=64)
    with pytest.raises(UsageError, match="shorter than one sequence"):
        make_corpus(make_tokenizer(chosen, "a few words"), "a few words", chosen)


def test_another_text_or_tokenizer_than_a_run_noted_is_refused(tmp_path: Path) -> None:
    from zexport.train.text import check_same, make_corpus, make_tokenizer

    chosen, text = options(tmp_path, seq_len=4), "a few words more than one sequence " * 4
    tokenizer = make_tokenizer(chosen, text)
    corpus = make_corpus(tokenizer, text, chosen)
    noted = replace(chosen, digests=check_same(chosen, tokenizer, text, corpus))
    assert check_same(noted, make_tokenizer(chosen, text), text, corpus) == noted.digests
    with pytest.raises(UsageError, match="the text is another than the run began with"):
        check_same(noted, tokenizer, text.upper(), corpus)
    with pytest.raises(UsageError, match="the tokenizer is another than the run began with"):
        check_same(noted, make_tokenizer(chosen, "xyzzy " * 40), text, corpus)
