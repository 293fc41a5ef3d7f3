"""What results say of themselves: of which checkpoint they are, and what is to be known of them."""

from __future__ import annotations

import json
import shutil
from io import BytesIO
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import Run, save, small_model
from tests.support.forked import typed
from tests.support.published import check
from zexport import consolidate, verify_export

FIXTURE = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt"


def run(*words: object, **environment: str) -> tuple[str, str]:
    """Standard output and error of a command that goes well."""
    done = typed(*words, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def accelerate(tmp_path: Path) -> Path:
    """A checkpoint of Accelerate's, whose tag is always the same, without a config."""
    root = tmp_path / "project" / "checkpoints" / "checkpoint_1"
    return save(small_model(), Run(stage=2), root, tag="pytorch_model")


def test_a_checkpoint_elsewhere_gives_the_same_bytes_and_never_a_dotted_path(
    accelerate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consolidate(accelerate, tmp_path / "one")
    moved = tmp_path / "elsewhere" / "checkpoints" / "checkpoint_1"
    moved.parent.mkdir(parents=True)
    accelerate.rename(moved)
    (moved / "below").mkdir()
    monkeypatch.chdir(moved / "below")
    consolidate("..", tmp_path / "two")
    for name in ("README.md", "zexport_manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_quiet_silences_notes_and_never_warnings(accelerate: Path, tmp_path: Path) -> None:
    words = ("consolidate", accelerate, tmp_path / "loud", "--exclude-frozen")
    loud = run(*words, "--rename", "^=base_")[0]
    assert "Warnings" in loud
    out, err = run("consolidate", "-q", accelerate, tmp_path / "out")
    assert out == ""
    assert "will not load" in err
    assert "Notes" not in err
    assert run("consolidate", "-q", FIXTURE, tmp_path / "whole") == ("", "")


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "additional_chat_templates/tool.jinja",
        "modeling_mine.py",
        "pytorch_model.bin",
    ],
)
def test_files_that_were_added_and_change_what_loads_are_told(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    consolidate(FIXTURE, out)
    (out / "notes.txt").write_text("mine")
    assert verify_export(out).warnings == ()
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("{}")
    report = verify_export(out)
    assert report.ok
    (told,) = report.warnings
    assert told.startswith(f"{name} was added to the export")


def test_a_variable_that_sets_nothing_is_told_with_the_one_that_was_meant() -> None:
    meant = "ZEXPORT_INSPECT_FILES"
    for wrong in ("ZEXPORT_INSPECT_FIELS", "ZEXPORT_FILES"):
        told = f"Warning: {wrong} sets nothing; did you mean {meant}?"
        assert told in run("inspect", FIXTURE, **{wrong: "1"})[1]
    others = {"ZEXPORT_VERIFY_CHECK": "full", "ZEXPORT_ELSEWHERE": "1", meant: "1"}
    assert run("inspect", FIXTURE, **others)[1] == ""


def test_entries_that_are_no_weights_are_counted_and_named_by_the_report(tmp_path: Path) -> None:
    root = shutil.copytree(FIXTURE, tmp_path / "ckpt")
    for path in root.glob("*/zero_pp_rank_*_model_states.pt"):
        states = torch.load(path, weights_only=False)
        states["module"] |= {"model.norm._extra_state": BytesIO(b"x"), "seen": torch.zeros(0)}
        torch.save(states, path)
    by_memory = ("--layout", "memory")
    told, _ = run("consolidate", root, tmp_path / "json", *by_memory, "--json")
    report = json.loads(told)
    check("export", report)
    assert report["left_out"] == ["seen", "model.norm._extra_state"]
    assert not any("seen" in told for told in (*report["notes"], *report["warnings"]))
    told, _ = run("consolidate", root, tmp_path / "text", *by_memory)
    assert "Left out 2: seen, model.norm._extra_state" in " ".join(told.split())
    assert "Left out" not in run("consolidate", FIXTURE, tmp_path / "whole")[0]
