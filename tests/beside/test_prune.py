"""Checkpoints without the optimizer's states: what they still give, and what is never touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import Run, deepspeed_names, edit, model_file, save, small_model
from tests.support.forked import typed
from tests.support.pruning import AS_STORED, state_of, tensors_of, trainers_run
from tests.torture.faults import Calls, killing, watched
from tests.torture.prunings import count_calls, killed_at
from zexport import (
    PruneReport,
    ReshardOptions,
    WatchOptions,
    consolidate,
    diff_states,
    open_checkpoint,
    plan_reshard,
    prune,
    verify_export,
    watch,
)
from zexport.beside import sightings
from zexport.beside.events import EventKind
from zexport.beside.pruner import words_of_prune
from zexport.checkpoint.optimizer_states import PRUNED
from zexport.compare.verdict import Cause
from zexport.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    OutputError,
    UnsupportedError,
    UsageError,
    VerificationError,
    ZexportError,
)
from zexport.findings import FindingKind
from zexport.inspect.inspect import Outcome, inspect_checkpoint
from zexport.options import ExportDType, ExportOptions
from zexport.run.manifest import read_manifest
from zexport.store.address import place

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = (
    *("z1_w2_bf16opt", "z1_w3_bf16_elastic", "z2_w2_bf16_lora", "z2_w3_bf16_odd", "z3_w2_bf16"),
    *("z3_w2_bf16_frozen", "moe_z2_w2_ep2_frozen", "tp2_z3_w4_bf16", "pp2_z1_w4_bf16_tied"),
)


@pytest.mark.parametrize("case", CASES)
def test_a_pruned_checkpoint_gives_the_same_weights_and_no_training_takes_it(
    case: str, tmp_path: Path
) -> None:
    old = trainers_run(tmp_path / "run", FIXTURES / case / "ckpt")
    tag_dir = next(path for path in old.iterdir() if path.is_dir() and path.name[0] == "g")
    before, newest = tensors_of(old, tmp_path / "scratch"), state_of(tmp_path / "run/checkpoint-4")
    consolidate(old, tmp_path / "out", AS_STORED)
    told = prune(old, tmp_path / "out", dry_run=True)
    assert (told.is_dry_run, told.pruned, old.exists()) == (True, None, True)
    assert told.tensors == len(before)
    done = prune(old, tmp_path / "out")
    pruned = tmp_path / "run" / "pruned-checkpoint-2"
    assert (done.pruned, done.nbytes_freed) == (pruned, told.nbytes_freed)
    assert not old.exists()
    assert 0 < done.nbytes_freed < done.nbytes_before
    assert tensors_of(pruned, tmp_path / "scratch") == before
    assert verify_export(tmp_path / "out", against=pruned).ok
    assert inspect_checkpoint(pruned).verdict.outcome is Outcome.EXPORTABLE
    assert state_of(tmp_path / "run" / "checkpoint-4") == newest
    assert not [*pruned.glob("rng_state*")]
    assert (pruned / "trainer_state.json").exists()
    note = json.loads((pruned / tag_dir.name / "zexport_pruned.json").read_text())
    assert (note["checkpoint"], note["tensors"]) == ("checkpoint-2", len(before))
    assert {*note["rewritten"]} == {*done.rewritten} != set()
    with pytest.raises(IncompleteCheckpointError, match="zexport prune"):
        plan_reshard(open_checkpoint(pruned), tmp_path / "on-3", ReshardOptions(world_size=3))
    assert prune(pruned, tmp_path / "out").nbytes_freed == 0
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == [
        "checkpoint-4",
        "pruned-checkpoint-2",
    ]


@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize(
    ("at", "named"),
    [("run", "checkpoint-2"), ("run/checkpoint-2", "."), ("run/checkpoint-2/global_step2", "..")],
)
def test_a_checkpoint_may_be_named_from_where_somebody_stands(
    at: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, delete: bool
) -> None:
    """In the run, or in the checkpoint itself, whose name goes under the working directory."""
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    monkeypatch.chdir(tmp_path / at)
    out = os.path.relpath(tmp_path / "out")
    prune(named, out, delete=delete)
    left = [] if delete else ["pruned-checkpoint-2"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-4", *left]
    if at == "run":
        with pytest.raises(NotACheckpointError) if delete else nullcontext():
            prune(named, out, delete=delete)


def test_a_removed_working_directory_is_told_by_watch_and_prune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the checkpoint's own, which somebody has removed: whole, or by another prune."""
    old = trainers_run(tmp_path / "run")
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(NotACheckpointError):
        prune("checkpoint-2", tmp_path / "out")
    with pytest.raises(OutputError, match="lies in a working directory that was removed"):
        prune(old, "out")
    for run, outs in ((tmp_path / "run", "outs"), ("run", tmp_path / "outs")):
        with pytest.raises(OutputError, match="lies in a working directory that was removed"):
            watch(run, outs)


