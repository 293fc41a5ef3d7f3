"""A rank file that is replaced, by one of the same size, while an export reads it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import edit
from tests.support.stopping import Job, files, four_shards
from tests.torture.faults import Calls, watched
from tests.torture.kills import count_calls
from zexport import CheckpointError, verify_export


def every_change(folder: Path, step: int) -> str:
    """Replace or overwrite the file before every ``step``-th call; describe the results."""
    job = four_shards(folder)
    (source,) = job.source.glob("*/*rank_1_*optim*")
    old, new = folder / "old" / source.name, folder / "new" / source.name
    for kept in (old, new):
        kept.parent.mkdir()
        shutil.copy2(source, kept)
    edit(new, _change)
    assert new.stat().st_size == old.stat().st_size
    before = job.made()
    shutil.copy2(new, source)
    after = job.made()
    shutil.copy2(old, source)
    found: Counter[str] = Counter()
    for act in (_replace, _overwrite):
        for at in range(1, count_calls(job).total() + 1, step):
            shutil.copy2(old, source)
            found[_changed(job, at, lambda: act(source, new), before, after)] += 1  # noqa: B023
    assert found["refused"] > 0
    return f"{found.total()} changes: {dict(found)}"


def _change(state: Any) -> None:
    """Another value, equal when rounded to the module's bf16."""
    (flat,) = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flat.view(torch.int32)[[0, -1]] ^= 1


def _replace(source: Path, new: Path) -> None:
    shutil.copy2(new, source.with_suffix(".new"))
    source.with_suffix(".new").rename(source)


def _overwrite(source: Path, new: Path) -> None:
    shutil.copy2(new, source)


def _changed(
    job: Job,
    at: int,
    act: Callable[[], None],
    before: dict[str, bytes],
    after: dict[str, bytes],
) -> str:
    def change(_name: str, number: int) -> None:
        if number == at:
            act()

    refusal, calls = "", Calls(change)
    try:
        with watched(calls):
            job.run()
    except CheckpointError as error:
        refusal = str(error)
    if refusal:
        assert "rank_1" in refusal
        assert not job.out.exists()
        job.run()
    made, now = files(job.out), after if calls.counts.total() >= at else before
    assert made in (before, after), f"changed at {at}: the output mixes two files"
    assert made == now or not refusal, f"changed at {at}: the rerun kept what is outdated"
    assert verify_export(job.out, against=job.source).ok == (made == now)
    shutil.rmtree(job.out)
    return "refused" if refusal else "exported as before" if made == before else "exported as after"
