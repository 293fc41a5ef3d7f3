"""What an export may make or replace, and what becomes of a folder that it has replaced."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from tests.support.checkpoints import Run, save, small_model
from tests.support.forked import typed
from tests.support.pruning import state_of, trainers_run
from tests.support.stopping import Job, files
from tests.torture.faults import RENAMES, SYNCS, Calls, ended, failing, forked, killing, watched
from zexport import (
    ExportOptions,
    ExportReport,
    OutputError,
    consolidate,
    open_checkpoint,
    plan_export,
    reshard,
)
from zexport import run_export as run

FIXTURE = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A quick export that replaces what is there."""
    root = save(small_model(), Run(stage=2), tmp_path / "ckpt")
    return Job(root, tmp_path / "out", ExportOptions(overwrite=True))


def _put(out: Path, name: str, content: str = "") -> None:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("/"):
        (out / name).mkdir()
    else:
        (out / name).write_text(content)


# --- what may be replaced ---


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model-00001-of-00002.safetensors", ""),
        ("pytorch_model-00001-of-00002.bin", ""),
        ("config.json", '{"model_type": "llama"}'),
    ],
)
def test_model_folder_is_replaced(job: Job, name: str, content: str) -> None:
    whole = job.made()
    for below in ("1_Pooling/config.json", "additional_chat_templates/tools.jinja"):
        _put(job.out, below)
    _put(job.out, name, content)
    job.run()
    assert files(job.out) == whole
    assert job.left() == {"out"}


@pytest.mark.parametrize(
    ("name", "content", "is_model"),
    [
        ("thesis.tex", "years", False),
        ("config.json", '{"port": 80}', False),
        ("figures/1.svg", "<svg/>", False),
        ("figures/.empty/", "", False),
        ("runs/7/optimizer.pt", "work", True),
        ("1_Pooling/notes.md", "work", True),
    ],
)
def test_folder_with_foreign_files_is_not_replaced(
    job: Job, name: str, content: str, is_model: bool
) -> None:
    if is_model:
        _put(job.out, "model.safetensors")
    _put(job.out, name, content)
    before = files(job.out)
    with pytest.raises(OutputError, match="files of neither an export nor a model") as caught:
        job.run()
    assert caught.value.found == name.rstrip("/")
    assert files(job.out) == before
    assert (job.out / name).exists()
    assert job.left() == {"out"}


def _spoil(path: Path, end: bytes) -> None:
    path.write_bytes(path.read_bytes()[:-1] + end)


