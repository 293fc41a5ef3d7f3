"""What an export may make or replace, and what becomes of a folder that it has replaced."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

from tests.support.forked import typed
from tests.support.pruning import state_of, trainers_run
from zexport import (
    ExportOptions,
    ExportReport,
    consolidate,
    open_checkpoint,
    plan_export,
    reshard,
    run_export,
)
from zexport.errors import OutputError
from zexport.run.staging import staged_folder

FIXTURE = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16"


def _make(out: Path, *, overwrite: bool = True) -> list[str]:
    """Put a model there; the warnings."""
    warnings: list[str] = []
    with staged_folder(out, overwrite=overwrite, warn=warnings.append) as folder:
        (folder / "model.safetensors").write_text("new")
    assert (out / "model.safetensors").read_text() == "new"
    return warnings


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what may be replaced ---


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model-00001-of-00002.safetensors", ""),
        ("pytorch_model-00001-of-00002.bin", ""),
        ("config.json", '{"model_type": "llama"}'),
    ],
)
def test_a_folder_with_a_file_of_a_model_is_replaced(
    tmp_path: Path, name: str, content: str
) -> None:
    (out := tmp_path / "out").mkdir()
    (out / name).write_text(content)
    for below in ("1_Pooling/config.json", "additional_chat_templates/tools.jinja"):
        (out / below).parent.mkdir()
        (out / below).touch()
    assert _make(out) == []
    assert _names(tmp_path) == ["out"]
    assert _names(out) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("thesis.tex", "years"),
        ("config.json", '{"port": 80}'),
        ("config.json", "[1"),
        ("figures/1.svg", "<svg/>"),
        ("figures/.empty/", ""),
    ],
)
def test_a_folder_that_is_no_model_s_is_not_replaced(
    tmp_path: Path, name: str, content: str
) -> None:
    out = tmp_path / "out"
    if name.endswith("/"):
        (out / name).mkdir(parents=True)
    else:
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text(content)
    with pytest.raises(OutputError, match="is neither an export nor a model's folder") as caught:
        _make(out)
    assert caught.value.found == name.rstrip("/")
    assert (out / name).exists()
    assert _names(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["runs/7/optimizer.pt", "src/train.py", "1_Pooling/notes.md"])
def test_a_model_s_folder_with_work_below_it_is_not_replaced(tmp_path: Path, name: str) -> None:
    """Weights beside a project do not make the project a model's own."""
    (out := tmp_path / "out").mkdir()
    (out / "model.safetensors").touch()
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("work")
    with pytest.raises(OutputError, match="holds what is not the model's own") as caught:
        _make(out)
    assert caught.value.found == name
    assert (out / name).read_text() == "work"


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _add(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")


_EDITS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "added": ("notes.txt", _add),
    "added below": ("eval/results.json", _add),
    "missing": ("README.md", Path.unlink),
    "another size": ("config.json", lambda path: _rewrite(path, lambda old: old + b" ")),
    "another digest": ("config.json", lambda path: _rewrite(path, bytes.swapcase)),
    "other weights": (
        "model.safetensors",
        lambda path: _rewrite(path, lambda old: old[:-4] + b"\1\2\3\4"),
    ),
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


def test_an_export_edited_during_the_work_is_not_replaced(exported: Path, tmp_path: Path) -> None:
    out = shutil.copytree(exported, tmp_path / "out")
    plan = plan_export(open_checkpoint(FIXTURE / "ckpt"), out, ExportOptions(overwrite=True))
    with pytest.raises(OutputError, match=r"notes\.txt was added"):
        run_export(plan, confirm=lambda: _add(out / "notes.txt"))
    assert (out / "notes.txt").read_text() == "mine"


def test_a_touched_export_is_replaced_and_even_quiet_says_so(
    exported: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(exported, tmp_path / "out")
    os.utime(out / "model.safetensors")
    done = typed("consolidate", FIXTURE / "ckpt", out, "--overwrite", "-q")
    assert done.returncode == 0
    assert f"this replaces {out}, which held what was made from ckpt/glob" in done.stderr
    assert {path.stat().st_mtime_ns for path in out.iterdir()} == {out.stat().st_mtime_ns}


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("out", [".", "..", "../..", "/", "//"])
def test_the_working_directory_and_what_holds_it_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, overwrite: bool
) -> None:
    (here := tmp_path / "a" / "here").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(OutputError, match="is or holds"):
        _make(Path(out), overwrite=overwrite)
    assert here.is_dir()


@pytest.mark.parametrize("out", ["home", "home/me"])
def test_the_home_folder_and_what_holds_it_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (home := tmp_path / "home" / "me").mkdir(parents=True)
    (home / "model.safetensors").touch()
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(OutputError, match="is or holds your home folder"):
        _make(tmp_path / out)
    assert _names(home) == ["model.safetensors"]


def test_without_a_home_there_is_none_to_protect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container, of a bare number
    assert _make(tmp_path / "out") == []


def test_a_working_directory_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(OutputError, match="lies in a working directory that was removed"):
        _make(Path())
    assert _make(tmp_path / "out") == []


# --- what cannot be removed ---


def test_a_folder_that_cannot_be_removed_later_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make(tmp_path / "out")
    (locked := tmp_path / "out" / "a" / "locked").mkdir(parents=True)
    (locked / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, _: str(path) != str(locked))
    with pytest.raises(OutputError, match="cannot be removed with the older model: no perm") as it:
        _make(tmp_path / "out")
    assert it.value.path == locked
    (locked / "file").unlink()
    _make(tmp_path / "out")  # an empty one needs no permission of its own


def test_a_folder_that_cannot_be_read_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make(tmp_path / "out")
    (locked := tmp_path / "out" / "locked").mkdir()
    whole = os.scandir

    def scandir(path: str | Path) -> object:  # root may read anywhere
        if str(path) == str(locked):
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OutputError, match="older model: Permission denied") as caught:
        _make(tmp_path / "out")
    assert caught.value.path == locked
    assert _names(tmp_path) == ["out"]


