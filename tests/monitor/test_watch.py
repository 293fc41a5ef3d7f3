"""Checkpoints of a run that goes on, each exported by a process of its own."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.support.checkpoints import Model, Run, save, small_model, values
from tests.support.forked import typed
from zexport import (
    CheckpointError,
    EventKind,
    ExportOptions,
    NotACheckpointError,
    OutputError,
    UsageError,
    WatchEvent,
    WatchOptions,
    consolidate,
    watch,
)
from zexport.monitor import ledger, lookout, pins, sightings
from zexport.monitor import watch as watching
from zexport.monitor.jobs import Job, start_export, told_by
from zexport.storage.locks import is_being_written
from zexport.storage.symlink_policy import Boundary

ONCE = WatchOptions(once=True)
OFTEN = WatchOptions(interval_s=0.1)


def _save(run: Path, step: int, *, is_whole: bool = True, **state: object) -> Path:
    """A checkpoint as the Trainer makes it; the file that says it is complete comes last."""
    folder = run / f"checkpoint-{step}"
    save(small_model(), Run(steps=step, optimizer_step=float(step)), folder, f"global_step{step}")
    if is_whole:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, **state}))
    return folder


def _shell(script: str) -> str:
    """A script as a command after an export; ``$1`` is the folder, ``$2`` the step."""
    return f"sh -c {shlex.quote(script)} sh {{}} {{step}}"


class _Killed(Job):
    """One whose process could not tell what it had done, or had just told it."""

    def __init__(self, told: str) -> None:
        self._told = told

    def output(self) -> tuple[str, str]:
        return self._told, ""


def _noted(outs: Path, **changes: object) -> None:
    """Have the ledger say something else of checkpoint-2, as it was when a watch was killed."""
    noted = outs / ".zexport-watch" / "ledger.json"
    record = json.loads(noted.read_text())
    record["entries"]["checkpoint-2"] |= changes
    noted.write_text(json.dumps(record))


def _told(events: list[WatchEvent]) -> list[tuple[EventKind, str]]:
    return [(one.event, one.checkpoint) for one in events]


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _state(run: Path) -> dict[str, tuple[int, int]]:
    """Names, times and sizes of all that a run holds."""
    there = (run, *run.rglob("*"))
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in there}


def test_every_complete_checkpoint_is_exported_once_as_consolidate_does(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    run.mkdir()
    assert [*watch(run, outs, ONCE)] == []
    for step in (2, 4):
        _save(run, step)
    _save(run, 6, is_whole=False)
    before = _state(run)
    options = ExportOptions(dtype="bf16", max_shard_nbytes=10**6)  # type: ignore[arg-type]
    events = [*watch(run, outs, ONCE, options)]
    assert _told(events) == [
        (EventKind.EXPORTED, "checkpoint-2"),
        (EventKind.EXPORTED, "checkpoint-4"),
        (EventKind.WAITING, "checkpoint-6"),
    ]
    assert [one.step for one in events[:2]] == [2, 4]
    assert "trainer_state.json" in events[2].why
    assert _state(run) == before
    for step in (2, 4):
        consolidate(run / f"checkpoint-{step}", tmp_path / f"{step}", options)
        assert _files(outs / f"checkpoint-{step}") == _files(tmp_path / f"{step}")
    _save(run, 6)
    assert _told([*watch(run, outs, ONCE, options)]) == [(EventKind.EXPORTED, "checkpoint-6")]
    assert [*(outs / ".zexport-watch" / "pins").iterdir()] == []


def test_a_checkpoint_that_waits_is_exported_though_the_run_removes_it(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4):
        _save(run, step)
    consolidate(run / "checkpoint-4", tmp_path / "4")
    events = watch(run, outs, OFTEN)
    assert next(events).checkpoint == "checkpoint-2"
    shutil.rmtree(run / "checkpoint-4")
    second = next(events)
    assert (second.event, second.checkpoint) == (EventKind.EXPORTED, "checkpoint-4")
    assert _files(outs / "checkpoint-4") == _files(tmp_path / "4")
    _save(run, 6, is_whole=False)
    timer = threading.Timer(1, shutil.rmtree, [run / "checkpoint-6"])
    timer.start()
    assert next(events).event is EventKind.LOST
    timer.join()
    events.close()


def test_checkpoint_that_cannot_be_hard_linked_is_exported_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]


def test_a_watch_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4, 6):
        _save(run, step)
    events = watch(run, outs, OFTEN)
    assert next(events).checkpoint == "checkpoint-2"
    events.close()
    for step in (2, 4):
        shutil.rmtree(run / f"checkpoint-{step}")
    assert _told([*watch(run, outs, ONCE)]) == [
        (EventKind.EXPORTED, "checkpoint-4"),
        (EventKind.EXPORTED, "checkpoint-6"),
    ]


def test_what_a_killed_watch_has_kept_stays_kept_until_it_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may remove its own at any moment, such as the next one."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4):
        _save(run, step)
    events = watch(run, outs, OFTEN)
    next(events)
    events.close()
    take_over = lookout.Lookout.take_over

    def take_over_and_go(self: lookout.Lookout) -> None:
        take_over(self)
        shutil.rmtree(run / "checkpoint-4")

    monkeypatch.setattr(lookout.Lookout, "take_over", take_over_and_go)
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-4")]


def test_an_export_that_outlives_its_watch_is_waited_for_and_is_the_next_ones(
    tmp_path: Path,
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    with ledger.held(outs) as own:
        (one,) = sightings.look(run, Boundary.of(run))
        ledger.Ledger(outs, own, run).begin(one, 2, "")
    orphan = start_export(run / "checkpoint-2", outs / "checkpoint-2", ())
    while not is_being_written(outs / "checkpoint-2"):
        time.sleep(0.001)
    os.kill(orphan._process.pid, signal.SIGSTOP)
    goes_on = threading.Timer(3, os.kill, [orphan._process.pid, signal.SIGCONT])
    goes_on.start()
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]
    goes_on.join()
    assert orphan.wait(60) == 0
    assert [*watch(run, outs, ONCE)] == []


def test_an_export_that_outlives_its_watch_may_end_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no lock yet when the next watch looked, and so was begun a second time."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    with ledger.held(outs) as own:
        (one,) = sightings.look(run, Boundary.of(run))
        ledger.Ledger(outs, own, run).begin(one, 2, "")

    def start(checkpoint: Path, out_dir: Path, words: Sequence[str]) -> Job:
        consolidate(run / "checkpoint-2", out_dir)
        return start_export(checkpoint, out_dir, words)

    monkeypatch.setattr(watching, "start_export", start)
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]
    assert [*watch(run, outs, ONCE)] == []


def test_an_export_that_was_published_when_the_watch_was_killed_is_not_made_again(
    tmp_path: Path,
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    assert len([*watch(run, outs, ONCE)]) == 1
    _noted(outs, is_begun=True, manifest="")
    then = WatchOptions(once=True, then="true")
    told = [(EventKind.EXPORTED, "checkpoint-2"), (EventKind.RAN, "checkpoint-2")]
    assert _told([*watch(run, outs, then)]) == told
    assert [*watch(run, outs, then)] == []


def test_another_save_is_exported_though_the_watch_was_stopped_while_it_was(
    tmp_path: Path,
) -> None:
    """The export before is the watch's own still, and is replaced."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    assert len([*watch(run, outs, ONCE)]) == 1
    manifest = blake3((outs / "checkpoint-2" / "zexport_manifest.json").read_bytes())
    _noted(outs, is_begun=True, mark="another", found=manifest.hexdigest())
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]


