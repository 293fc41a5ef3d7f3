"""Files next to the rank files of a framework's checkpoint: which come along, with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zexport
from tests.support.real_cases import copied
from zexport import UnsafeError


def _checkpoint(tmp_path: Path, tag: str, *names: str) -> Path:
    """A checkpoint of two ranks with more files, each with its name as content."""
    root = copied("z3_w2_bf16", tmp_path)
    (root / "zexport_source.json").unlink()
    (root / "global_step2").rename(root / tag)
    (root / "latest").write_text(tag)
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}" if name == "trainer_state.json" else name)
    return root


def _trainer(tmp_path: Path, *names: str) -> Path:
    states = (f"rng_state_{rank}.pth" for rank in (0, 1, 7))
    return _checkpoint(tmp_path, "global_step2", "trainer_state.json", *states, *names)


def test_trainers_random_states_are_renamed_for_the_world_size(tmp_path: Path) -> None:
    root = _trainer(tmp_path)
    for ranks, names in (
        (3, ["rng_state_0.pth", "rng_state_1.pth"]),
        (1, ["rng_state.pth"]),
        (2, ["rng_state_0.pth"]),
    ):
        out = tmp_path / f"on-{ranks}"
        zexport.reshard(root, out, world_size=ranks)
        found = sorted(out.glob("rng*"))
        assert [path.name for path in found] == names
        assert found[0].read_text() == "rng_state_0.pth"
        root = out


def test_all_files_except_gathered_weights_and_exports_are_copied(tmp_path: Path) -> None:
    weights = ("model.safetensors", "model.safetensors.index.json")
    exports = ("export/zexport_manifest.json", "export/model.safetensors", ".cache")
    kept = {"scheduler.pt", "adapter_model.safetensors", "other/adapter.json"}
    root = _trainer(tmp_path, *weights, *exports, *kept)
    report = zexport.reshard(root, tmp_path / "out", world_size=2)
    expected = {path.name for path in root.iterdir() if path.is_file()} | {"other/adapter.json"}
    expected -= {*weights, ".cache", "latest", "rng_state_7.pth"}
    written = {one for one in report.files if "global_step2" not in one}
    assert written - {"latest", "zexport_manifest.json"} == expected >= kept
    assert "not copied" in " ".join(report.notes)


def test_symlink_out_of_the_folder_is_rejected(tmp_path: Path) -> None:
    root = _trainer(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (root / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeError):
        zexport.reshard(root, tmp_path / "out", world_size=3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_accelerates_counts_are_left_out_or_warned_about(ranks: int, tmp_path: Path) -> None:
    """``scheduler.bin`` counted ranks x updates, ``scheduler_1.bin`` updates."""
    states = {"random_states_0.pkl", "random_states_1.pkl"}
    root = _checkpoint(tmp_path, "pytorch_model", *states, "custom_checkpoint_0.pkl")
    for name, epoch in (("scheduler.bin", 4), ("scheduler_1.bin", 2)):
        torch.save({"last_epoch": epoch, "_step_count": epoch + 1}, root / name)
    report = zexport.reshard(root, tmp_path / "out", world_size=ranks)
    assert states & {*report.files} == (states if ranks == 2 else set())
    assert {"custom_checkpoint_0.pkl", "scheduler.bin", "scheduler_1.bin"} <= {*report.files}
    counting = [one.split()[0] for one in report.warnings if "counts ranks" in one]
    assert counting == ["scheduler.bin"] * (ranks == 3)
