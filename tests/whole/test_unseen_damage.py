"""Damage that leaves tables and lengths plausible: refused, by what gives it away."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Model, Run, save, values
from tests.support.expert_checkpoints import rank_file_classes, rewrite
from tests.support.real_cases import copied, file_of
from zexport import DamagedCheckpointError, ExportOptions, FindingKind, NameLayout

_MEMORY = ExportOptions(layout=NameLayout.MEMORY)


def _refused(root: Path, out: Path, match: str) -> DamagedCheckpointError:
    """The one error of an export, which a look at the checkpoint alone tells as well."""
    assert zexport.open_checkpoint(root).problems
    with pytest.raises(DamagedCheckpointError, match=match) as caught:
        zexport.consolidate(root, out, _MEMORY)
    assert not out.exists()
    return caught.value


# --- copies of files ---


def _save_nameless(path: Path, *, is_old: bool) -> None:
    """Write a rank file anew as the writers do whose files do not keep their own name."""
    stream = io.BytesIO()

    def note(state: dict[str, Any]) -> None:
        with rank_file_classes():
            torch.save(state, stream, _use_new_zipfile_serialization=not is_old)

    rewrite(path, note)
    path.write_bytes(stream.getvalue())


@pytest.mark.parametrize("is_old", [True, False], ids=["old container", "written to a stream"])
@pytest.mark.parametrize("name", ["z3_w2_bf16_frozen", "z3_w4_bf16_odd"])
def test_one_ranks_file_in_the_place_of_another_is_known_without_a_name_in_it(
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


def _stripes(value: torch.Tensor, steps: int, root: Path) -> Path:
    """A run of two ranks whose files are alike in all they hold."""
    return save(Model([{"w": value}]), Run(stage=3, steps=steps, legacy=True), root)


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (torch.ones(64, 64), 2),
        (torch.arange(8.0).repeat(2, 200), 2),
        (values((1, 3000), 1).repeat(2, 1), 0),
    ],
    ids=["constants", "few values", "as it was made"],
)
def test_stripes_that_may_rightly_be_equal_are_no_copies(
    value: torch.Tensor, steps: int, tmp_path: Path
) -> None:
    root = _stripes(value, steps, tmp_path / "ckpt")
    shutil.copy(file_of(root, "*rank_1_*optim*"), file_of(root, "*rank_0_*optim*"))
    assert zexport.open_checkpoint(root).problems == ()


# --- copies in the module ---


# --- ties ---


def test_a_tied_name_with_another_weights_values_is_refused(tmp_path: Path) -> None:
    """The module's view of it is of one shape with the weight that the record names."""
    masters = {"one": values((40, 30), 1), "two": values((40, 30), 2)}
    root = save(Model([masters], tied={"again": "one"}), Run(stage=2), tmp_path / "ckpt")
    record = {"again": "two"}
    rewrite(file_of(root, "mp_rank_00_model*"), lambda state: state["shared_params"].update(record))
    with pytest.raises(DamagedCheckpointError, match=r"again \(768 of 768 compared\)") as caught:
        zexport.consolidate(root, tmp_path / "out", _MEMORY)
    assert caught.value.finding is FindingKind.CAST_MISMATCH


def test_frozen_weights_that_begin_at_one_address_are_not_tied(tmp_path: Path) -> None:
    """DeepSpeed records a tie by address, of a frozen weight and a view of its beginning too."""
    whole = values((6, 4), 1, torch.bfloat16)
    model = Model([{"w": values((5,), 2)}], frozen={"whole": whole, "part": whole[:2]})
    run = Run(stage=1, client_state={"shared_params": {"part": "whole"}})
    zexport.consolidate(save(model, run, tmp_path / "ckpt"), tmp_path / "out", _MEMORY)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["part"], whole[:2].float())


# --- what no check can see ---


def test_an_export_of_files_without_checksums_says_so(tmp_path: Path) -> None:
    model = Model([{"w": values((5,), 1)}])
    for is_old in (True, False):
        root = save(model, Run(stage=3, legacy=is_old), tmp_path / f"ckpt {is_old}")
        report = zexport.consolidate(root, tmp_path / f"out {is_old}", _MEMORY)
        told = [warning for warning in report.warnings if "no checksums" in warning]
        assert len(told) == is_old


@pytest.mark.parametrize("name", ["z2_w2_bf16_late", "z3_w2_bf16_late"])
def test_a_weight_frozen_late_is_its_master_and_the_frozen_copy_of_it_is_held_against_that(
    name: str, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    zexport.consolidate(root, tmp_path / "out", _MEMORY)
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype.itemsize == 4
    )

    def change(state: dict[str, Any]) -> None:
        state["frozen_param_fragments"]["model.embed_tokens.weight"] += 1

    rewrite(file_of(root, "*rank_00_model*" if "z2" in name else "*rank_1_*_model*"), change)
    with pytest.raises(DamagedCheckpointError, match=r"model\.embed_tokens\.weight"):
        zexport.consolidate(root, tmp_path / "again", _MEMORY)