def test_a_full_disk_does_not_end_a_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what it notes has room; that is written with what it notes next."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    events = watch(run, outs, OFTEN)
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "write_durably", refuse)
        assert next(events).event is EventKind.EXPORTED
    _save(run, 4)
    assert next(events).checkpoint == "checkpoint-4"
    events.close()
    assert [*watch(run, outs, ONCE)] == []


def test_what_waits_takes_no_room_that_the_next_save_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the run has removed does: else a training would end for want of an export."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4, 6):
        _save(run, step)
    (outs / "checkpoint-2").mkdir(parents=True)
    (outs / "checkpoint-2" / "thesis.tex").write_text("mine")
    events = watch(run, outs, OFTEN)
    assert next(events).event is EventKind.FAILED
    free = os.statvfs(run)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*free[:4], 0, *free[5:])))
    shutil.rmtree(run / "checkpoint-2")
    told = [next(events) for _ in range(3)]
    events.close()
    assert _told(told) == [
        (EventKind.LOST, "checkpoint-2"),
        (EventKind.EXPORTED, "checkpoint-4"),
        (EventKind.EXPORTED, "checkpoint-6"),
    ]
    assert "its disk needs the room" in told[0].why
    assert [*(outs / ".zexport-watch" / "pins").iterdir()] == []


