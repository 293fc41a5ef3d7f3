"""Runs and exports in a bucket, watched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

import zexport
from tests.support.buckets import Request, Server
from tests.support.checkpoints import Run, save, small_model
from zexport import EventKind, WatchEvent, WatchOptions, consolidate, watch

ONCE = WatchOptions(once=True)
Save = Callable[[int], Path]


@pytest.fixture
def saved(server: Server, prefix: str, tmp_path: Path) -> Save:
    """Save a checkpoint as the Trainer does, and upload it."""

    def saved(step: int) -> Path:
        folder = tmp_path / "near" / f"checkpoint-{step}"
        one = Run(steps=step, optimizer_step=float(step))
        save(small_model(), one, folder, f"global_step{step}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        server.put(folder, f"{prefix}/run/{folder.name}")
        return folder

    return saved


def _kinds(events: list[WatchEvent]) -> list[tuple[EventKind, str]]:
    return [(one.event, one.checkpoint) for one in events]


def _begins(one: Request) -> bool:
    return one.method == "PUT" and "outs/checkpoint-2/" in one.key


def test_run_in_a_bucket_is_exported_once_and_looked_at_for_little(
    saved: Save, out: str, prefix: str, server: Server, tmp_path: Path
) -> None:
    folders = [saved(step) for step in (2, 4, 6)]
    run, outs, options = f"{out}/run", f"{out}/outs", WatchOptions(once=True, keep=2)
    exported = [(EventKind.EXPORTED, one.name) for one in folders]
    assert _kinds([*watch(run, outs, options)]) == [*exported, (EventKind.REMOVED, "checkpoint-2")]
    consolidate(folders[-1], tmp_path / "6")
    weights = (tmp_path / "6" / "model.safetensors").read_bytes()
    assert server.get(f"{prefix}/outs/checkpoint-6")["model.safetensors"] == weights
    assert zexport.verify_export(f"{outs}/checkpoint-4", against=f"{run}/checkpoint-4").ok
    assert not server.get(f"{prefix}/outs/checkpoint-2")
    server.requests.clear()
    assert [*watch(run, outs, options)] == []
    looks = [one for one in server.requests if not one.key.endswith(".safetensors")]
    assert len(looks) <= 18  # and shards as new as their manifest are read


def test_checkpoint_that_the_run_removes_is_lost_and_never_half_there(
    saved: Save, out: str, prefix: str, server: Server
) -> None:
    first = saved(2)
    saved(4)

    def remove(one: Request) -> None:
        if _begins(one):
            server.fault = lambda _: None
            folder = f"{prefix}/run/{first.name}"
            obstore.delete(server.store, [f"{folder}/{key}" for key in server.get(folder)])

    server.fault = remove
    kinds = [(EventKind.LOST, "checkpoint-2"), (EventKind.EXPORTED, "checkpoint-4")]
    assert _kinds([*watch(f"{out}/run", f"{out}/outs", ONCE)]) == kinds
    assert not server.get(f"{prefix}/outs/checkpoint-2")
