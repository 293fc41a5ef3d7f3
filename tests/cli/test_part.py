"""``--part``: typed, or as the launcher says."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from zexport.cli.part import Part, executing, launched
from zexport.errors import UsageError
from zexport.run.shares import Share


@pytest.mark.parametrize(
    ("variables", "count", "expected"),
    [
        ({"RANK": "2", "WORLD_SIZE": "8"}, None, "3/8"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None, "1/4"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "1", "WORLD_SIZE": "2"}, None, "2/2"),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, None, "4/4"),
        ({"JOB_COMPLETION_INDEX": "5"}, 6, "6/6"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None, "1/1"),
    ],
)
def test_each_launcher_says_which_process_this_is(
    variables: dict[str, str], count: int | None, expected: str
) -> None:
    assert str(launched(variables, count)) == expected


def test_an_array_may_begin_anywhere_and_go_in_steps() -> None:
    array = {
        "SLURM_ARRAY_TASK_ID": "14",
        "SLURM_ARRAY_TASK_COUNT": "3",
        "SLURM_ARRAY_TASK_MIN": "10",
        "SLURM_ARRAY_TASK_STEP": "4",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
    }
    assert launched(array, None) == Share(2, 3)


@pytest.mark.parametrize(
    ("variables", "count", "told"),
    [
        ({}, None, "JOB_COMPLETION_INDEX, and how many there are"),
        ({"JOB_COMPLETION_INDEX": "1"}, None, "auto/8"),
        (
            {"RANK": "0", "WORLD_SIZE": "16", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            None,
            "1/16 by torchrun, 2/2 by Slurm",
        ),
        ({"RANK": "9", "WORLD_SIZE": "8"}, None, "part 10/8 is none of 1/8 to 8/8"),
        ({"RANK": "zero", "WORLD_SIZE": "8"}, None, "'zero'"),
    ],
)
def test_what_does_not_say_one_thing_is_refused(
    variables: dict[str, str], count: int | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        launched(variables, count)


def test_every_training_shell_has_a_rank_that_means_nothing_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Part().convert("1/2", None, None) == Share(1, 2)
    assert Part().convert("auto", None, None) == Share(4, 8)


@pytest.mark.parametrize("typed", ["0/4", "5/4", "3", "1/0", "-1/4", "a/b", "auto/0", "1/4/2", ""])
def test_a_part_that_is_none_is_refused(typed: str) -> None:
    with pytest.raises(click.BadParameter):
        Part().convert(typed, None, None)


def test_one_part_of_what_a_cluster_writes_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="--ray has all parts written, and --part one"),
        executing([tmp_path], tmp_path / "out", Share(1, 2), "local", lambda: None),
    ):
        pass