def test_links_are_read_as_an_export_reads_them(tmp_path: Path) -> None:
    """One that leads elsewhere and is not needed, and a tag that lies elsewhere in the run."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    tag = _save(run, 2) / "global_step2"
    (run / "store" / "of" / "all").mkdir(parents=True)
    tag.rename(run / "store" / "of" / "all" / "there")
    tag.symlink_to(run / "store" / "of" / "all" / "there")
    (tmp_path / "log").write_text("of the launcher")
    (run / "train.log").symlink_to(tmp_path / "log")
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]


def test_another_save_of_the_same_step_replaces_its_export(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    assert len([*watch(run, outs, ONCE)]) == 1
    before = _files(outs / "checkpoint-2")
    shutil.rmtree(run / "checkpoint-2")
    save(small_model(), Run(stage=2, steps=2), run / "checkpoint-2", "global_step2")
    (run / "checkpoint-2" / "trainer_state.json").write_text("{}")
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]
    assert _files(outs / "checkpoint-2") != before


def test_an_edited_export_is_left_and_reported_until_it_is_removed(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    words = ("watch", run, outs, "--once", "-q")
    assert typed(*words).returncode == 0
    weights = outs / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"mine")
    before = _files(outs / "checkpoint-2")
    shutil.rmtree(run / "checkpoint-2")
    save(small_model(), Run(stage=2, steps=2), run / "checkpoint-2", "global_step2")
    (run / "checkpoint-2" / "trainer_state.json").write_text("{}")
    for _ in range(2):
        done = typed(*words)
        assert done.returncode == OutputError.exit_code
        assert "model.safetensors does not contain" in done.stdout
        assert _files(outs / "checkpoint-2") == before
    shutil.rmtree(outs / "checkpoint-2")
    assert typed(*words).returncode == 0
    assert weights.is_file()


def test_a_mixture_of_two_saves_of_one_step_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is written into the files of the first, which a link shows, too."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    again = tmp_path / "again" / "checkpoint-2"
    for folder, seed in ((run / "checkpoint-2", 1), (again, 2)):
        save(Model([{"lin.weight": values((13, 7), seed)}]), Run(), folder)
        (folder / "trainer_state.json").write_text("{}")
    consolidate(again, tmp_path / "whole")

    def start(checkpoint: Path, out_dir: Path, words: Sequence[str]) -> Job:
        for path in again.glob("*/*rank_1*"):
            (run / path.relative_to(again.parent)).write_bytes(path.read_bytes())
        return start_export(checkpoint, out_dir, words)

    with monkeypatch.context() as patch:
        patch.setattr(watching, "start_export", start)
        events = [*watch(run, outs, WatchOptions(once=True, then=f"touch {tmp_path}/ran"))]
    assert [one.event for one in events] == [EventKind.CHANGED, EventKind.WAITING]
    assert not (outs / "checkpoint-2").exists()
    assert not (tmp_path / "ran").exists()
    shutil.copytree(again, run / "checkpoint-2", dirs_exist_ok=True)
    (run / "checkpoint-2" / "trainer_state.json").touch()
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]
    made, whole = _files(outs / "checkpoint-2"), _files(tmp_path / "whole")
    assert made["model.safetensors"] == whole["model.safetensors"]


def test_files_that_are_newer_than_the_state_of_a_trainer_are_being_saved_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    state = _save(run, 2) / "trainer_state.json"
    os.utime(state, (1e9, 1e9))
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.WAITING, "checkpoint-2")]
    monkeypatch.setattr(sightings, "_SETTLED_S", -1)
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]


def test_what_is_saved_last_is_exported_once_it_lies_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training ends seconds after it has saved anew what was exported before."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    assert len([*watch(run, outs, ONCE)]) == 1
    shutil.rmtree(run / "checkpoint-2")
    _save(run, 2)
    monkeypatch.setattr(sightings, "_SETTLED_S", 3)
    events = watch(run, outs, OFTEN, is_over=lambda: True)
    assert _told([*events]) == [(EventKind.EXPORTED, "checkpoint-2")]


@pytest.mark.parametrize("said", ["", '{"schema": 2, "warnings": []}', '{"schema": 2, "warn'])
def test_an_export_that_stands_counts_though_its_process_was_killed(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    monkeypatch.setattr(watching, "told_by", lambda *_: told_by(_Killed(said), -9))
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]
    assert [*watch(run, outs, ONCE)] == []


def test_a_folder_in_a_tag_keeps_no_checkpoint_from_its_export(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    tag = _save(run, 2) / "global_step2"
    (tag / ".ipynb_checkpoints").mkdir()
    (tag / "elsewhere").symlink_to(tmp_path)
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]


@pytest.mark.parametrize("code", [-9, 130, 1])
def test_what_is_kept_stays_where_nothing_shows_that_it_is_gone(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the only copy: the run has removed its own."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    script = {-9: "kill -9 $$", 130: "exit 130", 1: "exit 1"}[code]

    def falters(*_: object) -> sightings.Sighting:
        raise OSError(errno.EIO, "Input/output error")

    def fails(*_: object) -> Job:
        shutil.rmtree(run / "checkpoint-2")
        faulty.setattr(pins, "sighting", falters)
        return Job(("sh", "-c", script), is_heard=False)

    with monkeypatch.context() as faulty:
        faulty.setattr(watching, "start_export", fails)
        assert _told([*watch(run, outs, ONCE)]) == [(EventKind.FAILED, "checkpoint-2")]
    again = [(EventKind.EXPORTED, "checkpoint-2")] if code != 1 else []
    assert _told([*watch(run, outs, ONCE)]) == again


def test_an_export_of_an_older_save_that_a_killed_watch_has_published_is_its_own(
    tmp_path: Path,
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    assert len([*watch(run, outs, ONCE)]) == 1
    _noted(outs, is_begun=True, mark="another", manifest="")
    older_and_this = [(EventKind.EXPORTED, "checkpoint-2")] * 2
    assert _told([*watch(run, outs, ONCE)]) == older_and_this


def test_an_export_that_was_killed_is_made_again_though_the_run_removed_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    folder = _save(run, 2)

    def start(checkpoint: Path, out_dir: Path, words: Sequence[str]) -> Job:
        job = start_export(checkpoint, out_dir, words)
        os.kill(job._process.pid, signal.SIGKILL)
        shutil.rmtree(folder)
        return job

    with monkeypatch.context() as patch:
        patch.setattr(watching, "start_export", start)
        assert _told([*watch(run, outs, ONCE)]) == [(EventKind.FAILED, "checkpoint-2")]
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "checkpoint-2")]


def test_one_that_fails_holds_up_no_other_and_is_tried_again_when_it_changes(
    tmp_path: Path,
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4):
        _save(run, step)
    (outs / "checkpoint-4").mkdir(parents=True)
    (outs / "checkpoint-4" / "thesis.tex").write_text("mine")
    spoilt = next((run / "checkpoint-2").glob("*/*rank_1*optim*"))
    whole = spoilt.read_bytes()
    spoilt.write_bytes(whole[:-300] + bytes(200) + whole[-100:])
    (run / "checkpoint-2" / "trainer_state.json").touch()
    _save(run, 6)
    events = [*watch(run, outs, ONCE)]
    assert _told(events) == [
        (EventKind.FAILED, "checkpoint-4"),
        (EventKind.FAILED, "checkpoint-2"),
        (EventKind.EXPORTED, "checkpoint-6"),
    ]
    assert [one.code for one in events] == [6, 3, 0]
    message = events[1].failure.message if events[1].failure is not None else ""
    assert str(run / "checkpoint-2") in message
    assert ".zexport-watch" not in message
    assert (outs / "checkpoint-4" / "thesis.tex").read_text() == "mine"
    consolidate(run / "checkpoint-6", outs / "checkpoint-2")
    before = _files(outs / "checkpoint-2")
    assert (EventKind.FAILED, "checkpoint-2") in _told([*watch(run, outs, ONCE)])
    assert _files(outs / "checkpoint-2") == before
    shutil.rmtree(outs / "checkpoint-2")
    spoilt.write_bytes(whole)
    (run / "checkpoint-2" / "trainer_state.json").touch()
    assert (EventKind.EXPORTED, "checkpoint-2") in _told([*watch(run, outs, ONCE)])


def test_a_trainers_checkpoint_that_has_only_its_age_is_exported_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2, is_whole=False)
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.WAITING, "checkpoint-2")]
    monkeypatch.setattr(sightings, "STILL_S", 0)
    (event,) = watch(run, outs, ONCE)
    assert event.event is EventKind.EXPORTED
    assert "only its age" in event.warnings[0]


def test_a_plain_run_is_exported_when_every_file_is_whole_and_still(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    save(small_model(), Run(steps=1), run, "global_step1")
    save(small_model(), Run(steps=2), run, "global_step2")
    late = next((run / "global_step2").glob("*rank_1*optim*"))
    whole = late.read_bytes()
    late.write_bytes(whole[: len(whole) // 2])
    events = [*watch(run, outs, ONCE)]
    assert _told(events) == [
        (EventKind.EXPORTED, "global_step1"),
        (EventKind.WAITING, "global_step2"),
    ]
    late.write_bytes(whole)
    assert _told([*watch(run, outs, ONCE)]) == [(EventKind.EXPORTED, "global_step2")]
    consolidate(run, tmp_path / "2", tag="global_step2")
    assert _files(outs / "global_step2") == _files(tmp_path / "2")


def test_the_command_after_an_export_gets_folder_and_step_as_words_of_their_own(
    tmp_path: Path,
) -> None:
    run, outs = tmp_path / "run", tmp_path / "it's $(touch there); outs"
    _save(run, 2)
    log = tmp_path / "log"
    fails = WatchOptions(once=True, then=_shell(f"printf '%s|' \"$@\" >> {log}; exit 3"))
    events = [*watch(run, outs, fails)]
    assert [one.event for one in events] == [EventKind.EXPORTED, EventKind.COMMAND_FAILED]
    assert log.read_text() == f"{outs / 'checkpoint-2'}|2|"
    _save(run, 4)
    assert len([*watch(run, outs, fails)]) == 3
    shutil.rmtree(outs / "checkpoint-4")
    works = WatchOptions(once=True, then=_shell(f"echo again $2 >> {log}"))
    assert _told([*watch(run, outs, works)]) == [(EventKind.RAN, "checkpoint-2")]
    assert [*watch(run, outs, works)] == []
    assert log.read_text().endswith("again 2\n")


def test_no_export_is_replaced_while_a_command_is_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two exports, the second's command waits, and then its checkpoint is saved anew."""
    run, outs, go, log = (tmp_path / name for name in ("run", "outs", "go", "log"))
    monkeypatch.setattr(sightings, "_SETTLED_S", 0)
    for step in (2, 4):
        _save(run, step)
    then = _shell(f"echo $2 >> {log}; until [ -e {go} ]; do sleep 0.1; done")
    events = watch(run, outs, WatchOptions(interval_s=0.1, then=then))
    assert {next(events).event, next(events).event} == {EventKind.EXPORTED}
    for step in (4, 2):  # the first of which has its command now
        shutil.rmtree(run / f"checkpoint-{step}")
        _save(run, step)
    again = next(events)
    assert _told([again]) == [(EventKind.EXPORTED, "checkpoint-4")]
    assert log.read_text() == "2\n"
    go.touch()
    told = _told([next(events) for _ in range(4)])
    assert sorted(told, key=str) == [
        (EventKind.EXPORTED, "checkpoint-2"),
        (EventKind.RAN, "checkpoint-2"),
        (EventKind.RAN, "checkpoint-2"),
        (EventKind.RAN, "checkpoint-4"),
    ]
    assert log.read_text().splitlines() in (["2", "4", "2"], ["2", "2", "4"])
    events.close()


