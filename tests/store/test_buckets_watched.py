"""Runs and exports in buckets, watched: moto's server answers, over real HTTP."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import obstore
import pytest

import zexport
from tests.support.buckets import BUCKET, Request, Server
from tests.support.checkpoints import Run, edit, save, small_model
from zexport import WatchEvent, WatchOptions, consolidate, watch
from zexport.beside import ledger
from zexport.beside import watch as watching
from zexport.beside.events import EventKind
from zexport.beside.jobs import Job, start_export
from zexport.errors import OutputError
from zexport.filenames import MANIFEST_NAME

ONCE = WatchOptions(once=True)
OFTEN = WatchOptions(interval_s=0.1)

Save = Callable[[int], Path]
pytestmark = pytest.mark.usefixtures("server")


class Watched(NamedTuple):
    """Names below a prefix of the test's own."""

    name: str
    run: str
    outs: str


@pytest.fixture
def at(request: pytest.FixtureRequest) -> Watched:
    """A run and its exports in the bucket."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return Watched(name, f"s3://{BUCKET}/{name}/run", f"s3://{BUCKET}/{name}/outs")


@pytest.fixture
def saved(server: Server, at: Watched, tmp_path: Path) -> Save:
    """A checkpoint as the Trainer makes it, put into the run in the bucket."""

    def saved(step: int) -> Path:
        folder = tmp_path / "near" / f"checkpoint-{step}"
        one = Run(steps=step, optimizer_step=float(step))
        save(small_model(), one, folder, f"global_step{step}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        server.put(folder, f"{at.name}/run/{folder.name}")
        return folder

    return saved


def _told(events: list[WatchEvent]) -> list[tuple[EventKind, str]]:
    return [(one.event, one.checkpoint) for one in events]


def _weights(server: Server, name: str, checkpoint: str) -> bytes:
    return server.get(f"{name}/outs/{checkpoint}")["model.safetensors"]


def test_a_run_in_a_bucket_is_exported_into_it_once_and_looked_at_for_little(
    saved: Save, at: Watched, server: Server, tmp_path: Path
) -> None:
    folders = [saved(step) for step in (2, 4, 6)]
    options = WatchOptions(once=True, keep=2)
    exported = [(EventKind.EXPORTED, one.name) for one in folders]
    removed = (EventKind.REMOVED, "checkpoint-2")
    assert _told([*watch(at.run, at.outs, options)]) == [*exported, removed]
    consolidate(folders[-1], tmp_path / "6")
    whole = (tmp_path / "6" / "model.safetensors").read_bytes()
    assert _weights(server, at.name, "checkpoint-6") == whole
    assert zexport.verify_export(f"{at.outs}/checkpoint-4", against=f"{at.run}/checkpoint-4").ok
    assert not server.get(f"{at.name}/outs/checkpoint-2")
    server.requests.clear()
    assert [*watch(at.run, at.outs, options)] == []
    assert len(server.requests) <= 15
    obstore.put(server.store, f"{at.name}/outs/.zexport-watch/removed-checkpoint-4", b"")
    told = _told([*watch(at.run, at.outs, options)])  # its removal was interrupted
    assert told == [(EventKind.NOT_AGAIN, "checkpoint-4")]
    assert not server.get(f"{at.name}/outs/checkpoint-4")


def test_a_checkpoint_that_the_run_removes_is_told_as_lost_and_never_half_there(
    saved: Save, at: Watched, server: Server
) -> None:
    first = saved(2)
    saved(4)

    def remove(one: Request) -> None:
        if one.method == "PUT" and "outs/checkpoint-2/.zexport_journal/plan" in one.key:
            server.fault = lambda _: None
            folder = f"{at.name}/run/{first.name}"
            obstore.delete(server.store, [f"{folder}/{key}" for key in server.get(folder)])

    server.fault = remove
    events = [*watch(at.run, at.outs, ONCE)]
    kinds = [(EventKind.LOST, "checkpoint-2"), (EventKind.EXPORTED, "checkpoint-4")]
    assert _told(events) == kinds
    assert not server.get(f"{at.name}/outs/checkpoint-2")


def test_a_checkpoint_that_is_uploaded_anew_meanwhile_is_not_published_as_a_mixture(
    saved: Save, at: Watched, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(2)

    def start(checkpoint: Path, out_dir: Path, words: Sequence[str]) -> Job:
        (path,) = folder.glob("*/*rank_1*optim*")
        key = f"{at.name}/run/{path.relative_to(folder.parent)}"
        edit(path, lambda state: state["optimizer_state_dict"]["fp32_flat_groups"][0].add_(1))
        obstore.put(server.store, key, path.read_bytes())
        return start_export(checkpoint, out_dir, words)

    monkeypatch.setattr(watching, "start_export", start)
    events = watch(at.run, at.outs, ONCE)
    assert next(events).event is EventKind.CHANGED
    events.close()
    assert MANIFEST_NAME not in server.get(f"{at.name}/outs/checkpoint-2")


def test_checkpoints_of_a_disk_wait_pinned_for_their_export_into_a_bucket(
    saved: Save, at: Watched, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent.with_name("cache")))
    saved(4)
    events = watch(folder.parent, at.outs, OFTEN)
    assert next(events).checkpoint == "checkpoint-2"
    shutil.rmtree(folder.parent / "checkpoint-4")
    assert _told([next(events)]) == [(EventKind.EXPORTED, "checkpoint-4")]
    events.close()
    assert MANIFEST_NAME in server.get(f"{at.name}/outs/checkpoint-4")


def test_of_two_watches_the_one_that_exports_goes_on(
    saved: Save, at: Watched, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "BEAT_S", 0.4)
    monkeypatch.setattr(watching, "BEAT_S", 0.1)
    saved(2)
    refused: list[str] = []

    def begin_another(one: Request) -> None:
        if one.method == "PUT" and "outs/checkpoint-2/.zexport_journal/plan" in one.key:
            server.fault = lambda _: None
            with pytest.raises(OutputError, match="another watch exports"):
                next(watch(at.run, at.outs, ONCE))
            refused.append(one.key)

    server.fault = begin_another
    idle = watch(at.run, at.outs, OFTEN)
    assert _told([next(idle)]) == [(EventKind.EXPORTED, "checkpoint-2")]
    assert refused
    saved(4)
    assert _told([*watch(at.run, at.outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-4")]
    saved(6)
    with pytest.raises(OutputError, match="another watch exports into this folder"):
        next(idle)
