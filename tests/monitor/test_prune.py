"""What a pruned checkpoint still gives, and what prune refuses."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import (
    Model,
    Run,
    deepspeed_names,
    edit,
    model_file,
    optimizer_file,
    save,
    small_model,
    values,
)
from tests.support.forked import typed
from tests.support.power_cuts import Pair, inode
from tests.support.pruning import AS_STORED, state_of, tensors_of, trainers_run
from tests.torture.faults import SYNCS, ended, forked, killing
from tests.torture.prunings import killed_prunings
from zexport import (
    CheckMode,
    CheckpointError,
    DamagedCheckpointError,
    ExportOptions,
    FindingKind,
    IncompleteCheckpointError,
    NotACheckpointError,
    OutputError,
    Progress,
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
from zexport.export.report import Phase
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


def _dated(folder: Path) -> dict[str, tuple[int, int]]:
    """Mode and time of a folder and of all below it, by path in it."""
    found = {os.path.relpath(one, folder): one.stat() for one in (folder, *folder.rglob("*"))}
    return {name: (one.st_mode, one.st_mtime_ns) for name, one in found.items()}


@pytest.mark.parametrize("case", [*CASES, ""])
def test_pruned_checkpoint_exports_the_same_weights(case: str, tmp_path: Path) -> None:
    old = trainers_run(tmp_path / "run", FIXTURES / case / "ckpt" if case else None)
    tag_dir = next(path for path in old.iterdir() if path.is_dir() and path.name[0] == "g")
    (old / "empty").mkdir()
    before, newest = tensors_of(old, tmp_path / "scratch"), state_of(tmp_path / "run/checkpoint-4")
    consolidate(old, tmp_path / "out", AS_STORED)
    dated, run_dated = _dated(old), _dated(old.parent)
    dry = prune(old, tmp_path / "out", dry_run=True)
    assert (dry.is_dry_run, dry.pruned, _dated(old.parent)) == (True, None, run_dated)
    assert dry.tensors == len(before)
    seen, began = list[Progress](), time.monotonic()
    done = prune(old, tmp_path / "out", progress=seen.append)
    assert 0 < done.seconds < time.monotonic() - began
    assert {one.phase for one in seen} == {Phase.VERIFY, Phase.WRITE}
    assert (seen[-1].phase, seen[-1].nbytes_done) == (Phase.WRITE, seen[-1].nbytes_total)
    pruned = tmp_path / "run" / "pruned-checkpoint-2"
    assert (done.pruned, done.nbytes_freed) == (pruned, dry.nbytes_freed)
    noted = f"{tag_dir.name}/zexport_pruned.json"
    left = sum(len(data) for name, (_, data) in state_of(pruned).items() if name != noted)
    assert 0 < done.nbytes_freed == done.nbytes_before - left
    assert {name for name, _ in _dated(pruned).items() - dated.items()} == {noted}
    assert done.removed == ("rng_state_0.pth", "rng_state_1.pth")
    assert {*done.removed} == dated.keys() - _dated(pruned).keys()
    assert not old.exists()
    assert tensors_of(pruned, tmp_path / "scratch") == before
    assert verify_export(tmp_path / "out", against=pruned).ok
    assert state_of(tmp_path / "run" / "checkpoint-4") == newest
    note = json.loads((pruned / noted).read_text())
    assert (note["checkpoint"], note["tensors"]) == (str(old), len(before))
    assert note.keys() > {"zexport_version", "at", "export_manifest", "source"}
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


@contextmanager
def _interrupted(patch: pytest.MonkeyPatch, call: str, last: str) -> Iterator[None]:
    """Press Ctrl-C after a call whose last path has this name."""
    whole = getattr(os, call)

    def act(*paths: Path, **named: Any) -> None:
        whole(*paths, **named)
        if Path(paths[-1]).name == last:
            raise KeyboardInterrupt

    patch.setattr(os, call, act)
    with pytest.raises(KeyboardInterrupt):
        yield


@pytest.mark.parametrize(
    ("call", "last"),
    [("replace", "pruned-checkpoint-2"), ("replace", "old"), ("unlink", "trainer_state.json")],
)
def test_interrupted_prune_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, last: str
) -> None:
    old, out = trainers_run(tmp_path / "run"), tmp_path / "out"
    consolidate(old, out)
    with monkeypatch.context() as patch, _interrupted(patch, call, last):
        prune(old, out)
    left = state_of(tmp_path / "run")
    assert prune(old, out, dry_run=True).is_dry_run
    assert state_of(tmp_path / "run") == left
    done = prune(old, out)
    assert verify_export(out, against=done.pruned).ok
    names = {path.name for path in old.parent.iterdir()}
    assert names == {"checkpoint-4", "pruned-checkpoint-2"}


def test_killed_prune_can_be_run_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(small_model(), Run(), tmp_path, "written") / "written"
    for path in folder.iterdir():
        os.utime(path, (1000, 1000))
    consolidate(folder, tmp_path / "out")
    act = partial(prune, folder, tmp_path / "out", even_newest=True)
    with pytest.raises(OutputError, match="last minute"):
        act()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: 1 << 62)
        assert ended(forked(act, killing(2, ("link",)))) == -9
    assert act().nbytes_freed > 0


def test_new_files_and_names_are_on_the_disk_before_the_old_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without hard links, where files are copied."""
    old, replace = trainers_run(tmp_path / "run"), os.replace
    consolidate(old, tmp_path / "out")
    synced, waiting = dict[Pair, object](), set[Path]()

    def content(one: int | Path) -> tuple[Pair, object]:
        status = os.stat(one)  # noqa: PTH116 - or a descriptor
        is_folder = stat.S_ISDIR(status.st_mode)
        return inode(status), (*sorted(os.listdir(one)),) if is_folder else status.st_size  # noqa: PTH208

    def link(*_: object) -> None:
        raise PermissionError

    def rename(path: Path, name: Path) -> None:
        if path.is_dir():
            waiting.update([path, *path.rglob("*")] if name.parent == old.parent else [])
            assert synced.items() >= dict(map(content, waiting)).items()
            waiting.clear()
            waiting.update((path.parent, name.parent))
        replace(path, name)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "replace", rename)
    for name in SYNCS:
        monkeypatch.setattr(os, name, lambda one: synced.update([content(one)]))
    prune(old, tmp_path / "out")
    assert waiting == {old.with_name("pruned-checkpoint-2.partial")}


