"""Damage that keeps tables and lengths plausible is still refused."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Model, Run, deepspeed_names, edit, save, values
from tests.support.real_cases import copied, file_of
from zexport import DamagedCheckpointError, ExportOptions, FindingKind, NameLayout

_MEMORY = ExportOptions(layout=NameLayout.MEMORY)


def _refused(root: Path, out: Path, match: str) -> DamagedCheckpointError:
    """Return the error of an export; opening the checkpoint reports the problem as well."""
    assert zexport.open_checkpoint(root).problems
    with pytest.raises(DamagedCheckpointError, match=match) as caught:
        zexport.consolidate(root, out, _MEMORY)
    assert not out.exists()
    return caught.value


# --- copies of files ---


def _save_nameless(path: Path, *, is_old: bool) -> None:
    """Rewrite a rank file without its name in the zip (legacy format, or saved to a stream)."""
    stream = io.BytesIO()

    def note(state: dict[str, Any]) -> None:
        with deepspeed_names():
            torch.save(state, stream, _use_new_zipfile_serialization=not is_old)

    edit(path, note)
    path.write_bytes(stream.getvalue())


@pytest.mark.parametrize("is_old", [True, False], ids=["legacy", "written to a stream"])
@pytest.mark.parametrize("name", ["z3_w2_bf16_frozen", "z3_w4_bf16_odd"])
def test_rank_file_copied_over_another_rank_is_refused(
    name: str, is_old: bool, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    for path in root.glob("global_step*/*optim*"):
        _save_nameless(path, is_old=is_old)
    assert zexport.open_checkpoint(root).problems == ()
    one, two = (file_of(root, f"*rank_{rank}_mp*optim*") for rank in (0, 1))
    shutil.copy(two, one)
    error = _refused(root, tmp_path / "out", "of another rank")
    assert error.path == two


def _equal_partitions(value: torch.Tensor, steps: int, root: Path) -> Path:
    """Save a run of two ranks whose files may have equal contents."""
    return save(Model([{"w": value}]), Run(stage=3, steps=steps, legacy=True), root)


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (torch.ones(64, 64), 2),
        (torch.arange(8.0).repeat(2, 200), 2),
        (values((1, 3000), 1).repeat(2, 1), 0),
    ],
    ids=["constants", "few values", "untrained"],
)
def test_equal_partitions_of_uniform_weights_are_accepted(
    value: torch.Tensor, steps: int, tmp_path: Path
) -> None:
    root = _equal_partitions(value, steps, tmp_path / "ckpt")
    shutil.copy(file_of(root, "*rank_1_*optim*"), file_of(root, "*rank_0_*optim*"))
    assert zexport.open_checkpoint(root).problems == ()


# --- tied weights ---


def test_tied_name_with_values_of_another_weight_is_refused(tmp_path: Path) -> None:
    """Both weights have the same shape, so only the module weights show the error."""
    weights = {"one": values((40, 30), 1), "two": values((40, 30), 2)}
    root = save(Model([weights], tied={"again": "one"}), Run(stage=2), tmp_path / "ckpt")
    record = {"again": "two"}
    edit(file_of(root, "mp_rank_00_model*"), lambda state: state["shared_params"].update(record))
    with pytest.raises(DamagedCheckpointError, match=r"again \(768 of 768 compared\)") as caught:
        zexport.consolidate(root, tmp_path / "out", _MEMORY)
    assert caught.value.finding is FindingKind.CAST_MISMATCH


def test_frozen_weight_and_its_slice_are_not_tied(tmp_path: Path) -> None:
    """DeepSpeed detects tied weights by address, so a slice at offset 0 looks tied."""
    whole = values((6, 4), 1, torch.bfloat16)
    model = Model([{"w": values((5,), 2)}], frozen={"whole": whole, "part": whole[:2]})
    run = Run(stage=1, client_state={"shared_params": {"part": "whole"}})
    zexport.consolidate(save(model, run, tmp_path / "ckpt"), tmp_path / "out", _MEMORY)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["part"], whole[:2].float())


# --- damage that no check can detect ---


def test_files_without_checksums_get_a_warning(tmp_path: Path) -> None:
    model = Model([{"w": values((5,), 1)}])
    for is_old in (True, False):
        root = save(model, Run(stage=3, legacy=is_old), tmp_path / f"ckpt {is_old}")
        report = zexport.consolidate(root, tmp_path / f"out {is_old}", _MEMORY)
        warned = [warning for warning in report.warnings if "no checksums" in warning]
        assert len(warned) == is_old


@pytest.mark.parametrize("name", ["z2_w2_bf16_late", "z3_w2_bf16_late"])
def test_weight_frozen_during_training_is_compared_with_its_frozen_copy(
    name: str, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    zexport.consolidate(root, tmp_path / "out", _MEMORY)
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype.itemsize == 4
    )

    def change(state: dict[str, Any]) -> None:
        state["frozen_param_fragments"]["model.embed_tokens.weight"] += 1

    edit(file_of(root, "*rank_00_model*" if "z2" in name else "*rank_1_*_model*"), change)
    with pytest.raises(DamagedCheckpointError, match=r"model\.embed_tokens\.weight"):
        zexport.consolidate(root, tmp_path / "again", _MEMORY)
