"""What a pruned checkpoint still gives, and what prune refuses."""

from __future__ import annotations

import json
import os
import shutil
import time
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
from tests.torture.prunings import killed_prunings
from zexport import (
    CheckpointError,
    ExportOptions,
    FindingKind,
    IncompleteCheckpointError,
    OutputError,
    ReshardOptions,
    TrainingState,
    UnsupportedError,
    UsageError,
    VerificationError,
    ZexportError,
    consolidate,
    open_checkpoint,
    plan_reshard,
    prune,
    verify_export,
)
from zexport.monitor import strip
from zexport.monitor.strip import Place

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = (
    *("z2_w2_bf16_lora", "z3_w2_bf16_frozen", "moe_z2_w2_ep2_frozen"),
    *("tp2_z3_w4_bf16", "pp2_z1_w4_bf16_tied"),
)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two minutes pass: files that were just saved are no longer being written."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 120 * 10**9)


@pytest.mark.parametrize("case", CASES)
def test_pruned_checkpoint_exports_the_same_weights(case: str, tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run", FIXTURES / case / "ckpt")
    tag_dir = next(path for path in old.iterdir() if path.is_dir() and path.name[0] == "g")
    before, newest = tensors_of(old, tmp_path / "scratch"), state_of(tmp_path / "run/checkpoint-4")
    consolidate(old, tmp_path / "out", AS_STORED)
    dry = prune(old, tmp_path / "out", dry_run=True)
    assert (dry.is_dry_run, dry.pruned, old.exists()) == (True, None, True)
    assert dry.tensors == len(before)
    done = prune(old, tmp_path / "out")
    pruned = tmp_path / "run" / "pruned-checkpoint-2"
    assert (done.pruned, done.nbytes_freed) == (pruned, dry.nbytes_freed)
    left = sum(one.stat().st_size for one in pruned.rglob("*") if one.name != "zexport_pruned.json")
    folders = sum(one.stat().st_size for one in pruned.rglob("*") if one.is_dir())
    assert 0 < done.nbytes_freed == done.nbytes_before - left + folders
    assert not old.exists()
    assert tensors_of(pruned, tmp_path / "scratch") == before
    assert verify_export(tmp_path / "out", against=pruned).ok
    assert state_of(tmp_path / "run" / "checkpoint-4") == newest
    assert not [*pruned.glob("rng_state*")]
    assert (pruned / "trainer_state.json").exists()
    note = json.loads((pruned / tag_dir.name / "zexport_pruned.json").read_text())
    assert (note["checkpoint"], note["tensors"]) == (str(old), len(before))
    assert {*note["rewritten"]} == {*done.rewritten} != set()
    with pytest.raises(IncompleteCheckpointError, match="zexport prune"):
        plan_reshard(open_checkpoint(pruned), tmp_path / "on-3", ReshardOptions(world_size=3))
    assert prune(pruned, tmp_path / "out").nbytes_freed == 0
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["checkpoint-4", "pruned-checkpoint-2"]


def test_deepspeed_finds_no_optimizer_state_of_zeros(tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    prune(old, tmp_path / "out")
    folder = tmp_path / "run" / "pruned-checkpoint-2" / "global_step2"
    for path in folder.glob("*_optim_states.pt"):
        with deepspeed_names():
            state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        assert not {"optimizer_state_dict", "base_optimizer_state"} & state.keys()
        (kept,) = (one for one in state.values() if isinstance(one, dict) and "state" in one)
        assert kept["state"] == {0: {"step": 2.0}, 1: {"step": 2.0}}
        assert kept["param_groups"]


def test_killed_prune_leaves_a_checkpoint_with_the_same_weights(tmp_path: Path) -> None:
    assert killed_prunings(tmp_path, step=31) > 4


def _best_of_the_run(old: Path, _: Path) -> None:
    state = old.with_name("checkpoint-4") / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 4, "best_model_checkpoint": "/far/checkpoint-2"}))


def _no_newer_one(old: Path, _: Path) -> None:
    shutil.rmtree(old.with_name("checkpoint-4"))