def test_flipped_bit_that_no_export_reads_is_refused(tmp_path: Path) -> None:
    old, out = trainers_run(tmp_path / "run"), tmp_path / "out"
    path = next(old.glob("*/*_optim_states.pt"))
    edit(path, lambda state: state["optimizer_state_dict"].update(scales=torch.ones(3)))
    _flip_a_bit(path, size=12)
    consolidate(old, out)
    with pytest.raises(DamagedCheckpointError, match="CRC-32"):
        prune(old, out)
    assert old.exists()


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


def _flip_a_bit(path: Path, size: int = 16, at: int = 0) -> None:
    """Of a byte of the smallest tensor with ``size`` bytes or more; its CRC-32 stays."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as content:
        found = (one for one in content.infolist() if "/data/" in one.filename)
        tensor = min((one for one in found if one.file_size >= size), key=lambda o: o.file_size)
    begin = (
        tensor.header_offset + 30 + sum(struct.unpack_from("<HH", data, tensor.header_offset + 26))
    )
    data[begin + at % tensor.file_size] ^= 1
    path.write_bytes(data)
    os.utime(path, (1000, 1000))


def _newer_one_has_a_flipped_bit(old: Path, _: Path) -> None:
    """``torch.load`` does not notice: it checks no CRC-32."""
    _flip_a_bit(next(old.with_name("checkpoint-4").glob("*/*_optim_states.pt")))


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
    with pytest.raises(UsageError, match=why):
        prune(old, out)
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
    note = old.with_name("pruned-checkpoint-2") / "global_step2" / "zexport_pruned.json"
    note.parent.mkdir(parents=True)
    note.write_text("{")


def _link_itself(old: Path, _: Path) -> None:
    old.rename(old.with_name("elsewhere"))
    old.symlink_to(old.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_link_inside, "contains a link"),
        (_link_itself, "a link"),
        (_still_written, "may still be writing it"),
        (_exported_with_allow, "with --allow,"),
        (_exported_without_frozen, "with --exclude-frozen,"),
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
        save(small_model(), Run(steps=step, legacy=step == 4), run, f"global_step{step}")
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
        path = "/far/epoch=4-step=4.ckpt" if step == 2 else "/far/epoch=2-step=2.ckpt"
        best = {"best_model_path": path, "best_model_score": torch.ones(())}
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
@pytest.mark.parametrize("highest", [1, 2])
def test_resume_from_the_highest_step_is_checked(tmp_path: Path, highest: int) -> None:
    """Also if a restarted run has saved another since, or the folder has another model."""
    for name, step in (("0", 0), (f"{highest}", 1), (f"{3 - highest}", 0), ("last", 5)):
        run = Run(steps=step, client_state={"epoch": 0, "global_step": step})
        save(small_model(), run, tmp_path / f"epoch={name}.ckpt", "checkpoint")
    consolidate(tmp_path / "epoch=0.ckpt", tmp_path / "out")
    _flip_a_bit(next((tmp_path / f"epoch={highest}.ckpt").glob("*/*_optim*")))
    with pytest.raises(UsageError, match=f"resume from epoch={highest}"):
        prune(tmp_path / "epoch=0.ckpt", tmp_path / "out")


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
    next(run.glob("global_step2/*_optim*")).unlink()  # a Trainer does not resume from `latest`
    consolidate(run / "checkpoint-2", tmp_path / "out")
    assert prune(run / "checkpoint-2", tmp_path / "out").nbytes_freed > 0


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        ("link", ["changed during pruning"]),
        ("replace", ["changed during pruning"]),
        ("replace", ["Ctrl-C", "changed during pruning"]),
    ],
)
def test_checkpoint_that_changes_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, ends: list[str]
) -> None:
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out")
    before, whole = state_of(tmp_path / "run"), getattr(os, call)

    def change(path: Path, *more: object, **named: object) -> None:
        if Path(path).is_relative_to(old):
            (old / "notes.txt").write_text("written since")
        whole(path, *more, **named)
        if "Ctrl-C" in ends and Path(path) == old:
            raise KeyboardInterrupt("Ctrl-C")

    with pytest.raises(CheckpointError, match="changed during pruning"):
        prune(old, tmp_path / "out", dry_run=True, progress=lambda _: (old / "new").touch())
    (old / "new").unlink()
    monkeypatch.setattr(os, call, change)
    for end in ends:
        with pytest.raises((CheckpointError, KeyboardInterrupt), match=end):
            prune(old, tmp_path / "out")
    (old / "notes.txt").unlink()
    assert state_of(tmp_path / "run") == before
    assert not [*old.parent.glob("pruned-checkpoint-2")]


def _is_read_differently(place: Place) -> None:
    for path in place.tag_in(place.new).glob("*_model_states.pt"):
        own = Path(shutil.copy(path, path.with_suffix(".new"))).replace(path)
        edit(own, lambda state: state.update(skipped_steps=1))


def _new_file(place: Place, rank: int) -> Path:
    return next(place.tag_in(place.new).glob(f"*_rank_{rank}_*_optim_states.pt"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_is_read_differently, "read differently"),
        (lambda place: _flip_a_bit(_new_file(place, 0)), "replicas differ"),
        (lambda place: _flip_a_bit(_new_file(place, 1), size=256, at=-1), "CRC-32"),  # padding
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
        with pytest.raises(NotACheckpointError, match="is not finished"):
            open_checkpoint(place.work)
        change(place)

    monkeypatch.setattr("zexport.monitor.prune.build", build_and_change)
    with pytest.raises(ZexportError, match=words):
        prune(old, tmp_path / "out")
    assert state_of(old) == before
    assert not (tmp_path / "run" / "pruned-checkpoint-2").exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(("name", "is_interrupted"), [("checkpoint", False), ("tag", True)])
def test_parts_on_several_nodes_are_pruned_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_interrupted: bool
) -> None:
    parts = [tmp_path / "all" / f"node{node}" / f"{name}-2" for node in range(2)]
    for node, part in enumerate(parts):
        trainers_run(part.parent)
        for step in (2, 4) if name == "tag" else ():
            save(small_model(), Run(steps=step), part.parent, f"tag-{step}")
            shutil.rmtree(part.with_name(f"checkpoint-{step}"))
        for path in part.parent.rglob(f"*zero_pp_rank_{1 - node}_*"):
            path.unlink()
    before = state_of(parts[0])
    consolidate(parts, tmp_path / "out", AS_STORED)
    with pytest.raises(CheckpointError):
        prune(parts[0], tmp_path / "out")
    assert state_of(parts[0]) == before
    if is_interrupted:
        with _interrupted(monkeypatch, "replace", "old"):
            prune(parts, tmp_path / "out")
        monkeypatch.undo()
        for part in parts:
            shutil.rmtree(part.with_name(f"{name}-4"))
    done = prune(parts, tmp_path / "out")
    assert len(done.rewritten) == 2 - is_interrupted
    pruned = [part.with_name(f"pruned-{name}-2") for part in parts]
    assert not any(part.exists() for part in parts)
    assert verify_export(tmp_path / "out", against=pruned).ok


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"check": CheckMode.FULL}, "1 of 30000"),
        ({"base": Path("none")}, "--base is not a folder"),
        ({"adapter_config": Path("none")}, "not an adapter_config.json"),
    ],
)
def test_arguments_of_verify_count(given: dict[str, Any], why: str, tmp_path: Path) -> None:
    shapes = {"A": (2, 15_000), "B": (4, 2)}
    model = Model([{f"w.lora_{n}.default.weight": values(s, 1) for n, s in shapes.items()}])
    old = save(model, Run(stage=2), tmp_path / "run") / "global_step2"
    partitions = "single_partition_of_fp32_groups"
    change = lambda state: state["optimizer_state_dict"][partitions][0][4321:4322].add_(1)  # noqa: E731
    edit(optimizer_file(old, model, 0), change)
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["w"]}))
    consolidate(old, out, ExportOptions(adapter_config=config))
    with pytest.raises(ZexportError, match=why):
        prune(old, out, even_newest=True, **{"adapter_config": config, **given})


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


def test_bucket_several_tags_and_mount_point_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutputError, match="object storage"):
        prune("s3://bucket/run/checkpoint-2", "out")
    with pytest.raises(CheckpointError, match="permissions"):
        prune("name" * 99, "out")
    (tmp_path / ".metadata").touch()
    with pytest.raises(UnsupportedError, match="only checkpoints of DeepSpeed"):
        prune(tmp_path, "out")
    old = trainers_run(tmp_path / "run")
    consolidate(old, tmp_path / "out", AS_STORED)
    shutil.copytree(old / "global_step2", old / "global_step3")
    with pytest.raises(UnsupportedError, match="several tags"):
        prune(old, tmp_path / "out")
    shutil.rmtree(old / "global_step3")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "global_step2")
    with pytest.raises(OutputError, match="mount point"):
        prune(old, tmp_path / "out")
