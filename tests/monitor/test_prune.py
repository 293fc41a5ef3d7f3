"""Checkpoints without the optimizer's states: what they still give, and what is never touched."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Run, deepspeed_names, edit, model_file, save, small_model
from tests.support.forked import typed
from tests.support.pruning import AS_STORED, state_of, tensors_of, trainers_run
from tests.torture.faults import Calls, killing, watched
from tests.torture.prunings import count_calls, killed_at
from zexport import (
    Cause,
    CheckpointError,
    ExportOptions,
    FindingKind,
    IncompleteCheckpointError,
    OutputError,
    ReshardOptions,
    UnsupportedError,
    UsageError,
    VerificationError,
    ZexportError,
    consolidate,
    diff_states,
    open_checkpoint,
    plan_reshard,
    prune,
    verify_export,
)
from zexport.checkpoint.zero.records import PRUNED
from zexport.export.manifest import read_manifest
from zexport.inspect.inspect import Outcome, inspect_checkpoint
from zexport.monitor import sightings

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


@pytest.mark.parametrize(
    ("at", "named"),
    [("run", "checkpoint-2"), ("run/checkpoint-2", "."), ("run/checkpoint-2/global_step2", "..")],
)
def test_a_checkpoint_may_be_named_from_where_somebody_stands(
    at: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run, or in the checkpoint itself, whose name goes under the working directory."""
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    monkeypatch.chdir(tmp_path / at)
    out = os.path.relpath(tmp_path / "out")
    prune(named, out)
    left = ["checkpoint-4", "pruned-checkpoint-2"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == left
    if at == "run":
        prune(named, out)


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


def test_a_pruning_that_was_stopped_at_its_note_is_ended_by_the_next_call(tmp_path: Path) -> None:
    """The note that is not finished is newer than any file of the run."""
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    pruned = old.rename(old.with_name("pruned-checkpoint-2"))
    (pruned / "global_step2" / ".zexport_pruned.json.new").write_text("{")
    assert prune(old, tmp_path / "out").nbytes_freed > 0
    assert not [*pruned.rglob("*.new")]
    (pruned / "global_step2" / "zexport_pruned.json").write_text("nothing")
    with pytest.raises(CheckpointError, match="not a note of zexport prune"):
        prune(old, tmp_path / "out")


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


def _a_newer_one_with_a_flipped_bit(old: Path, _: Path) -> None:
    """``torch.load`` reads it without a word: it checks no CRC-32."""
    newer = next(old.with_name("checkpoint-4").glob("*/*_optim_states.pt"))
    with zipfile.ZipFile(newer) as content:
        tensors = [one for one in content.infolist() if "/data/" in one.filename]
    largest = max(tensors, key=lambda one: one.file_size)
    data = bytearray(newer.read_bytes())
    data[largest.header_offset + largest.file_size] ^= 1
    newer.write_bytes(data)
    os.utime(newer, (1000, 1000))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_a_link_of_the_run, "the link `best`"),
        (_a_link_into_it, "the link `best`"),
        (_no_newer_one, "newest complete"),
        (_an_older_one_was_written_later, "newest complete"),
        (_best_of_the_run, "the best"),
        (_a_newer_one_with_a_flipped_bit, "resume from checkpoint-4"),
    ],
)
def test_a_checkpoint_that_a_training_would_resume_from_is_pruned_by_even_newest_only(
    tmp_path: Path, change: Callable[[Path, Path], None], said: str
) -> None:
    old, out = trainers_run(tmp_path / "run"), tmp_path / "out"
    consolidate(old, out)
    change(old, out)
    before = state_of(tmp_path / "run")
    for words in ((), ("--dry-run",)):
        refused = typed("prune", old, "--export", out, *words)
        assert refused.returncode == UsageError.exit_code
        assert said in " ".join(refused.stderr.split())
        assert "--even-newest" in refused.stderr
    assert state_of(tmp_path / "run") == before
    assert typed("prune", old, "--export", out, "--even-newest").returncode == 0
    assert [path.name for path in old.parent.glob("*-2")] == ["pruned-checkpoint-2"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_a_link_out_of_it, "holds a link that leads elsewhere"),
        (_a_mount_below_it, "holds a mount point, `data`"),
        (_still_written, "may still be being written"),
        (_made_with_allow, "--allow"),
        (_an_older_pruned_one, "would be called `pruned-checkpoint-2`"),
        (_a_link, "a link"),
    ],
)
def test_a_folder_that_cannot_be_pruned_safely_is_left_as_it_is(
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
    for even_newest in (False, True):
        with pytest.raises(OutputError, match=said):
            prune(old, tmp_path / "out", even_newest=even_newest)
    assert state_of(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("names", "is_model"),
    [
        (("agent0-step2", "agent1-step4"), False),
        (("agent0-step2", "agent0-step4"), True),
        (("seed1", "seed2"), False),
        (("iter1", "iter2"), False),
        (("agent2-step2", "agent4-step4"), False),
    ],
)
def test_a_number_is_a_step_only_if_the_files_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], is_model: bool
) -> None:
    """Any other number is part of the model's name, and each model has a newest checkpoint."""
    monkeypatch.setattr(sightings, "_SETTLED_S", -1)
    run = tmp_path / "run"
    for step, name in zip((2, 4), names, strict=True):
        if name.startswith("iter"):
            save(small_model(), Run(steps=step), run / name, "global_step5")
        else:
            save(small_model(), Run(steps=step), run, name)
    (run / "latest").unlink(missing_ok=True)
    consolidate(run / names[0], tmp_path / "out", AS_STORED)
    with nullcontext() if is_model else pytest.raises(UsageError, match="of its model"):
        prune(run / names[0], tmp_path / "out")