def _written_later(old: Path, _: Path) -> None:
    """A run that was restarted from an older step."""
    for path in (*old.rglob("*.pt"), old / "trainer_state.json"):
        os.utime(path, (4e9, 4e9))


def _newer_one_is_cut_short(old: Path, _: Path) -> None:
    newer = next(old.with_name("checkpoint-4").glob("*/*_optim_states.pt"))
    newer.write_bytes(newer.read_bytes()[:500])


def _newer_one_has_a_flipped_bit(old: Path, _: Path) -> None:
    """``torch.load`` does not notice: it checks no CRC-32."""
    newer = next(old.with_name("checkpoint-4").glob("*/*_optim_states.pt"))
    with zipfile.ZipFile(newer) as content:
        tensors = [one for one in content.infolist() if "/data/" in one.filename]
    largest = max(tensors, key=lambda one: one.file_size)
    data = bytearray(newer.read_bytes())
    data[largest.header_offset + largest.file_size] ^= 1
    newer.write_bytes(data)
    os.utime(newer, (1000, 1000))


def _link_of_the_run(old: Path, _: Path) -> None:
    old.with_name("best").symlink_to(old / "global_step2")


def _last_tag_next_to_it(old: Path, _: Path) -> None:
    """A Trainer resumes only from ``checkpoint-N``; under ZeRO-3 it may save a tag at the end."""
    shutil.rmtree(old.with_name("checkpoint-4"))
    save(small_model(), Run(steps=4, optimizer_step=4.0), old.parent, "global_step4")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_link_of_the_run, "the link `best`"),
        (_no_newer_one, "newest complete"),
        (_newer_one_is_cut_short, "newest complete"),
        (_last_tag_next_to_it, "newest complete"),
        (_written_later, "newest complete"),
        (_best_of_the_run, "the best"),
        (_newer_one_has_a_flipped_bit, "resume from checkpoint-4"),
    ],
)
def test_checkpoint_to_resume_from_needs_even_newest(
    tmp_path: Path, change: Callable[[Path, Path], None], why: str
) -> None:
    old, out = trainers_run(tmp_path / "run"), tmp_path / "out"
    consolidate(old, out)
    change(old, out)
    before = state_of(tmp_path / "run")
    for words in ((), ("--dry-run",)):
        refused = typed("prune", old, "--export", out, *words)
        assert refused.returncode == UsageError.exit_code
        assert why in " ".join(refused.stderr.split())
        assert "--even-newest" in refused.stderr
    by_variable = typed("prune", old, "--export", out, ZEXPORT_PRUNE_EVEN_NEWEST="1")
    assert by_variable.returncode == UsageError.exit_code
    assert state_of(tmp_path / "run") == before
    assert typed("prune", old, "--export", out, "--even-newest").returncode == 0
    assert [path.name for path in old.parent.glob("*-2")] == ["pruned-checkpoint-2"]


def _link_inside(old: Path, out: Path) -> None:
    (old / "data").symlink_to(out)


def _still_written(old: Path, _: Path) -> None:
    (old / "trainer_state.json").unlink()


def _exported_with_allow(old: Path, out: Path) -> None:
    shutil.rmtree(out)
    consolidate(old, out, ExportOptions(allow=frozenset({FindingKind.STRAY_FILES})))


def _exported_without_frozen(old: Path, out: Path) -> None:
    shutil.rmtree(out)
    consolidate(old, out, ExportOptions(exclude_frozen=True))


def _pruned_one_exists(old: Path, _: Path) -> None:
    old.with_name("pruned-checkpoint-2").mkdir()