def test_a_place_that_the_system_refuses_is_told_by_watch_and_prune(tmp_path: Path) -> None:
    """As one that nobody may read, or a bucket for which there are no credentials."""
    trainers_run(tmp_path / "run")
    refused = tmp_path / ("x" * 300)
    for delete in (False, True):
        with pytest.raises(ZexportError, match="name too long"):
            prune(refused, tmp_path / "out", delete=delete)
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        watch(refused, tmp_path / "outs")
    with pytest.raises(OutputError, match="cannot be written: File name too long"):
        watch(tmp_path / "run", refused)


def test_the_root_of_all_folders_is_no_checkpoint(tmp_path: Path) -> None:
    for delete in (False, True):
        with pytest.raises(NotACheckpointError):
            prune("/", tmp_path / "out", delete=delete)


def test_deepspeed_finds_no_optimizer_state_where_moments_were(tmp_path: Path) -> None:
    """It would go on with moments of zero, had the key its name; its converter needs none."""
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    prune(old, tmp_path / "out")
    folder = tmp_path / "run" / "pruned-checkpoint-2" / "global_step2"
    for path in folder.glob("*_optim_states.pt"):
        with deepspeed_names():
            state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        assert not {"optimizer_state_dict", "base_optimizer_state"} & state.keys()
        assert state[PRUNED]["state"] == {0: {"step": 2.0}, 1: {"step": 2.0}}
        assert state[PRUNED]["param_groups"]


def test_the_times_by_which_a_run_orders_its_checkpoints_stay(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run", steps=(2, 4, 6))
    for at, step in enumerate((2, 4, 6)):
        os.utime(tmp_path / "run" / f"checkpoint-{step}", (1000 + at, 1000 + at))
    consolidate(old, tmp_path / "out", AS_STORED)
    times = {path: path.stat().st_mtime_ns for path in old.rglob("*.pt")}
    prune(old, tmp_path / "out")
    pruned = tmp_path / "run" / "pruned-checkpoint-2"
    found = [pruned, *(tmp_path / "run" / f"checkpoint-{step}" for step in (4, 6))]
    assert [path.stat().st_mtime for path in found] == [1000, 1001, 1002]
    assert {pruned / p.relative_to(old): time for p, time in times.items()} == {
        path: path.stat().st_mtime_ns for path in pruned.rglob("*.pt")
    }


def test_all_of_a_checkpoint_goes_if_a_complete_fp32_export_stands_for_it(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    for name, options in (
        ("rounded", ExportOptions(dtype=ExportDType.BF16)),
        ("part", ExportOptions(only="lin")),
    ):
        consolidate(old, tmp_path / name, options)
        before = state_of(old)
        with pytest.raises(OutputError, match="cannot stand for the checkpoint"):
            prune(old, tmp_path / name, delete=True)
        assert state_of(old) == before
    consolidate(old, tmp_path / "out")
    done = prune(old, tmp_path / "out", delete=True)
    assert (done.is_deleted, done.nbytes_freed) == (True, done.nbytes_before)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-4"]
    with pytest.raises(NotACheckpointError, match="nothing is left to do") as caught:
        prune(old, tmp_path / "out", delete=True)
    assert "checkpoint-4" not in str(caught.value)  # which is another, and was not proved
    with pytest.raises(NotACheckpointError, match="does not exist") as caught:
        prune(old.with_name("checkpoint-3"), tmp_path / "out", delete=True)
    assert "nothing is left" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("notes.md", "eval/results.json", "hf/model.safetensors", "global_step2/notes.txt"),
        *("tokenizer.json", "model-ema.safetensors", "custom_checkpoint_0.pkl"),
        *("global_step2/zero/notes.md", "copy/deep/weights.pt"),
    ],
)
def test_what_no_training_wrote_and_no_export_has_is_named_and_stays(
    tmp_path: Path, name: str
) -> None:
    """A file of the user's, and a tokenizer that an export of the weights alone lacks."""
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    (old / name).parent.mkdir(exist_ok=True, parents=True)
    (old / name).write_text("{}")
    os.utime(old / name, (1000, 1000))
    before = state_of(old)
    for dry_run in (True, False):
        with pytest.raises(OutputError, match=f"no part of.*{name.split('/', maxsplit=1)[0]}"):
            prune(old, tmp_path / "out", delete=True, dry_run=dry_run)
    assert state_of(old) == before
    pruned = prune(old, tmp_path / "out").pruned
    assert pruned is not None
    assert (pruned / name).read_text() == "{}"
    with pytest.raises(OutputError, match="no part of"):
        prune(pruned, tmp_path / "out", delete=True)
    (pruned / name).unlink()
    assert prune(pruned, tmp_path / "out", delete=True).is_deleted