def test_an_export_of_another_step_or_tag_is_refused_though_its_weights_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sightings, "_SETTLED_S", -1)
    run = tmp_path / "run"
    for tag, step in (("global_step2", 2), ("copy2", 2), ("global_step4", 4)):
        save(small_model(), Run(steps=step), run, tag)
    save(small_model(), Run(steps=3), tmp_path / "other", "global_step2")
    for at, made_from in enumerate((run / "copy2", tmp_path / "other" / "global_step2")):
        consolidate(made_from, tmp_path / f"{at}", AS_STORED)
        with pytest.raises(VerificationError, match="made from another checkpoint"):
            prune(run / "global_step2", tmp_path / f"{at}")
    consolidate(run / "global_step2", tmp_path / "out", AS_STORED)
    assert prune(run / "global_step2", tmp_path / "out").pruned is not None


def test_a_tag_is_not_pruned_if_latest_names_one_that_no_training_resumes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sightings, "_SETTLED_S", -1)
    run = tmp_path / "run"
    for step in (2, 4, 6):
        save(small_model(), Run(steps=step), run, f"global_step{step}")
    next((run / "global_step6").glob("*_optim_states.pt")).unlink()
    consolidate(run / "global_step2", tmp_path / "out", AS_STORED)
    with pytest.raises(UsageError, match="`latest` names global_step6, from which no training"):
        prune(run / "global_step2", tmp_path / "out")


def test_what_lightning_calls_the_best_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That name is in no file of its own: the state of each ModelCheckpoint is with the ranks'."""
    monkeypatch.setattr(sightings, "_SETTLED_S", -1)
    run = tmp_path / "run"
    for step in (2, 4, 6):
        best = {"best_model_path": "/far/epoch=2-step=2.ckpt", "best_model_score": torch.ones(())}
        told = {"callbacks": {"ModelCheckpoint{}": best, "Timer": {"elapsed": 1.0}, "Odd": []}}
        state = Run(steps=step, client_state={**told, "epoch": step, "global_step": step})
        save(small_model(), state, run / f"epoch={step}-step={step}.ckpt", "checkpoint")
        name = f"epoch={step}-step={step}.ckpt"
        consolidate(run / name, tmp_path / f"{step}", AS_STORED)
    for step, said in ((2, "the best"), (6, "newest complete")):
        with pytest.raises(UsageError, match=said):
            prune(run / f"epoch={step}-step={step}.ckpt", tmp_path / f"{step}")
    assert prune(run / "epoch=4-step=4.ckpt", tmp_path / "4").nbytes_freed > 0


def test_what_changes_after_it_was_proved_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zexport.monitor import prune as pruning

    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")

    def verify(*words: Any, **named: Any) -> Any:
        found = verify_export(*words, **named)
        (old / "notes.txt").write_text("written since")
        return found

    monkeypatch.setattr(pruning, "verify_export", verify)
    for dry_run in (False, True):
        with pytest.raises(CheckpointError, match="by its run meanwhile"):
            prune(old, tmp_path / "out", dry_run=dry_run)
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
    with pytest.raises(UsageError, match="newest complete"):
        prune(old, tmp_path / "out")
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
        with pytest.raises(UsageError):
            prune(run / "global_step2", tmp_path / f"{run.name}-out")
        assert (run / "latest").exists()
        assert (run / "global_step2").exists()