def _link_itself(old: Path, _: Path) -> None:
    old.rename(old.with_name("elsewhere"))
    old.symlink_to(old.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_link_inside, "contains a link"),
        (_link_itself, "a link"),
        (_still_written, "may still be writing it"),
        (_exported_with_allow, "--allow"),
        (_exported_without_frozen, "--exclude-frozen"),
        (_pruned_one_exists, "another checkpoint"),
    ],
)
def test_checkpoint_that_cannot_be_pruned_safely_is_unchanged(
    tmp_path: Path, change: Callable[[Path, Path], None], why: str
) -> None:
    old, out = trainers_run(tmp_path / "run"), tmp_path / "out"
    consolidate(old, out)
    change(old, out)
    before = state_of(tmp_path / "run")
    for even_newest in (False, True):
        with pytest.raises(OutputError, match=why):
            prune(old, out, even_newest=even_newest)
    assert state_of(tmp_path / "run") == before


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    ("names", "is_model"),
    [
        (("agent0-step2", "agent1-step4"), False),
        (("agent0-step2", "agent0-step4"), True),
        (("seed1", "seed2"), False),
    ],
)
def test_number_in_a_name_is_a_step_only_if_files_record_it(
    tmp_path: Path, names: tuple[str, str], is_model: bool
) -> None:
    run = tmp_path / "run"
    for step, name in zip((2, 4), names, strict=True):
        save(small_model(), Run(steps=step), run, name)
    (run / "latest").unlink(missing_ok=True)
    consolidate(run / names[0], tmp_path / "out", AS_STORED)
    with nullcontext() if is_model else pytest.raises(UsageError, match="of its model"):
        prune(run / names[0], tmp_path / "out")


@pytest.mark.usefixtures("settled")
def test_export_of_another_step_or_tag_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for tag, step in (("global_step2", 2), ("copy2", 2), ("global_step4", 4)):
        save(small_model(), Run(steps=step), run, tag)
    save(small_model(), Run(steps=3), tmp_path / "other", "global_step2")
    for at, made_from in enumerate((run / "copy2", tmp_path / "other" / "global_step2")):
        consolidate(made_from, tmp_path / f"{at}", AS_STORED)
        with pytest.raises(VerificationError, match="made from another checkpoint"):
            prune(run / "global_step2", tmp_path / f"{at}")


@pytest.mark.usefixtures("settled")
def test_latest_names_what_a_plain_run_resumes_from(tmp_path: Path) -> None:
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
    late = next((run / "global_step4").glob("*_optim_states.pt"))
    whole = late.read_bytes()
    late.unlink()
    with pytest.raises(UsageError, match="`latest` names global_step4, from which no training"):
        prune(run, tmp_path / "2", tag="global_step2")
    late.write_bytes(whole)
    done = prune(run, tmp_path / "2", tag="global_step2")
    assert done.pruned == run / "pruned-global_step2"
    assert verify_export(tmp_path / "2", against=done.pruned).ok
    assert open_checkpoint(run, tag="newest").location.tag == "global_step6"


@pytest.mark.usefixtures("settled")
def test_best_checkpoint_of_lightning_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 4, 6):
        best = {"best_model_path": "/far/epoch=2-step=2.ckpt", "best_model_score": torch.ones(())}
        callbacks = {"ModelCheckpoint{}": best, "Timer": {"elapsed": 1.0}, "Odd": []}
        client = {"callbacks": callbacks, "epoch": step, "global_step": step}
        name = f"epoch={step}-step={step}.ckpt"
        save(small_model(), Run(steps=step, client_state=client), run / name, "checkpoint")
        consolidate(run / name, tmp_path / f"{step}", AS_STORED)
    for step, why in ((2, "the best"), (6, "newest complete")):
        with pytest.raises(UsageError, match=why):
            prune(run / f"epoch={step}-step={step}.ckpt", tmp_path / f"{step}")
    assert prune(run / "epoch=4-step=4.ckpt", tmp_path / "4").nbytes_freed > 0


@pytest.mark.usefixtures("settled")
def test_run_folder_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    """A Trainer may leave its state and a last tag in the run folder."""
    runs = tmp_path / "runs"
    save(small_model(), Run(steps=2), runs / "1234567")
    save(small_model(), Run(steps=2), runs / "1234568")
    trainers_run(runs / "seed1", steps=(2, 4))
    save(small_model(), Run(steps=2), runs / "seed1")
    (runs / "seed1" / "trainer_state.json").write_text("{}")
    for run in (runs / "1234567", runs / "seed1"):
        consolidate(run / "global_step2", tmp_path / f"{run.name}-out")
        with pytest.raises(UsageError):
            prune(run / "global_step2", tmp_path / f"{run.name}-out")
        assert (run / "global_step2").exists()


