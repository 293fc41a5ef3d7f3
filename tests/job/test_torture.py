"""Kills, refusals and full disks, at a few points each; ``make torture`` tries all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stopping import Job
from tests.torture.changes import every_change
from tests.torture.faults import Calls, watched
from tests.torture.kills import count_calls, killed_at, killed_twice, killed_workers
from tests.torture.memory import refused_memory
from tests.torture.power_loss import COMMANDS, Command, cut_everywhere
from tests.torture.refusals import ALWAYS, FAULTS, Fault, every_fault
from tests.torture.small_disk import every_filling, every_size
from zexport import DamagedCheckpointError

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("job", ["zero", "fsdp"], indirect=True)
def test_killed_export_leaves_all_or_nothing(job: Job, whole: dict[str, bytes]) -> None:
    count = count_calls(job).total()
    taken_over = [killed_at(job, at, whole) for at in range(1, count + 1, count // 9)]
    assert max(taken_over) > 0


def test_killed_rerun_leaves_all_or_nothing(job: Job, whole: dict[str, bytes]) -> None:
    count = count_calls(job).total()
    assert killed_twice(job, count // 2, count // 3, whole) > 2


def test_killed_workers_leave_all_or_nothing(job: Job, whole: dict[str, bytes]) -> None:
    assert killed_workers(job, 3, 4, seed=1, whole=whole)["kills"] >= 4


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_refused_system_call_leaves_nothing_half_made(
    job: Job, whole: dict[str, bytes], fault: Fault
) -> None:
    stopped = [*every_fault(job, fault, whole)]
    assert stopped[0] or fault.times < ALWAYS


@pytest.mark.slow
@pytest.mark.parametrize("make", COMMANDS)
def test_power_cut_leaves_all_or_nothing(tmp_path: Path, make: Callable[[Path], Command]) -> None:
    assert cut_everywhere(make(tmp_path), count=20, step=5) > 30


def test_disk_too_small_is_reported_before_a_byte_is_written(tmp_path: Path) -> None:
    assert every_size(tmp_path, step=400)


def test_disk_filled_by_another_process_is_refused_and_resumed(tmp_path: Path) -> None:
    assert every_filling(tmp_path, step=29)


def test_refused_memory_ends_with_an_error_and_is_resumed(
    job: Job, whole: dict[str, bytes]
) -> None:
    found = refused_memory(job, whole, (1_000, 20_000, 57_000), (1 << 20, 9 << 20, 100 << 20))
    assert {"refused", "exported"} <= {*found.split("'")}


def test_source_replaced_by_another_of_its_size_is_never_mixed(tmp_path: Path) -> None:
    assert every_change(tmp_path, step=71)


@pytest.mark.parametrize("change", ["cut", "touched"])
def test_source_that_changes_while_it_is_read_is_refused(job: Job, change: str) -> None:
    (source,) = job.source.glob("*/*rank_1_*optim*")
    with watched(Calls()) as before:
        job.made()

    def act(name: str, _number: int) -> None:
        if name != "preadv" or calls.counts[name] != before.counts[name] - 12:
            return
        if change == "cut":
            os.truncate(source, source.stat().st_size // 3)
        else:
            os.utime(source)

    calls = Calls(act)
    with watched(calls), pytest.raises(DamagedCheckpointError, match=r"changed|too early|bytes"):
        job.run()
    assert not job.left()
