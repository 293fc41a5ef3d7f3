"""Problems of an opened checkpoint that prevent an export, and those that do not."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.support.checkpoints import Run, edit, model_file, save, small_model
from tests.support.forked import typed
from zexport import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    UnsafeError,
    UnsupportedError,
    consolidate,
    open_checkpoint,
)


def test_missing_model_states_matter_only_with_frozen_weights(tmp_path: Path) -> None:
    for name, run, needed in (("frozen", Run(), 4), ("none", Run(exclude_frozen=True), 3)):
        root = save(small_model(), run, tmp_path / name)
        assert sum(file.needed for file in open_checkpoint(root).files) == needed
        model_file(root / "global_step2", run, 1).unlink()
    with pytest.raises(IncompleteCheckpointError, match="rank 1"):
        consolidate(tmp_path / "frozen", tmp_path / "out")
    opened = open_checkpoint(tmp_path / "none")
    assert (opened.problems, "of rank 1 are missing" in str(opened.notes)) == ((), True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_optimizer_states_missing_is_incomplete(stage: int, tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=stage), tmp_path)
    for path in [*root.glob("*/*_optim_states.pt"), *root.glob("*/*rank_1_*_model_states.pt")]:
        path.unlink()
    (problem,) = open_checkpoint(root).problems
    assert (type(problem), problem.path) == (IncompleteCheckpointError, root / "global_step2")
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in (problem.expected or "")


def test_tensors_swapped_to_nvme_are_unsupported(zero3: Path) -> None:
    for path in zero3.glob("*/*_optim_states.pt"):
        edit(path, lambda state: state["optimizer_state_dict"]["fp32_flat_groups"].pop())
    for kind in (DamagedCheckpointError, UnsupportedError):
        (problem,) = open_checkpoint(zero3).problems
        assert type(problem) is kind
        (zero3 / "global_step2" / "offloaded_tensors").mkdir(exist_ok=True)


def test_all_problems_are_reported_with_the_gravest_exit_code(zero3: Path, tmp_path: Path) -> None:
    folder = zero3 / "global_step2"
    (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    done = typed("consolidate", zero3, tmp_path / "out")
    assert done.returncode == DamagedCheckpointError.exit_code
    assert all(word in done.stderr for word in ("2 problems", "is empty", "rank 1"))
    hide = {"buffer_names": io.BytesIO(b"names")}
    edit(folder / "zero_pp_rank_2_mp_rank_00_model_states.pt", lambda state: state.update(hide))
    assert typed("consolidate", zero3, tmp_path / "out").returncode == UnsafeError.exit_code
