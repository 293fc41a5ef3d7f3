"""Rank files held against each other: all here, and of one save."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Run, deepspeed_names, edit, save, small_model
from zexport.checkpoint.rank_files import list_rank_files
from zexport.checkpoint.ranks import RankStates, read_ranks
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, ZexportError
from zexport.findings import FindingKind

_OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def _read(root: Path) -> RankStates:
    folder = root / "global_step2"
    return read_ranks(folder, list_rank_files(folder))


def _problem(root: Path) -> ZexportError:
    (problem,) = _read(root).problems
    return problem


def test_a_whole_save_has_no_problem(zero2: Path, zero3: Path) -> None:
    two, three = _read(zero2), _read(zero3)
    assert (two.problems, two.world_size, two.is_zero3) == ((), 2, False)
    assert (three.problems, three.world_size, three.is_zero3) == ((), 3, True)


def test_missing_ranks_are_named_by_number(tmp_path: Path) -> None:
    root = save(small_model(), Run(world_size=6), tmp_path / "ckpt")
    for rank in (1, 3, 4):
        (root / "global_step2" / _OPTIMIZER.format(rank)).unlink()
    problem = _problem(root)
    assert isinstance(problem, IncompleteCheckpointError)
    assert "optimizer files of ranks 1, 3-4" in problem.problem
    assert problem.found == "3 of 6 ranks"


def test_a_group_of_ranks_that_holds_the_whole_model_is_a_whole_save(tmp_path: Path) -> None:
    ranks = _read(save(small_model(), Run(world_size=2, replica_groups=2), tmp_path))
    assert (ranks.problems, ranks.world_size, ranks.missing_ranks) == ((), 2, ())


def test_files_of_other_groups_are_surplus_to_a_whole_one(tmp_path: Path) -> None:
    root = save(small_model(), Run(world_size=2, replica_groups=2), tmp_path)
    for rank in (0, 1):
        path = root / "global_step2" / _OPTIMIZER.format(rank)
        with deepspeed_names():
            state = torch.load(path, weights_only=False)
            torch.save(state, path.with_name(_OPTIMIZER.format(rank + 2)))
    problem = _problem(root)
    assert "ranks 2-3, beyond its world size" in problem.problem
    assert problem.expected == "2, ranks 0-1"


def test_files_of_a_larger_save_are_surplus_to_a_whole_one_and_nothing_more(
    tmp_path: Path,
) -> None:
    root = save(small_model(), Run(world_size=2), tmp_path / "two") / "global_step2"
    other = save(small_model(), Run(world_size=3), tmp_path / "three") / "global_step2"
    for path in other.glob("*rank_2_*"):
        shutil.copy(path, root)
    problem = _problem(root.parent)
    assert "rank 2, beyond its world size" in problem.problem
    next(root.glob("*rank_2_*optim*")).unlink()
    assert "rank 2, beyond its world size" in _problem(root.parent).problem


@pytest.mark.parametrize("stage", [2, 3])
def test_rank_0s_model_file_is_needed(stage: int, tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=stage), tmp_path / "ckpt")
    (path,) = root.glob("*/*mp_rank_00_model_states.pt" if stage == 2 else "*/*rank_0_*model*")
    path.unlink()
    problem = _problem(root)
    assert isinstance(problem, IncompleteCheckpointError)
    assert problem.expected == path.name


def test_files_of_a_larger_world_are_surplus(zero2: Path, tmp_path: Path) -> None:
    larger = save(small_model(), Run(stage=2, world_size=4), tmp_path / "larger")
    for rank in (2, 3):
        name = f"global_step2/{_OPTIMIZER.format(rank)}"
        shutil.copy(larger / name, zero2 / name)
    problem = _problem(zero2)
    assert "files of ranks 2-3" in problem.problem
    assert problem.finding is FindingKind.STRAY_FILES


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (Run(stage=2, world_size=3), "partition count"),
        (Run(stage=1), "ZeRO stage"),
        (Run(stage=2, steps=4), "optimizer step"),
        (Run(stage=2, optimizer_step=5), "optimizer step"),
        (Run(stage=2, ds_version="0.18.9"), "DeepSpeed version"),
    ],
)
def test_a_rank_file_of_another_save_is_seen(
    run: Run, what: str, zero2: Path, tmp_path: Path
) -> None:
    other = save(small_model(), run, tmp_path / "other")
    name = f"global_step2/{_OPTIMIZER.format(1)}"
    shutil.copy(other / name, zero2 / name)
    problems = [problem for problem in _read(zero2).problems if what in problem.problem]
    assert len(problems) == 1
    assert isinstance(problems[0], DamagedCheckpointError)
    assert str(problems[0].found).endswith("on rank 1")


def test_a_rank_file_of_other_groups_is_seen(zero2: Path, tmp_path: Path) -> None:
    model = small_model()
    alone = replace(model, groups=[model.masters])
    name = f"global_step2/{_OPTIMIZER.format(1)}"
    shutil.copy(save(alone, Run(stage=2), tmp_path / "other") / name, zero2 / name)
    problems = [one.problem for one in _read(zero2).problems]
    assert sum(one.endswith("differ in the number of flat groups") for one in problems) == 1


def test_a_model_file_of_a_run_on_other_ranks_is_seen(zero3: Path, tmp_path: Path) -> None:
    other = save(small_model(), Run(stage=3, world_size=2), tmp_path / "other")
    name = "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt"
    shutil.copy(other / name, zero3 / name)
    assert "differ in the number of data-parallel ranks" in _problem(zero3).problem


def test_a_model_file_of_another_step_is_seen(zero3: Path, tmp_path: Path) -> None:
    other = save(small_model(), Run(stage=3, world_size=3, steps=4), tmp_path / "other")
    name = "global_step2/zero_pp_rank_2_mp_rank_00_model_states.pt"
    shutil.copy(other / name, zero3 / name)
    assert "differ in the global step" in _problem(zero3).problem


@pytest.mark.parametrize(
    "step", [None, 2, torch.tensor(2), torch.tensor(2.0), torch.tensor(float("nan"))], ids=str
)
def test_however_an_optimizer_counts_one_save_has_no_problem(step: object, tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=2, optimizer_step=step), tmp_path / "ckpt")
    assert _read(root).problems == ()


def test_swapped_rank_files_are_known_by_the_name_they_were_written_under(zero3: Path) -> None:
    one, two = (zero3 / "global_step2" / _OPTIMIZER.format(rank) for rank in (0, 1))
    one.rename(zero3 / "aside")
    two.rename(one)
    (zero3 / "aside").rename(two)
    problems = _read(zero3).problems
    assert [p.problem for p in problems][:2] == ["was written under another name"] * 2


def test_a_file_written_aside_and_renamed_into_place_is_accepted(zero3: Path) -> None:
    path = zero3 / "global_step2" / _OPTIMIZER.format(1)
    with deepspeed_names():
        state = torch.load(path, weights_only=False)
        torch.save(state, path.with_name(f"{path.name}.tmp"))
    path.with_name(f"{path.name}.tmp").rename(path)
    assert _read(zero3).problems == ()


def test_two_files_of_one_rank_are_not_of_one_save(zero2: Path) -> None:
    path = zero2 / "global_step2" / _OPTIMIZER.format(1)
    with deepspeed_names():
        state = torch.load(path, weights_only=False)
        torch.save(state, path.with_name(path.name.removeprefix("bf16_")))
    assert "a second file of rank 1" in _problem(zero2).problem


def test_files_of_a_bf16_run_and_of_another_are_not_of_one_save(zero3: Path) -> None:
    path = zero3 / "global_step2" / _OPTIMIZER.format(1)
    with deepspeed_names():
        state = torch.load(path, weights_only=False)
        torch.save(state, path.with_name(path.name.removeprefix("bf16_")))
    path.unlink()
    problem = _problem(zero3)
    assert "prefix of the file names" in problem.problem
    assert problem.found == "bf16_ on ranks 0, 2 but no on rank 1"


@pytest.mark.parametrize("content", [b"", b"not torch", b"PK\x03\x04"])
def test_a_file_that_is_not_whole_is_named(content: bytes, zero2: Path) -> None:
    path = zero2 / "global_step2" / _OPTIMIZER.format(1)
    path.write_bytes(content)
    problem = _problem(zero2)
    assert isinstance(problem, DamagedCheckpointError)
    assert problem.path == path


def test_every_problem_is_gathered(zero3: Path) -> None:
    folder = zero3 / "global_step2"
    (folder / _OPTIMIZER.format(0)).write_bytes(b"")
    (folder / _OPTIMIZER.format(1)).unlink()

    def later(state: dict[str, Any]) -> None:
        state["global_steps"] = 9

    edit(folder / "zero_pp_rank_2_mp_rank_00_model_states.pt", later)
    assert len(_read(zero3).problems) == 3