def test_what_could_not_be_kept_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the exports was away for a moment."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    monkeypatch.setattr(lookout, "_RETRY_S", 0.0)
    events = watch(run, outs, OFTEN)
    timer = threading.Timer(0.5, _save, [run, 2])
    timer.start()
    pinned = lookout.pin
    refusals = [OutputError("cannot be written", path=outs)]

    def pin(*given: Any) -> pins.Pin:
        if refusals:
            raise refusals.pop()
        return pinned(*given)

    monkeypatch.setattr(lookout, "pin", pin)
    told = [(EventKind.FAILED, "checkpoint-2"), (EventKind.EXPORTED, "checkpoint-2")]
    assert _told([next(events), next(events)]) == told
    events.close()
    timer.join()


def test_a_run_that_was_given_another_name_is_the_same(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    assert len([*watch(run, outs, ONCE)]) == 1
    run.rename(tmp_path / "renamed")
    assert [*watch(tmp_path / "renamed", outs, ONCE)] == []


def test_older_exports_go_that_are_as_they_were_made(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4, 6, 8):
        _save(run, step)
    assert len([*watch(run, outs, WatchOptions(once=True, every=4))]) == 2
    (outs / "checkpoint-4" / "notes.txt").write_text("mine")
    for step in (10, 12):
        _save(run, step)
    by_hand = ExportOptions(dtype="bf16", overwrite=True)  # type: ignore[arg-type]
    consolidate(run / "checkpoint-8", outs / "checkpoint-8", by_hand)
    events = [*watch(run, outs, WatchOptions(once=True, keep=1))]
    assert _told(events) == [
        (EventKind.EXPORTED, "checkpoint-10"),
        (EventKind.LEFT, "checkpoint-4"),
        (EventKind.LEFT, "checkpoint-8"),
        (EventKind.EXPORTED, "checkpoint-12"),
        (EventKind.REMOVED, "checkpoint-10"),
    ]
    assert {path.name for path in outs.iterdir()} == {
        ".zexport-watch",
        "checkpoint-4",
        "checkpoint-8",
        "checkpoint-12",
    }
    assert [*watch(run, outs, WatchOptions(once=True, keep=2))] == []


def test_the_export_of_the_best_stays_and_one_that_a_link_leads_to(tmp_path: Path) -> None:
    run, outs, keep = tmp_path / "run", tmp_path / "outs", WatchOptions(once=True, keep=1)
    for step in (2, 4):
        _save(run, step, best_model_checkpoint=str(run / "checkpoint-2"))
    *_, last = watch(run, outs, keep)
    assert (last.event, last.checkpoint, last.code) == (EventKind.LEFT, "checkpoint-2", 0)
    assert "the best" in last.why
    (outs / "good").symlink_to("checkpoint-4")
    _save(run, 6, best_model_checkpoint=str(run / "checkpoint-6"))
    *_, removed, left = watch(run, outs, keep)
    assert (removed.event, removed.checkpoint) == (EventKind.REMOVED, "checkpoint-2")
    assert (left.event, left.checkpoint) == (EventKind.LEFT, "checkpoint-4")
    assert "`good`" in left.why


def test_what_is_not_made_again_is_said(tmp_path: Path) -> None:
    """Exports of other options, and one that somebody has removed."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4):
        _save(run, step)
    bf16 = ExportOptions(dtype="bf16")  # type: ignore[arg-type]
    assert len([*watch(run, outs, ONCE, bf16)]) == 2
    (event,) = watch(run, outs, ONCE)
    assert (event.event, event.checkpoint) == (EventKind.NOT_AGAIN, "checkpoint-4")
    said = "it was made with --dtype bf16, this watch exports with none; the same is true of "
    assert event.why == f"{said}checkpoint-2"
    assert [*watch(run, outs, ONCE, bf16)] == []
    shutil.rmtree(outs / "checkpoint-2")
    (event,) = watch(run, outs, ONCE, bf16)
    assert (event.event, event.checkpoint) == (EventKind.NOT_AGAIN, "checkpoint-2")
    assert "was removed" in event.why
    assert [*watch(run, outs, WatchOptions(once=True, then="true"), bf16)] == []


def test_what_a_newer_checkpoint_has_overtaken_is_skipped(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4, 6):
        _save(run, step)
    newest = WatchOptions(once=True, newest_only=True)
    assert _told([*watch(run, outs, newest)]) == [
        (EventKind.SKIPPED, "checkpoint-2"),
        (EventKind.SKIPPED, "checkpoint-4"),
        (EventKind.EXPORTED, "checkpoint-6"),
    ]
    assert not (outs / "checkpoint-2").exists()
    assert [*watch(run, outs, newest)] == []


def test_the_highest_step_stays_though_a_copy_of_the_run_has_other_times(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (6, 4, 2):  # the highest is the oldest file
        _save(run, step)
    told = _told([*watch(run, outs, WatchOptions(once=True, keep=1))])
    assert (EventKind.REMOVED, "checkpoint-6") not in told
    assert (outs / "checkpoint-6").exists()
    assert not (outs / "checkpoint-4").exists()


@pytest.mark.parametrize("options", [{"newest_only": True}, {"keep": 1}])
def test_models_beside_one_another_are_no_older_ones_of_each_other(
    options: dict[str, Any], tmp_path: Path
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for name in ("_actor", "_critic"):
        save(small_model(), Run(steps=2), run / name, "global_step2")
    told = _told([*watch(run, outs, WatchOptions(once=True, **options))])
    assert sorted(told) == [(EventKind.EXPORTED, "_actor"), (EventKind.EXPORTED, "_critic")]
    assert {one.name for one in outs.iterdir()} >= {"_actor", "_critic"}


def test_the_call_refuses_what_cannot_be_meant_though_no_event_is_asked_for(
    tmp_path: Path,
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    with pytest.raises(NotACheckpointError, match="does not exist"):
        watch(run, outs, ONCE)
    watch(run, outs).close()  # which waits for it
    run.mkdir()
    with pytest.raises(UsageError, match="verify cannot be 'no'"):
        watch(run, outs, ONCE, verify="no")
    with pytest.raises(UsageError, match="lies in the run"):
        watch(run, run / "outs")
    for then, problem in (
        ("no-such {}", "program not found"),
        (" ", "program not found"),
        ("sh 'a", "No closing quotation"),
        ("echo 'done: {}'", "must be words of their own"),
        ("echo --step={step}", "must be words of their own"),
    ):
        with pytest.raises(UsageError, match=problem):
            watch(run, outs, WatchOptions(then=then))
    assert [*tmp_path.iterdir()] == [run]


def test_a_tag_with_shell_syntax_is_an_ordinary_word_for_then(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    tag = "global_step2$(touch PWNED)"
    save(small_model(), Run(steps=2), run, tag)
    for path in (run / tag).iterdir():
        os.utime(path, (1000, 1000))
    words = [sys.executable, "-m", "zexport", "watch", run, outs, "--once", "--then"]
    refused = subprocess.run([*words, 'sh -c "echo done: {}"'], cwd=tmp_path, check=False)
    assert (refused.returncode, outs.exists()) == (UsageError.exit_code, False)
    subprocess.run([*words, "cp -r {} copy"], cwd=tmp_path, check=True)
    assert _files(tmp_path / "copy") == _files(outs / tag)
    assert not [*tmp_path.rglob("PWNED")]


def test_folders_that_belong_to_others_are_refused(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    first = watch(run, outs, OFTEN)
    next(first)
    with pytest.raises(OutputError, match="another watch exports into this folder"):
        next(watch(run, outs, ONCE))
    first.close()
    (tmp_path / "other").mkdir()
    with pytest.raises(OutputError, match="has the exports of another run"):
        next(watch(tmp_path / "other", outs, ONCE))
    for inside in (run, run / "models"):
        with pytest.raises(UsageError, match="lies in the run, into which nothing is written"):
            next(watch(run, inside, ONCE))
    with pytest.raises(UsageError, match="holds checkpoints, and is to hold exports"):
        next(watch(outs, run, ONCE))
    assert [one.name for one in run.iterdir()] == ["checkpoint-2"]
    with pytest.raises(UsageError, match="is one checkpoint of a run"):
        next(watch(run / "checkpoint-2" / "global_step2", tmp_path / "more", ONCE))
    with pytest.raises(UsageError, match=r"one checkpoint of a run.*zexport consolidate"):
        watch(run / "checkpoint-2", tmp_path / "more", ONCE)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is no folder"):
        next(watch(tmp_path / "file", outs, ONCE))
    with pytest.raises(UsageError, match=r"is no folder.*that is to hold exports"):
        next(watch(run, tmp_path / "file", ONCE))
    with pytest.raises(UsageError, match="keep is too small"):
        WatchOptions(keep=0)
    for seconds in (float("nan"), float("inf"), 1e300):
        with pytest.raises(UsageError, match="interval_s cannot be"):
            WatchOptions(interval_s=seconds)
    (outs / ".zexport-watch" / "ledger.json").write_text("{")
    with pytest.raises(OutputError, match="is not what a watch writes"):
        next(watch(run, outs, ONCE))


def test_storage_that_falters_is_told_of_by_a_single_look_and_looked_at_again_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    looks = iter([errno.EIO, errno.EIO])
    list_tags = sightings.list_tags

    def falter(folder: Path) -> tuple[str, ...]:
        for number in looks:
            raise OSError(number, "Input/output error")
        return list_tags(folder)

    monkeypatch.setattr(sightings, "list_tags", falter)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        next(watch(run, outs, ONCE))
    looks = iter([])
    events = watch(run, outs, OFTEN)
    assert next(events).event is EventKind.EXPORTED
    _save(run, 4)
    looks = iter([errno.EIO])
    assert next(events).checkpoint == "checkpoint-4"
    events.close()


def _signal_for_a_while(pid: int) -> None:
    """Whoever adopts a process may take a moment to see that it has ended."""
    for _ in range(50):
        os.kill(pid, 0)
        time.sleep(0.1)


def test_a_watch_ends_soon_after_it_is_asked_to_and_leaves_no_process(tmp_path: Path) -> None:
    run, outs, pid = tmp_path / "run", tmp_path / "outs", tmp_path / "pid"
    _save(run, 2)
    then = _shell(f"echo $$ > {pid}; sleep 300")
    words = [sys.executable, "-m", "zexport", "watch", run, outs, "--interval", "0.1", "--json"]
    watching = subprocess.Popen([*words, "--then", then], stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["event"] == "exported"
    for _ in range(300):
        if pid.exists() and pid.read_text().strip():
            break
        time.sleep(0.1)
    began = time.monotonic()
    watching.send_signal(signal.SIGTERM)
    assert watching.wait(30) == 130
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        _signal_for_a_while(int(pid.read_text()))