def test_a_disk_mounted_within_the_older_model_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make(tmp_path / "out")
    (disk := tmp_path / "out" / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(disk))
    with pytest.raises(OutputError, match="it is a mount point"):
        _make(tmp_path / "out")
    assert disk.is_dir()


def test_a_removal_that_fails_at_last_is_a_warning_and_the_next_export_copes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make(tmp_path / "out")
    (tmp_path / "out" / "old").touch()

    def rmtree(path: Path, *_: object, **__: object) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        (warning,) = _make(tmp_path / "out")
    left = tmp_path / "out.replaced-2"
    assert f"(Device or resource busy): it is left in {left}" in warning
    assert _names(left) == ["model.safetensors", "old"]
    assert _names(tmp_path) == ["out", "out.replaced-2"]
    assert _make(tmp_path / "out") == []
    assert _names(tmp_path) == ["out", "out.replaced-2"]


def test_what_an_earlier_export_could_not_remove_gets_out_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make(tmp_path / "out")
    (stuck := tmp_path / "out.replaced").mkdir()
    (stuck / "stuck").touch()
    (tmp_path / "out.partial.lock").write_text("a zexport export\n")
    whole = shutil.rmtree

    def rmtree(path: Path, *_: object, **__: object) -> None:
        if (path / "stuck").exists():
            raise OSError(16, "Device or resource busy", str(path))
        whole(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    (warning,) = _make(tmp_path / "out")
    assert "out.replaced-2" in warning
    assert _names(tmp_path) == ["out", "out.replaced-2"]


# --- among a run's checkpoints ---


def test_no_training_is_led_to_resume_from_an_export(tmp_path: Path) -> None:
    """transformers' own functions are the oracle of what it takes for a checkpoint."""
    run = tmp_path / "run"
    source = trainers_run(run)
    for name in ("checkpoint-5", "checkpoint-007"):
        with pytest.raises(OutputError, match="from which a training resumes"):
            consolidate(source, run / name)
    assert get_last_checkpoint(run) == str(run / "checkpoint-4")
    (warning,) = _told_of_run(consolidate(source, run / "checkpoint-4-hf"))
    assert warning.startswith("checkpoint-4-hf lies among a run's checkpoints: a Trainer counts")
    assert get_last_checkpoint(run) == str(run / "checkpoint-4")
    assert str(run / "checkpoint-4-hf") in sort_checkpoints(run)
    for out in (run / "hf", run / "hf-checkpoint-4", tmp_path / "models" / "checkpoint-2"):
        assert _told_of_run(consolidate(source, out)) == []
    assert _told_of_run(consolidate(run / "checkpoint-4", tmp_path / "models/checkpoint-4")) == []


def test_a_checkpoint_for_other_ranks_may_lie_where_a_training_resumes(tmp_path: Path) -> None:
    trainers_run(run := tmp_path / "run", steps=(1,))
    source = FIXTURE / "ckpt"
    step = open_checkpoint(source).global_steps
    assert _told_of_run(reshard(source, run / f"checkpoint-{step}", world_size=3)) == []
    (warning,) = _told_of_run(reshard(source, run / "checkpoint-99", world_size=3))
    assert "resumes from it" in warning
    assert get_last_checkpoint(run) == str(run / "checkpoint-99")


def _told_of_run(report: ExportReport) -> list[str]:
    return [one for one in report.warnings if "among a run's checkpoints" in one]
