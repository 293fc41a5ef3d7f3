"""Which folders an export creates or replaces, and how it replaces them."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from tests.support.checkpoints import Run, save, small_model
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


# --- which folders are replaced ---


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
        ("config.json", '{"port": 80}', False),
        ("figures/.empty/", "", False),
        ("runs/7/optimizer.pt", "work", True),
    ],
)
def test_folder_with_foreign_files_is_not_replaced(
    job: Job, name: str, content: str, is_model: bool
) -> None:
    if is_model:
        _put(job.out, "model.safetensors")
    _put(job.out, name, content)
    before = files(job.out)
    with pytest.raises(OutputError, match="neither an export nor a model") as caught:
        job.run()
    assert caught.value.found == name.rstrip("/")
    assert files(job.out) == before
    assert (job.out / name).exists()
    assert job.left() == {"out"}


_EDITS: dict[str, Callable[[Path], object]] = {
    "notes.txt": lambda path: path.write_text("mine"),
    "README.md": Path.unlink,
    "model.safetensors": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xab"),
    "zexport_manifest.json": lambda path: path.write_text("{}"),
}


@pytest.mark.parametrize("name", _EDITS)
def test_edited_export_is_never_replaced(job: Job, name: str) -> None:
    job.run()
    _EDITS[name](job.out / name)
    before = state_of(job.out)
    with pytest.raises(OutputError, match=re.escape(name)):
        job.run()
    assert state_of(job.out) == before


def test_export_edited_during_the_run_is_not_replaced(job: Job) -> None:
    job.run()
    plan = plan_export(open_checkpoint(job.source), job.out, job.options)
    with pytest.raises(OutputError, match=r"notes\.txt was added"):
        run(plan, confirm=lambda: _put(job.out, "notes.txt", "mine"))
    assert (job.out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("out", ["home", "a/here", "a/here/..", "/"])
def test_home_and_working_directory_are_not_replaced(
    job: Job, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    top = job.out.parent
    for folder in ("home/me", "a/here"):
        _put(top / folder, "model.safetensors")
    monkeypatch.chdir(top / "a" / "here")
    monkeypatch.setenv("HOME", str(top / "home" / "me"))
    before = files(top)
    with pytest.raises(OutputError, match="is or contains"):
        replace(job, out=top / out).run()
    assert files(top) == before


@pytest.mark.parametrize("below", ["", "global_step2/out", ".."])
def test_checkpoint_is_never_replaced(job: Job, below: str) -> None:
    before = files(job.source)
    with pytest.raises(OutputError, match="input files"):
        replace(job, out=job.source / below).run()
    other = shutil.copytree(job.source, job.out)
    with pytest.raises(OutputError, match="contains a checkpoint"):
        job.run()
    assert files(job.source) == files(other) == before


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
    with pytest.raises(OutputError, match="not empty"):
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


def test_folder_filled_during_the_run_is_not_replaced(job: Job) -> None:
    plan = plan_export(open_checkpoint(job.source), job.out)
    with pytest.raises(OutputError, match="Directory not empty"):
        run(plan, confirm=lambda: _put(job.out, "mine"))
    assert files(job.out) == {"mine": b""}


def _older(job: Job) -> dict[str, bytes]:
    """Put an older model into the output folder; return its files."""
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
    refused, count = 0, sum(counted.counts[name] for name in names)
    for at in range(1, count + 1, 1 if names is RENAMES else 3):
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
            with pytest.raises(OutputError, match="not empty"):
                job.with_options(overwrite=False).run()
            assert files(job.out) == old
        job.run()
        assert files(job.out) == whole
        assert job.left() == {"out"}
    assert found == {("out", True), ("out", False), ("out.replaced", True)}


# --- in the folder of a run ---


def test_no_training_resumes_from_an_export(tmp_path: Path) -> None:
    """transformers' own function is the oracle."""
    top = tmp_path / "run"
    source = trainers_run(top)
    for name in ("checkpoint-5", "checkpoint-007"):
        with pytest.raises(OutputError, match="resume"):
            consolidate(source, top / name)
    assert _warns_of_trainer(consolidate(source, top / "checkpoint-4-hf"))
    assert not _warns_of_trainer(consolidate(source, top / "hf-checkpoint-4"))
    assert get_last_checkpoint(top) == str(top / "checkpoint-4")
    assert _warns_of_trainer(reshard(FIXTURE / "ckpt", top / "checkpoint-99", world_size=3))
    assert get_last_checkpoint(top) == str(top / "checkpoint-99")


def _warns_of_trainer(report: ExportReport) -> bool:
    return any("save_total_limit" in one for one in report.warnings)
