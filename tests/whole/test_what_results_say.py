"""Results describe their checkpoint and what was left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import Run, save, small_model
from zexport import consolidate, verify_export

FIXTURE = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt"


def test_moved_checkpoint_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a relative path; Accelerate's tag is always the same."""
    root = tmp_path / "project" / "checkpoints" / "checkpoint_1"
    save(small_model(), Run(stage=2), root, tag="pytorch_model")
    consolidate(root, tmp_path / "one")
    moved = tmp_path / "elsewhere" / "checkpoints" / "checkpoint_1"
    moved.parent.mkdir(parents=True)
    root.rename(moved)
    (moved / "below").mkdir()
    monkeypatch.chdir(moved / "below")
    consolidate("..", tmp_path / "two")
    for name in ("README.md", "zexport_manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "additional_chat_templates/tool.jinja",
        "modeling_mine.py",
        "pytorch_model.bin",
    ],
)
def test_added_file_that_changes_what_loads_is_warned_of(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    consolidate(FIXTURE, out)
    (out / "notes.txt").write_text("mine")
    assert verify_export(out).warnings == ()
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("{}")
    report = verify_export(out)
    assert report.ok
    (warning,) = report.warnings
    assert warning.startswith(name)