def _add(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")


_EDITS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "added": ("notes.txt", _add),
    "missing": ("README.md", Path.unlink),
    "another digest": ("config.json", lambda path: _spoil(path, b"?")),
    "other weights": ("model.safetensors", lambda path: _spoil(path, b"\xab")),
    "manifest": ("zexport_manifest.json", lambda path: path.write_text("{}")),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    consolidate(FIXTURE / "ckpt", out)
    return out


@pytest.mark.parametrize("edit", _EDITS)
def test_overwrite_never_replaces_an_edited_export(
    exported: Path, tmp_path: Path, edit: str
) -> None:
    """A copy keeps its times, as `cp -a` does; an edit gives another one."""
    out = shutil.copytree(exported, tmp_path / "out")
    name, act = _EDITS[edit]
    act(out / name)
    before = state_of(out)
    done = typed("consolidate", FIXTURE / "ckpt", out, "--overwrite")
    assert done.returncode == OutputError.exit_code
    assert name in done.stderr
    assert "remove the folder" in done.stderr
    assert state_of(out) == before


def test_export_edited_during_the_work_is_not_replaced(exported: Path, tmp_path: Path) -> None:
    out = shutil.copytree(exported, tmp_path / "out")
    plan = plan_export(open_checkpoint(FIXTURE / "ckpt"), out, ExportOptions(overwrite=True))
    with pytest.raises(OutputError, match=r"notes\.txt was added"):
        run(plan, confirm=lambda: _add(out / "notes.txt"))
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("out", ["home", "home/me", "a/here", "a/here/..", "/", "//"])
def test_home_and_working_directory_are_not_replaced(
    job: Job, monkeypatch: pytest.MonkeyPatch, out: str, overwrite: bool
) -> None:
    top = job.out.parent
    for place in ("home/me", "a/here"):
        _put(top / place, "model.safetensors")
    monkeypatch.chdir(top / "a" / "here")
    monkeypatch.setenv("HOME", str(top / "home" / "me"))
    before = files(top)
    with pytest.raises(OutputError, match="is or contains"):
        replace(job, out=top / out).with_options(overwrite=overwrite).run()
    assert files(top) == before


@pytest.mark.parametrize("below", ["", "global_step2", "global_step2/out", ".."])
def test_checkpoint_is_never_replaced(job: Job, below: str) -> None:
    before = files(job.source)
    with pytest.raises(OutputError, match="would be mixed with the input files"):
        replace(job, out=job.source / below).run()
    other = shutil.copytree(job.source, job.out)
    with pytest.raises(OutputError, match="contains a checkpoint, which an export never replaces"):
        job.run()
    assert files(job.source) == files(other) == before


def test_mount_point_is_not_replaced(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(job.out))
    with pytest.raises(OutputError, match="is a mount point"):
        job.run()
    assert job.out.is_dir()


# --- how it is replaced ---


def test_empty_folder_is_filled_and_anything_else_is_refused(job: Job) -> None:
    plain = job.with_options(overwrite=False)
    whole = plain.made()
    plain.out.mkdir()
    assert plain.made() == whole
    plain.out.write_text("keep")
    with pytest.raises(OutputError, match="is not a folder"):
        job.run()
    plain.out.unlink()
    _put(plain.out, "mine")
    with pytest.raises(OutputError, match=r"exists and is not empty\. Choose another name, or"):
        plain.run()
    assert files(plain.out) == {"mine": b""}
    assert plain.left() == {"out"}


def test_symbolic_link_is_followed(job: Job) -> None:
    whole, real = job.made(), job.out.with_name("real")
    real.mkdir()
    job.out.symlink_to(real)
    job.run()
    assert job.out.is_symlink()
    assert files(real) == whole


def test_folder_that_was_filled_meanwhile_is_not_replaced(job: Job) -> None:
    plan = plan_export(open_checkpoint(job.source), job.out)
    with pytest.raises(OutputError, match="Directory not empty"):
        run(plan, confirm=lambda: _put(job.out, "mine"))
    assert files(job.out) == {"mine": b""}


def test_second_export_at_the_same_time_is_refused(job: Job) -> None:
    told = []

    def second() -> None:
        assert not job.out.exists()
        with pytest.raises(OutputError, match="another export is writing this folder") as caught:
            job.run()
        told.append(caught.value)

    run(plan_export(open_checkpoint(job.source), job.out), confirm=second)
    assert told
    assert job.left() == {"out"}
    assert (job.out / "model.safetensors").exists()


def _older(job: Job) -> dict[str, bytes]:
    """Put an older model in the output's place; its files."""
    shutil.rmtree(job.out, ignore_errors=True)
    _put(job.out, "model.safetensors", "old")
    _put(job.out, "1_Pooling/config.json", "old")
    return files(job.out)


@pytest.mark.parametrize("number", [errno.EIO, 0], ids=["refused", "Ctrl-C"])
@pytest.mark.parametrize("names", [RENAMES, SYNCS], ids=["rename", "sync"])
def test_replacement_that_fails_keeps_the_old_folder(
    job: Job, names: tuple[str, ...], number: int
) -> None:
    whole, old = job.made(), _older(job)
    with watched(Calls()) as counted:
        job.run()
    refused = 0
    for at in range(1, sum(counted.counts[name] for name in names) + 1):
        _older(job)
        try:
            with watched(failing(names, at, number, times=1)):
                job.run()
        except (OutputError, KeyboardInterrupt):
            refused += 1
            assert files(job.out) == old
        else:
            assert files(job.out) == whole
        assert job.left() <= {"out", "out.partial"}
    assert refused >= 2


def test_replacement_that_is_killed_leaves_the_old_folder_or_the_new_one(job: Job) -> None:
    whole, old = job.made(), _older(job)
    with watched(Calls()) as calls:
        job.run()
    found = set()
    for at in range(calls.counts.total() - 24, calls.counts.total() + 1):
        _older(job)
        ended(forked(job.run, killing(at)))
        there = job.out if job.out.exists() else job.out.with_name("out.replaced")
        assert files(there) in (old, whole)
        found.add((there.name, files(there) == old))
        if files(there) == old:
            with pytest.raises(OutputError, match="exists and is not empty"):
                job.with_options(overwrite=False).run()
            assert files(job.out) == old
        job.run()
        assert files(job.out) == whole
        assert job.left() == {"out"}
    assert found == {("out", True), ("out", False), ("out.replaced", True)}


def test_files_their_folder_and_its_name_are_on_the_disk_in_the_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def noted(sync: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            sync(descriptor)
            synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

        return call

    for name in SYNCS:
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    job.run()
    made = {str(job.partial / name) for name in files(job.out)}
    assert {*synced} >= {*made, str(job.partial)}
    assert synced[-1] == str(job.out.parent)
    assert synced.index(str(job.out.parent)) > max(map(synced.index, made))


# --- among a run's checkpoints ---


def test_no_training_resumes_from_an_export(tmp_path: Path) -> None:
    """transformers' own function is the oracle of what it takes for a checkpoint."""
    top, step = tmp_path / "run", open_checkpoint(FIXTURE / "ckpt").global_steps
    source = trainers_run(top)
    for name in ("checkpoint-5", "checkpoint-007"):
        with pytest.raises(OutputError, match="training would resume from it"):
            consolidate(source, top / name)
    (warning,) = _of_runs(consolidate(source, top / "checkpoint-4-hf"))
    assert warning.startswith("checkpoint-4-hf is in the folder of a run: its Trainer counts")
    assert not _of_runs(consolidate(source, top / "hf-checkpoint-4"))
    assert get_last_checkpoint(top) == str(top / "checkpoint-4")
    assert not _of_runs(reshard(FIXTURE / "ckpt", tmp_path / f"checkpoint-{step}", world_size=3))
    (warning,) = _of_runs(reshard(FIXTURE / "ckpt", top / "checkpoint-99", world_size=3))
    assert "resumes from it" in warning
    assert get_last_checkpoint(top) == str(top / "checkpoint-99")


def _of_runs(report: ExportReport) -> list[str]:
    return [one for one in report.warnings if "is in the folder of a run" in one]