def test_an_export_within_the_checkpoint_does_not_stand_for_it(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    shutil.move(tmp_path / "out", old / "hf")
    with pytest.raises(OutputError, match="lies in the checkpoint"):
        prune(old, old / "hf")
    assert (old / "global_step2").exists()


def test_an_export_without_frozen_weights_stands_for_no_checkpoint(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", ExportOptions(exclude_frozen=True))
    with pytest.raises(OutputError, match="without frozen weights"):
        prune(old, tmp_path / "out")


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
    with pytest.raises(UsageError, match="`latest` names it"):
        prune(run, tmp_path / "4")
    (run / "latest_universal").write_text("global_step2")
    with pytest.raises(UsageError, match="`latest` names it"):
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


def test_parts_that_nodes_kept_go_together_whenever_a_pruning_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    consolidate(parts, tmp_path / "out", AS_STORED)
    kept = shutil.copytree(tmp_path / "all", tmp_path / "kept")
    with watched(Calls()) as calls:
        prune(parts, tmp_path / "out")
    for at in range(calls.counts.total(), 0, -max(1, calls.counts.total() // 6)):
        shutil.rmtree(tmp_path / "all")
        shutil.copytree(kept, tmp_path / "all")
        child = os.fork()
        if child == 0:
            with watched(killing(at)):
                prune(parts, tmp_path / "out")
            os._exit(0)
        os.waitpid(child, 0)
        named = [part for part in parts if part.exists()]
        there = [*named, *(one for n in nodes for one in n.glob("pruned-global_step2"))]
        if named:
            shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
            consolidate(there, tmp_path / "scratch", AS_STORED)
            assert not open_checkpoint(there).pruned_files
        prune(parts, tmp_path / "out")
        left = {path.name for node in nodes for path in node.iterdir() if path.is_dir()}
        assert left == {"global_step4", "pruned-global_step2"}


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
    from zexport.monitor import hollowing

    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    whole = hollowing.rename_folder

    def as_the_run_removes(path: Path, name: Path) -> None:
        whole(path, name)
        for file in name.glob("*/mp_rank*"):
            file.unlink()
        for file in name.glob("*/zero_pp_rank_0*model*"):
            file.unlink()

    monkeypatch.setattr(hollowing, "rename_folder", as_the_run_removes)
    with pytest.raises(CheckpointError, match="by its run meanwhile"):
        prune(old, tmp_path / "out")
    assert old.exists()


def test_a_checkpoint_that_its_run_removes_while_it_is_staged_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written for it is a third of it, and nobody would come back for that."""
    from zexport.monitor import hollowing

    run = tmp_path / "run"
    old = trainers_run(run)
    consolidate(old, tmp_path / "out")
    fill = hollowing._fill

    def as_the_run_removes(*given: Any) -> None:
        fill(*given)
        shutil.rmtree(old)

    monkeypatch.setattr(hollowing, "_fill", as_the_run_removes)
    with pytest.raises(CheckpointError, match="No such file"):
        prune(old, tmp_path / "out")
    assert [path.name for path in run.iterdir()] == ["checkpoint-4"]


@pytest.mark.parametrize("case", ["z0_w2_bf16", "uni_z2_w2_bf16_odd"])
def test_a_checkpoint_without_optimizer_states_files_cannot_be_pruned(
    case: str, tmp_path: Path
) -> None:
    old = trainers_run(tmp_path / "run", FIXTURES / case / "ckpt")
    consolidate(old, tmp_path / "out", AS_STORED)
    with pytest.raises(UnsupportedError, match="remove the checkpoint yourself"):
        prune(old, tmp_path / "out")


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
    from zexport.monitor import hollowing

    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    before = state_of(tmp_path / "run")
    monkeypatch.setattr(hollowing, "_told", lambda _: object())
    with pytest.raises(UnsupportedError, match="read otherwise"):
        prune(old, tmp_path / "out")
    assert state_of(tmp_path / "run") == before


def test_the_last_checkpoint_stays_though_the_end_of_the_training_was_saved_beside_it(
    tmp_path: Path,
) -> None:
    """A Trainer goes on from ``checkpoint-N`` alone; under ZeRO-3 it may save a tag at the end."""
    run = tmp_path / "run"
    trainers_run(run)
    save(small_model(), Run(steps=4, optimizer_step=4.0), run, "global_step4")
    (run / "latest").write_text("global_step4")
    consolidate(run / "checkpoint-4", tmp_path / "out", AS_STORED)
    with pytest.raises(UsageError, match="is the newest complete checkpoint"):
        prune(run / "checkpoint-4", tmp_path / "out")


def test_even_newest_has_to_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEXPORT_PRUNE_EVEN_NEWEST", "1")
    run, outs = tmp_path / "run", tmp_path / "outs"
    trainers_run(run)
    done = typed("prune", run / "checkpoint-4", "--export", outs)
    assert done.returncode == UsageError.exit_code
    assert "asked for by ZEXPORT_PRUNE_EVEN_NEWEST alone" in " ".join(done.stderr.split())