@pytest.mark.parametrize("moment", ["while it is proved", "while it is renamed"])
def test_checkpoint_that_changes_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    before = state_of(tmp_path / "run")
    whole = os.replace if moment.endswith("renamed") else os.link

    def change(path: Path, *more: object, **named: object) -> None:
        if Path(path).is_relative_to(old):
            (old / "notes.txt").write_text("written since")
        whole(path, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, whole.__name__, change)
    with pytest.raises(CheckpointError, match="changed during pruning"):
        prune(old, tmp_path / "out")
    (old / "notes.txt").unlink()
    assert state_of(tmp_path / "run") == before
    assert not [*old.parent.glob("pruned-checkpoint-2")]


def _flip_in_a_new_file(place: Place) -> None:
    path = next(place.tag_in(place.new).glob("*_optim_states.pt"))
    with zipfile.ZipFile(path) as content:
        largest = max(content.infolist(), key=lambda one: one.file_size)
    data = bytearray(path.read_bytes())
    data[largest.header_offset + largest.file_size // 2 + 64] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_flip_in_a_new_file, "differ"),
        (lambda place: shutil.rmtree(place.folder.with_name("checkpoint-4")), "newest complete"),
    ],
)
def test_nothing_is_removed_unless_the_new_files_and_the_run_still_allow_it(
    change: Callable[[Place], None],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    before, build = state_of(old), strip.build

    def build_and_change(opened: TrainingState, place: Place, *rest: Any) -> None:
        build(opened, place, *rest)
        change(place)

    monkeypatch.setattr("zexport.monitor.prune.build", build_and_change)
    with pytest.raises(ZexportError, match=words):
        prune(old, tmp_path / "out")
    assert state_of(old) == before
    assert not (tmp_path / "run" / "pruned-checkpoint-2").exists()


def test_parts_on_several_nodes_are_pruned_together(tmp_path: Path) -> None:
    for node in range(2):
        old = trainers_run(tmp_path / "all" / f"node{node}")
        for path in old.parent.glob(f"*/*/*zero_pp_rank_{1 - node}_*"):
            path.unlink()
    parts = [tmp_path / "all" / f"node{node}" / "checkpoint-2" for node in range(2)]
    before = state_of(parts[0])
    consolidate(parts, tmp_path / "out", AS_STORED)
    with pytest.raises(CheckpointError):
        prune(parts[0], tmp_path / "out")
    assert state_of(parts[0]) == before
    done = prune(parts, tmp_path / "out")
    assert len(done.rewritten) == 2
    pruned = [part.with_name("pruned-checkpoint-2") for part in parts]
    assert not any(part.exists() for part in parts)
    assert verify_export(tmp_path / "out", against=pruned).ok


@pytest.mark.parametrize("damage", ["a flipped bit", "another checkpoint's", "no manifest"])
def test_export_that_does_not_match_is_refused(tmp_path: Path, damage: str) -> None:
    old = trainers_run(tmp_path / "run")
    made_from = old
    if damage.startswith("another"):
        made_from = shutil.copytree(old, tmp_path / "other")
        path = model_file(made_from / "global_step2", Run(), 0)
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
        with pytest.raises(VerificationError):
            prune(old, tmp_path / "out", dry_run=dry_run)
    assert state_of(tmp_path / "run") == before


@pytest.mark.parametrize("case", ["z0_w2_bf16", "uni_z2_w2_bf16_odd"])
def test_checkpoint_without_optimizer_states_files_is_refused(case: str, tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run", FIXTURES / case / "ckpt")
    consolidate(old, tmp_path / "out", AS_STORED)
    with pytest.raises(UnsupportedError, match="remove the checkpoint yourself"):
        prune(old, tmp_path / "out")


def test_bucket_and_several_tags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="object storage"):
        prune("s3://bucket/run/checkpoint-2", "out")
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    shutil.copytree(old / "global_step2", old / "global_step3")
    with pytest.raises(UnsupportedError, match="several tags"):
        prune(old, tmp_path / "out")