def test_what_frameworks_write_goes_with_the_checkpoint(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run", FIXTURES / "z2_w2_bf16_groups" / "ckpt")
    for name in (
        *("training_args.bin", "scheduler.pt", "zero_to_fp32.py", "sampler_1.bin", "scaler.pt"),
        *("model.safetensors.index.json", "random_states_0.pkl"),
    ):
        (old / name).write_text("{}")
    consolidate(old, tmp_path / "out", AS_STORED)
    assert prune(old, tmp_path / "out", delete=True).is_deleted
    assert not old.exists()


_BESIDE = ("model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize("name", _BESIDE)
def test_weights_beside_a_checkpoint_go_if_they_are_those_of_the_export(
    tmp_path: Path, name: str
) -> None:
    """A callback may have put an average of the run's weights there, under the usual name."""
    old = trainers_run(tmp_path / "run", FIXTURES / "z2_w2_bf16_groups" / "ckpt")
    consolidate(old, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    rounded = {key: one.bfloat16() for key, one in [*weights.items()][:-1]}
    rounded["placeholder"] = torch.empty(0)
    key = next(key for key, one in rounded.items() if one.ndim == 2)
    averaged = {**rounded, key: rounded[key] * 1.01}
    for held in (averaged, {**rounded, "ema": torch.ones(2)}, None, rounded):
        if held is None:
            (old / name).write_text("{}")
        elif name.endswith(".bin"):
            torch.save(held, old / name)
        else:
            save_file(held, old / name)
        os.utime(old / name, (1000, 1000))
        if held is not rounded:
            with pytest.raises(OutputError, match=f"no part of.*{name}"):
                prune(old, tmp_path / "out", delete=True)
    assert prune(old, tmp_path / "out", delete=True).is_deleted


def test_files_of_the_exports_names_go_if_it_says_the_same(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run", FIXTURES / "z2_w2_bf16_groups" / "ckpt")
    consolidate(old, tmp_path / "out")
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        whole = (old / name).read_bytes()
        content = json.loads(whole)
        (old / name).write_text(json.dumps({**content, "added_since": 1}))
        with pytest.raises(OutputError, match=f"no part of.*found {name}\\)"):
            prune(old, tmp_path / "out", delete=True)
        (old / name).write_bytes(whole)
    assert prune(old, tmp_path / "out", delete=True).is_deleted


def test_what_no_conversion_wrote_below_zero_stays(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run", FIXTURES / "uni_z2_w2_bf16_odd" / "ckpt")
    consolidate(old, tmp_path / "out", AS_STORED)
    (zero,) = old.glob("*/zero")
    weights = sorted(path for path in zero.iterdir() if path.is_dir())
    for folder in weights:
        torch.save(torch.ones(1), folder / "momentum_buffer.pt")
    for mine in (zero / "mine.pt", weights[0] / "mine.pt", weights[0] / "deep" / "fp32.pt"):
        mine.parent.mkdir(exist_ok=True)
        torch.save(torch.ones(1), mine)
        for path in zero.rglob("*.pt"):
            os.utime(path, (1000, 1000))
        with pytest.raises(OutputError, match=r"no part of.*global_step2_universal/"):
            prune(old, tmp_path / "out", delete=True)
        mine.unlink()
    assert prune(old, tmp_path / "out", delete=True).is_deleted


def test_an_adapter_stands_for_a_checkpoint_that_has_nothing_else(tmp_path: Path) -> None:
    """A Trainer leaves the base out; what was saved whole has it, and a merge no adapter."""
    checkpoint = FIXTURES / "z2_w2_bf16_lora" / "ckpt"
    old = trainers_run(tmp_path / "run", checkpoint)
    shutil.rmtree(old / "base")
    for name in ("config.json", "generation_config.json"):  # the base's, which peft leaves out
        (old / name).unlink()

    def leave_the_base_out(state: dict[str, Any]) -> None:
        state["module"] = {name: t for name, t in state["module"].items() if "lora_" in name}
        state["frozen_param_shapes"] = state["frozen_param_fragments"] = None

    whole = shutil.copytree(old, tmp_path / "whole" / old.name)
    shutil.copytree(old.with_name("checkpoint-4"), whole.with_name("checkpoint-4"))
    edit(old / "global_step2" / "mp_rank_00_model_states.pt", leave_the_base_out)
    for path in old.rglob("*"):
        os.utime(path, (1000, 1000))
    base = checkpoint / "base"
    for name, options, why in (
        ("merged", ExportOptions(base=base), r"worked into its base.*--adapter keep"),
        ("rounded", ExportOptions(dtype=ExportDType.BF16), r"rounded \(bf16\).*again as fp32"),
    ):
        consolidate(old, tmp_path / name, options)
        with pytest.raises(OutputError, match=why):
            prune(old, tmp_path / name, delete=True, base=options.base)
    consolidate(old, tmp_path / "out")
    assert prune(old, tmp_path / "out", delete=True).is_deleted
    consolidate(whole, tmp_path / "adapter")
    with pytest.raises(OutputError, match=r"not 21 weights of the base.*--layout memory"):
        prune(whole, tmp_path / "adapter", delete=True)
    consolidate(whole, tmp_path / "all", AS_STORED)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with pytest.raises(OutputError, match=f"no part of.*{name}"):
            prune(whole, tmp_path / "all", delete=True)
        shutil.move(whole / name, tmp_path / name)
    assert prune(whole, tmp_path / "all", delete=True).is_deleted


def test_a_removal_that_was_stopped_is_ended_by_the_next_call(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    count = count_calls(old, tmp_path / "out", delete=True)
    for at in range(1, count + 1, max(1, count // 4)):
        killed_at(old, tmp_path / "out", at, delete=True)


@pytest.mark.parametrize("delete", [False, True])
def test_a_pruning_that_was_stopped_at_its_note_is_ended_by_the_next_call(
    delete: bool, tmp_path: Path
) -> None:
    """The note that is not finished is newer than any file of the run."""
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    pruned = old.rename(old.with_name("pruned-checkpoint-2"))
    (pruned / "global_step2" / ".zexport_pruned.json.new").write_text("{")
    assert prune(old, tmp_path / "out", delete=delete).nbytes_freed > 0
    assert not [*pruned.rglob("*.new")]


def test_a_removal_that_was_stopped_at_its_empty_folders_is_ended(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    shutil.rmtree(old)
    (old.with_name("pruned-checkpoint-2") / "global_step2").mkdir(parents=True)
    with pytest.raises(NotACheckpointError, match="checkpoint-2: does not exist"):
        prune(old, tmp_path / "out", delete=True)
    assert [path.name for path in old.parent.iterdir()] == ["checkpoint-4"]


def test_what_a_kill_leaves_gives_the_same_weights_and_the_next_call_goes_on(
    tmp_path: Path,
) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    count = count_calls(old, tmp_path / "out")
    for at in range(1, count + 1, max(1, count // 7)):
        killed_at(old, tmp_path / "out", at)


def _best_of_the_run(old: Path, _: Path) -> None:
    state = old.with_name("checkpoint-4") / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 4, "best_model_checkpoint": "/far/checkpoint-2"}))


def _no_newer_one(old: Path, _: Path) -> None:
    shutil.rmtree(old.with_name("checkpoint-4"))


def _an_older_one_was_written_later(old: Path, _: Path) -> None:
    """A run that was restarted from an older step."""
    for path in (*old.rglob("*.pt"), old / "trainer_state.json"):
        os.utime(path, (4e9, 4e9))


def _still_written(old: Path, _: Path) -> None:
    (old / "trainer_state.json").unlink()


def _made_with_allow(old: Path, out: Path) -> None:
    shutil.rmtree(out)
    allowed = frozenset({FindingKind.STRAY_FILES})
    consolidate(old, out, ExportOptions(allow=allowed))


def _an_older_pruned_one(old: Path, _: Path) -> None:
    old.with_name("pruned-checkpoint-2").mkdir()


def _a_link(old: Path, _: Path) -> None:
    old.rename(old.with_name("elsewhere"))
    old.symlink_to(old.with_name("elsewhere"))


def _a_link_of_the_run(old: Path, _: Path) -> None:
    old.with_name("best").symlink_to(old.name)


def _a_link_into_it(old: Path, _: Path) -> None:
    old.with_name("best").symlink_to(old / "global_step2")


def _a_link_out_of_it(old: Path, out: Path) -> None:
    (old / "data").symlink_to(out)


def _a_mount_below_it(old: Path, _: Path) -> None:
    (old / "data").mkdir()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_a_link_of_the_run, "the link `best`"),
        (_a_link_into_it, "the link `best`"),
        (_a_link_out_of_it, "holds a link that leads elsewhere"),
        (_a_mount_below_it, "holds a mount point, `data`"),
        (_no_newer_one, "newest complete"),
        (_an_older_one_was_written_later, "newest complete"),
        (_best_of_the_run, "the best"),
        (_still_written, "may still be being written"),
        (_made_with_allow, "--allow"),
        (_an_older_pruned_one, "would be called `pruned-checkpoint-2`"),
        (_a_link, "a link"),
    ],
)
def test_what_a_training_may_go_on_from_is_left_as_it_is(
    tmp_path: Path,
    change: Callable[[Path, Path], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = trainers_run(tmp_path / "run")
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == old / "data")
    consolidate(old, tmp_path / "out")
    change(old, tmp_path / "out")
    before = state_of(tmp_path / "run")
    for delete in (False, True):
        with pytest.raises(OutputError, match=said) as caught:
            prune(old, tmp_path / "out", delete=delete)
        assert caught.value.exit_code == 6
    assert state_of(tmp_path / "run") == before


def test_what_lightning_calls_the_best_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That name is in no file of its own: the state of each ModelCheckpoint is with the ranks'."""
    monkeypatch.setattr(sightings, "_SETTLED_S", -1)
    run = tmp_path / "run"
    for step in (2, 4, 6):
        best = {"best_model_path": "/far/epoch=0-step=2.ckpt", "best_model_score": torch.ones(())}
        told = {"callbacks": {"ModelCheckpoint{}": best, "Timer": {"elapsed": 1.0}, "Odd": []}}
        state = Run(steps=step, client_state=told)
        save(small_model(), state, run / f"epoch=0-step={step}.ckpt", "checkpoint")
    for step in (2, 4):
        consolidate(run / f"epoch=0-step={step}.ckpt", tmp_path / f"{step}", AS_STORED)
    with pytest.raises(OutputError, match="the best"):
        prune(run / "epoch=0-step=2.ckpt", tmp_path / "2")
    assert prune(run / "epoch=0-step=4.ckpt", tmp_path / "4").nbytes_freed > 0


def test_what_changes_after_it_was_proved_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zexport.beside import prune as pruning

    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")

    def verify(*words: Any, **named: Any) -> Any:
        found = verify_export(*words, **named)
        (old / "notes.txt").write_text("written since")
        return found

    monkeypatch.setattr(pruning, "verify_export", verify)
    for delete, dry_run in ((False, False), (False, True), (True, False), (True, True)):
        with pytest.raises(CheckpointError, match="by its run meanwhile"):
            prune(old, tmp_path / "out", delete=delete, dry_run=dry_run)
        (old / "notes.txt").unlink()
    assert old.exists()


def test_a_save_that_was_cut_short_is_no_newer_checkpoint_however_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sightings, "STILL_S", -1)
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    newer = next((tmp_path / "run" / "checkpoint-4").glob("*/*_optim_states.pt"))
    newer.write_bytes(newer.read_bytes()[:500])
    before = state_of(tmp_path / "run")
    with pytest.raises(OutputError, match="newest complete"):
        prune(old, tmp_path / "out", delete=True)
    assert state_of(tmp_path / "run") == before


def test_the_folder_of_a_run_is_not_taken_for_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Trainer leaves its state, and a last tag, in the folder of the run as well."""
    monkeypatch.setattr(sightings, "_SETTLED_S", -1)
    runs = tmp_path / "runs"
    for name in ("1234567", "1234568"):
        save(small_model(), Run(steps=2), runs / name)
    trainers_run(runs / "seed1", steps=(2, 4))
    save(small_model(), Run(steps=2), runs / "seed1")
    (runs / "seed1" / "trainer_state.json").write_text("{}")
    for run in (runs / "1234567", runs / "seed1"):
        consolidate(run / "global_step2", tmp_path / f"{run.name}-out")
        with pytest.raises(OutputError):
            prune(run / "global_step2", tmp_path / f"{run.name}-out", delete=True)
        assert (run / "latest").exists()
        assert (run / "global_step2").exists()


def test_an_export_within_the_checkpoint_does_not_stand_for_it(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    shutil.move(tmp_path / "out", old / "hf")
    with pytest.raises(OutputError, match="lies in the checkpoint"):
        prune(old, old / "hf", delete=True)
    assert (old / "global_step2").exists()


def test_an_export_without_frozen_weights_stands_for_no_checkpoint(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", ExportOptions(exclude_frozen=True))
    with pytest.raises(OutputError, match="without frozen weights"):
        prune(old, tmp_path / "out")


@pytest.mark.parametrize("delete", [False, True])
def test_a_name_that_no_note_can_tell_is_refused_before_anything_is_touched(
    delete: bool, tmp_path: Path
) -> None:
    old = trainers_run(tmp_path / "run")
    out = tmp_path / os.fsdecode(b"model-\xff")
    consolidate(old, tmp_path / "out")
    (tmp_path / "out").rename(out)
    before = state_of(tmp_path / "run")
    with pytest.raises(OutputError, match="is no UTF-8"):
        prune(old, out, delete=delete)
    assert state_of(tmp_path / "run") == before


def test_an_address_is_left_as_it_is() -> None:
    with pytest.raises(OutputError, match="object storage"):
        prune("s3://bucket/run/checkpoint-2", "out")


def test_the_tag_that_latest_names_is_left_and_others_of_a_plain_run_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sightings, "_SETTLED_S", -1)
    run = tmp_path / "run"
    for step in (2, 4, 6):
        save(small_model(), Run(steps=step), run, f"global_step{step}")
    (run / "latest").write_text("global_step4")
    for step in (2, 4):
        consolidate(run / f"global_step{step}", tmp_path / f"{step}", AS_STORED)
    with pytest.raises(OutputError, match="`latest` names"):
        prune(run, tmp_path / "4")
    (run / "latest_universal").write_text("global_step2")
    with pytest.raises(OutputError, match="`latest` names"):
        prune(run, tmp_path / "2", tag="global_step2")
    (run / "latest_universal").unlink()
    before = tensors_of(run / "global_step2", tmp_path / "scratch")
    done = prune(run, tmp_path / "2", tag="global_step2")
    assert done.pruned == run / "pruned-global_step2"
    assert tensors_of(done.pruned, tmp_path / "scratch") == before
    assert verify_export(tmp_path / "2", against=run).ok
    assert open_checkpoint(run, tag="global_step2").location.tag == "pruned-global_step2"
    assert open_checkpoint(run, tag="newest").location.tag == "global_step6"


def test_parts_that_nodes_kept_are_pruned_as_one(tmp_path: Path) -> None:
    for node in range(2):
        old = trainers_run(tmp_path / f"node{node}")
        for path in old.glob(f"*/*zero_pp_rank_{1 - node}_*"):
            path.unlink()
    parts = [tmp_path / f"node{node}" / "checkpoint-2" for node in range(2)]
    consolidate(parts, tmp_path / "out", AS_STORED)
    done = prune(parts, tmp_path / "out")
    assert len(done.rewritten) == 2
    pruned = [part.with_name("pruned-checkpoint-2") for part in parts]
    assert not any(part.exists() for part in parts)
    assert verify_export(tmp_path / "out", against=pruned).ok


@pytest.mark.parametrize("delete", [False, True])
def test_parts_that_nodes_kept_go_together_whenever_a_removal_is_stopped(
    delete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node has a part under its old name where another lacks something."""
    monkeypatch.setattr(sightings, "_SETTLED_S", -1)
    nodes = [tmp_path / "all" / f"node{number}" for number in range(2)]
    for number, node in enumerate(nodes):
        for step in (2, 4):
            save(small_model(), Run(steps=step), node, f"global_step{step}")
        (node / "latest").unlink()
        for path in node.glob(f"*/*zero_pp_rank_{1 - number}_*"):
            path.unlink()
    parts = [node / "global_step2" for node in nodes]
    consolidate(parts, tmp_path / "out", AS_STORED if not delete else None)
    kept = shutil.copytree(tmp_path / "all", tmp_path / "kept")
    with watched(Calls()) as calls:
        prune(parts, tmp_path / "out", delete=delete)
    for at in range(calls.counts.total(), 0, -max(1, calls.counts.total() // 6)):
        shutil.rmtree(tmp_path / "all")
        shutil.copytree(kept, tmp_path / "all")
        child = os.fork()
        if child == 0:
            with watched(killing(at)):
                prune(parts, tmp_path / "out", delete=delete)
            os._exit(0)
        os.waitpid(child, 0)
        named = [part for part in parts if part.exists()]
        there = [*named, *(one for n in nodes for one in n.glob("pruned-global_step2"))]
        if named:
            shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
            consolidate(there, tmp_path / "scratch", AS_STORED)
            assert not open_checkpoint(there).pruned_files
        if there:
            prune(parts, tmp_path / "out", delete=delete)
        left = {path.name for node in nodes for path in node.iterdir() if path.is_dir()}
        assert left == {"global_step4"} | ({"pruned-global_step2"} if not delete else set())


@pytest.mark.parametrize("damage", ["a flipped bit", "another checkpoint's", "no manifest"])
def test_an_export_that_is_not_the_checkpoints_ends_with_7(tmp_path: Path, damage: str) -> None:
    old = trainers_run(tmp_path / "run")
    made_from = old.with_name("checkpoint-4") if damage.startswith("another") else old
    if made_from is not old:
        path = model_file(made_from / "global_step4", Run(), 0)
        edit(path, lambda state: state["module"]["table"].add_(1))
    consolidate(made_from, tmp_path / "out")
    if damage == "a flipped bit":
        file = tmp_path / "out" / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    elif damage == "no manifest":
        (tmp_path / "out" / "zexport_manifest.json").unlink()
    before = state_of(tmp_path / "run")
    for dry_run in (True, False):
        with pytest.raises(ZexportError) as caught:
            prune(old, tmp_path / "out", dry_run=dry_run)
        assert isinstance(caught.value, VerificationError | CheckpointError)
    assert state_of(tmp_path / "run") == before


def test_a_checkpoint_that_its_run_removes_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zexport.beside import hollowing

    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    whole = hollowing.move

    def as_the_run_removes(path: Path, name: Path) -> None:
        whole(path, name)
        for file in name.glob("*/mp_rank*"):
            file.unlink()
        for file in name.glob("*/zero_pp_rank_0*model*"):
            file.unlink()

    monkeypatch.setattr(hollowing, "move", as_the_run_removes)
    with pytest.raises(CheckpointError, match="by its run meanwhile"):
        prune(old, tmp_path / "out")
    assert old.exists()


def test_a_checkpoint_that_its_run_removes_while_it_is_staged_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written for it is a third of it, and nobody would come back for that."""
    from zexport.beside import hollowing

    run, outs = tmp_path / "run", tmp_path / "outs"
    old = trainers_run(run)
    assert len([*watch(run, outs, WatchOptions(once=True))]) == 2
    kept = shutil.copytree(old, tmp_path / "kept")
    fill = hollowing.fill

    def as_the_run_removes(*given: Any) -> None:
        fill(*given)
        shutil.rmtree(old)

    monkeypatch.setattr(hollowing, "fill", as_the_run_removes)
    with pytest.raises(CheckpointError, match="No such file"):
        prune(old, outs / "checkpoint-2")
    assert [path.name for path in run.iterdir()] == ["checkpoint-4"]
    shutil.move(kept, old)

    def and_is_killed(*given: Any) -> None:
        as_the_run_removes(*given)
        os._exit(9)

    monkeypatch.setattr(hollowing, "fill", and_is_killed)
    if (child := os.fork()) == 0:
        prune(old, outs / "checkpoint-2")
    os.waitpid(child, 0)
    assert (run / "pruned-checkpoint-2.partial").exists()
    options = WatchOptions(once=True, prune=True, keep_resumable=1)
    assert [*watch(run, outs, options)] == []
    assert [path.name for path in run.iterdir()] == ["checkpoint-4"]


def test_a_watch_tells_a_rotation_from_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zexport.beside import watch as beside

    run, outs = tmp_path / "run", tmp_path / "outs"
    old = trainers_run(run)
    assert len([*watch(run, outs, WatchOptions(once=True))]) == 2
    start = beside.start_prune

    def after_the_run(*given: Any) -> Any:
        shutil.rmtree(old)
        return start(*given)

    monkeypatch.setattr(beside, "start_prune", after_the_run)
    (one,) = watch(run, outs, WatchOptions(once=True, prune=True, keep_resumable=1))
    assert (one.event, one.code) == (EventKind.NOT_PRUNED, 0)
    assert one.why == "the run removed it meanwhile"


@pytest.mark.parametrize("case", ["z0_w2_bf16", "uni_z2_w2_bf16_odd"])
def test_states_that_lie_elsewhere_are_left_to_a_removal_of_all(case: str, tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run", FIXTURES / case / "ckpt")
    consolidate(old, tmp_path / "out", AS_STORED)
    with pytest.raises(UnsupportedError, match="--delete"):
        prune(old, tmp_path / "out")
    assert isinstance(prune(old, tmp_path / "out", delete=True), PruneReport)


def test_of_a_pruned_checkpoint_the_weights_alone_are_compared(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    prune(old, tmp_path / "out")
    pruned, other = tmp_path / "run" / "pruned-checkpoint-2", tmp_path / "run" / "checkpoint-4"
    report = diff_states(pruned, other)
    assert report.compared.endswith(
        "rank files; zexport prune has removed the optimizer's states of A"
    )
    assert {one.a_name for one in report.tensors} == {*read_manifest(tmp_path / "out").tensors}
    assert report.verdict.cause is Cause.NONE


def test_what_is_no_one_checkpoint_or_no_export_is_refused(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    manifest = tmp_path / "out" / "zexport_manifest.json"
    content = manifest.read_text()
    manifest.write_text(content.replace('"options"', '"settings"'))
    with pytest.raises(VerificationError, match="not the manifest of an export"):
        prune(old, tmp_path / "out")
    manifest.write_text(content)
    shutil.copytree(old / "global_step2", old / "global_step3")
    with pytest.raises(UnsupportedError, match="several tags"):
        prune(old, tmp_path / "out")


def test_nothing_goes_where_the_new_files_would_be_read_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zexport.beside import hollowing

    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    before = state_of(tmp_path / "run")
    monkeypatch.setattr(hollowing, "_told", lambda _: object())
    with pytest.raises(UnsupportedError, match="read otherwise"):
        prune(old, tmp_path / "out")
    assert state_of(tmp_path / "run") == before


def test_a_folder_that_is_being_removed_says_so(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    done = prune(old, tmp_path / "out")
    assert done.pruned is not None
    path = done.pruned / "global_step2" / "zexport_pruned.json"
    note = json.loads(path.read_text())
    path.write_text(json.dumps(note | {"is_deleted": True}))
    (problem,) = open_checkpoint(done.pruned).problems
    assert "was being removed" in str(problem)
    with pytest.raises(CheckpointError, match="another export"):
        prune(old, tmp_path / "elsewhere", delete=True)
    path.write_text("nothing")
    with pytest.raises(CheckpointError, match="not what zexport prune writes"):
        open_checkpoint(done.pruned)
    path.write_text(json.dumps(note | {"is_deleted": True}))
    shutil.move(tmp_path / "out", tmp_path / "gone")
    with pytest.raises(VerificationError, match="is not the export any more"):
        prune(old, tmp_path / "out", delete=True)
    assert done.pruned.exists()
    shutil.move(tmp_path / "gone", tmp_path / "out")
    (done.pruned / "notes.md").write_text("written since")
    with pytest.raises(OutputError, match=r"no part of.*notes"):
        prune(old, tmp_path / "out", delete=True)
    (done.pruned / "notes.md").unlink()
    other = done.pruned.with_name("pruned-checkpoint-3")
    shutil.copytree(done.pruned, other)
    own = other / "global_step2" / "zexport_pruned.json"
    own.write_text(json.dumps(note | {"checkpoint": "checkpoint-3"}))
    for more in (other, old.with_name("checkpoint-4")):  # the shell's star takes them all
        with pytest.raises(CheckpointError, match="another checkpoint than the one whose removal"):
            prune([old, more], tmp_path / "out", delete=True)
        assert not open_checkpoint(more).problems
    assert prune(old, tmp_path / "out", delete=True).is_deleted
    assert not done.pruned.exists()


def test_a_watch_prunes_what_it_has_exported_but_the_newest_and_the_best(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    old = trainers_run(run, steps=(2, 4, 6))
    before = {step: tensors_of(run / f"checkpoint-{step}", tmp_path / "s") for step in (2, 4)}
    state = run / "checkpoint-6" / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 6, "best_model_checkpoint": "run/checkpoint-4"}))
    newest = state_of(run / "checkpoint-6")
    options = WatchOptions(once=True, prune=True, keep_resumable=1)
    bf16 = ExportOptions(dtype=ExportDType.BF16)
    told = [(one.event, one.checkpoint) for one in watch(run, outs, options, bf16)]
    assert told == [
        (EventKind.EXPORTED, "checkpoint-2"),
        (EventKind.PRUNED, "checkpoint-2"),  # though exports wait: the disk may be filling
        *((EventKind.EXPORTED, f"checkpoint-{step}") for step in (4, 6)),
    ]
    assert not old.exists()
    state.write_text(json.dumps({"global_step": 6}))
    (run / "checkpoint-4").rename(run / "pruned-checkpoint-4")  # and was killed
    (one,) = watch(run, outs, options, bf16)
    assert (one.event, one.checkpoint) == (EventKind.PRUNED, "checkpoint-4")
    assert one.nbytes_freed > 0
    for step, tensors in before.items():
        assert tensors_of(run / f"pruned-checkpoint-{step}", tmp_path / "s") == tensors
    assert {n: b for n, (_, b) in state_of(run / "checkpoint-6").items() if "trainer" not in n} == {
        n: b for n, (_, b) in newest.items() if "trainer" not in n
    }
    assert [*watch(run, outs, options, bf16)] == []


def test_a_watch_that_had_nothing_to_prune_looks_again_after_the_next_export(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    trainers_run(run, steps=(2, 4, 6))
    state = {"global_step": 6, "best_model_checkpoint": "run/checkpoint-2"}
    (run / "checkpoint-6" / "trainer_state.json").write_text(json.dumps(state))
    options = WatchOptions(once=True, prune=True, keep_resumable=1)
    told = [(one.event, one.checkpoint) for one in watch(run, tmp_path / "outs", options)]
    assert told == [
        *((EventKind.EXPORTED, f"checkpoint-{step}") for step in (2, 4)),
        (EventKind.PRUNED, "checkpoint-4"),
        (EventKind.EXPORTED, "checkpoint-6"),
    ]


def test_an_export_that_is_removed_later_has_its_checkpoint_pruned_before(tmp_path: Path) -> None:
    """One that cannot be, as an older save of it was pruned, is told of."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    trainers_run(run, steps=(2, 4, 6))
    shutil.copytree(run / "checkpoint-2", run / "pruned-checkpoint-2")
    options = WatchOptions(once=True, keep=1, prune=True, keep_resumable=1)
    events = [*watch(run, outs, options)]
    told = {(one.event, one.checkpoint) for one in events if one.event is not EventKind.EXPORTED}
    assert told == {
        (EventKind.NOT_PRUNED, "checkpoint-2"),
        (EventKind.PRUNED, "checkpoint-4"),
        (EventKind.REMOVED, "checkpoint-4"),
    }
    assert any("would be called" in one.failure.message for one in events if one.failure)
    assert {one.name for one in outs.glob("c*")} == {"checkpoint-2", "checkpoint-6"}


def test_the_last_checkpoint_stays_though_the_end_of_the_training_was_saved_beside_it(
    tmp_path: Path,
) -> None:
    """A Trainer goes on from ``checkpoint-N`` alone; under ZeRO-3 it may save a tag at the end."""
    run = tmp_path / "run"
    trainers_run(run)
    save(small_model(), Run(steps=4, optimizer_step=4.0), run, "global_step4")
    (run / "latest").write_text("global_step4")
    consolidate(run / "checkpoint-4", tmp_path / "out", AS_STORED)
    with pytest.raises(OutputError, match="is the newest complete checkpoint"):
        prune(run / "checkpoint-4", tmp_path / "out")


def test_no_variable_of_the_environment_has_a_whole_checkpoint_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does a watch pass it on, nor is it enough by itself."""
    for name in ("PRUNE_DELETE", "PRUNE_DRY_RUN", "CONSOLIDATE_DRY_RUN"):
        monkeypatch.setenv(f"ZEXPORT_{name}", "1")
    run, outs = tmp_path / "run", tmp_path / "outs"
    old = trainers_run(run)
    before = tensors_of(old, tmp_path / "scratch")
    events = [*watch(run, outs, WatchOptions(once=True, prune=True, keep_resumable=1))]
    assert EventKind.PRUNED in [one.event for one in events]
    assert tensors_of(run / "pruned-checkpoint-2", tmp_path / "scratch") == before
    done = typed("prune", run / "checkpoint-4", "--export", outs / "checkpoint-4")
    assert done.returncode == UsageError.exit_code
    assert "--delete is asked for by ZEXPORT_PRUNE_DELETE alone" in " ".join(done.stderr.split())


def test_an_export_that_a_watch_cannot_prune_by_is_told_of_once(tmp_path: Path) -> None:
    """The manifest is the watch's own; a shard has lost a bit since."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    trainers_run(run)
    assert len([*watch(run, outs, WatchOptions(once=True))]) == 2
    shard = outs / "checkpoint-2" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    before = state_of(run)
    (one,) = watch(run, outs, WatchOptions(once=True, prune=True, keep_resumable=1))
    assert (one.event, one.code) == (EventKind.NOT_PRUNED, 7)
    assert state_of(run) == before


def test_a_watch_that_could_never_prune_says_so_at_once(tmp_path: Path) -> None:
    for options in (
        ExportOptions(exclude_frozen=True),
        ExportOptions(allow=frozenset({FindingKind.STRAY_FILES})),
    ):
        with pytest.raises(UsageError, match="stands for its checkpoint"):
            next(watch(tmp_path / "run", tmp_path / "outs", WatchOptions(prune=True), options))
    with pytest.raises(UsageError, match="object storage"):
        words_of_prune(place("s3://bucket/run"), ExportOptions())
