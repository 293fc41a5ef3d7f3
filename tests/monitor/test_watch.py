"""Checkpoints of a run, each exported by a process of its own."""

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
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.support.checkpoints import Model, Run, save, small_model, values
from tests.support.forked import ForkedExport, typed
from tests.support.pruning import state_of
from tests.torture.prunings import killed_removals
from zexport import (
    EventKind,
    ExportOptions,
    NotACheckpointError,
    OutputError,
    UsageError,
    WatchOptions,
    consolidate,
    watch,
)

ONCE = WatchOptions(once=True, interval_s=0.2)
OFTEN = WatchOptions(interval_s=0.1)
EXPORTED, FAILED, REMOVED = EventKind.EXPORTED, EventKind.FAILED, EventKind.REMOVED


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedExport)


def _once(**options: object) -> WatchOptions:
    return WatchOptions(once=True, interval_s=0.2, **options)  # type: ignore[arg-type]


def _save(run: Path, step: int, *, is_whole: bool = True, **state: object) -> Path:
    """Save as a Trainer does; the file that shows completeness is written last."""
    folder = run / f"checkpoint-{step}"
    save(small_model(), Run(steps=step, optimizer_step=float(step)), folder, f"global_step{step}")
    if is_whole:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, **state}))
    return folder


def _shell(script: str) -> str:
    """Return a command whose ``$1`` is the export's folder, and ``$2`` the step."""
    return f"sh -c {shlex.quote(script)} sh {{}} {{step}}"


def _kinds(events: object) -> list[tuple[EventKind, str]]:
    return [(one.event, one.checkpoint) for one in events]  # type: ignore[attr-defined]


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _links(outs: Path) -> list[Path]:
    return [*(outs / ".zexport-watch" / "links").iterdir()]


def _pass_time(monkeypatch: pytest.MonkeyPatch, seconds: int = 0, *, speed: int = 1) -> None:
    """Set the clock forward, or let it run faster."""
    now, start = time.time_ns, time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: start + (now() - start) * speed + seconds * 10**9)


def test_every_complete_checkpoint_is_exported_once_as_consolidate_does(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    run.mkdir()
    assert [*watch(run, outs, ONCE)] == []
    for step in (2, 4):
        _save(run, step)
    _save(run, 6, is_whole=False)
    before = state_of(run), run.stat().st_mtime_ns
    options = ExportOptions(dtype="bf16", max_shard_nbytes=10**6)  # type: ignore[arg-type]
    events = [*watch(run, outs, ONCE, options)]
    assert _kinds(events) == [
        (EXPORTED, "checkpoint-2"),
        (EXPORTED, "checkpoint-4"),
        (EventKind.WAITING, "checkpoint-6"),
    ]
    assert [one.step for one in events[:2]] == [2, 4]
    assert "trainer_state.json" in events[2].why
    assert (state_of(run), run.stat().st_mtime_ns) == before
    for step in (2, 4):
        consolidate(run / f"checkpoint-{step}", tmp_path / f"{step}", options)
        assert _files(outs / f"checkpoint-{step}") == _files(tmp_path / f"{step}")
    _save(run, 6)
    assert _kinds(watch(run, outs, ONCE, options)) == [(EXPORTED, "checkpoint-6")]
    assert _links(outs) == []


def test_restored_checkpoints_with_equal_times_are_exported(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4, 6):
        _save(run, step)
    for path in run.rglob("*"):
        os.utime(path, (1e9, 1e9))
    events = [*islice(watch(run, outs, ONCE), 4)]
    assert _kinds(events) == [(EXPORTED, f"checkpoint-{step}") for step in (2, 4, 6)]


def test_waiting_checkpoint_is_exported_though_the_run_deletes_it(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4):
        _save(run, step)
    consolidate(run / "checkpoint-4", tmp_path / "4")
    events = watch(run, outs, OFTEN)
    assert next(events).checkpoint == "checkpoint-2"
    shutil.rmtree(run / "checkpoint-4")
    events.close()  # a watch that is started again finds it, too
    events = watch(run, outs, OFTEN)
    second = next(events)
    assert (second.event, second.checkpoint) == (EXPORTED, "checkpoint-4")
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
    _save(tmp_path / "run", 2)
    kinds = _kinds(watch(tmp_path / "run", tmp_path / "outs", ONCE))
    assert kinds == [(EXPORTED, "checkpoint-2")]


def test_export_of_a_killed_watch_is_adopted(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    stamp = outs / ".zexport-watch" / "stamps" / "checkpoint-2.json"
    words = [sys.executable, "-m", "zexport", "watch", run, outs, "--then", "false"]
    killed = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not stamp.exists():
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    then = _once(then="true", keep=1)
    kinds = [(EXPORTED, "checkpoint-2"), (EventKind.RAN, "checkpoint-2")]
    assert _kinds(watch(run, outs, then)) == kinds
    assert json.loads(stamp.read_text())["state"] == "ran"
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"state": "begun", "manifest": ""}))
    assert _kinds(watch(run, outs, then)) == kinds  # it was killed after the export was published
    assert [*watch(run, outs, then)] == []


def test_export_that_is_killed_is_made_again_though_the_run_deleted_its_checkpoint(
    tmp_path: Path,
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    events = watch(run, outs, OFTEN)
    killer = threading.Thread(target=_kill_an_export, args=[len(ForkedExport.started)])
    killer.start()
    assert next(events).event is FAILED
    killer.join()
    shutil.rmtree(run / "checkpoint-2")
    events.close()
    assert _kinds(watch(run, outs, ONCE)) == [(EXPORTED, "checkpoint-2")]
    assert _links(outs) == []


def _kill_an_export(before: int) -> None:
    """Kill the first export after this number of them, as soon as it runs."""
    _wait_for(lambda: len(ForkedExport.started) > before)
    os.kill(ForkedExport.started[before], signal.SIGKILL)


def test_links_of_a_full_disk_are_released_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those to files that the run has deleted take space."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4, 6):
        _save(run, step)
    (outs / "checkpoint-2").mkdir(parents=True)
    (outs / "checkpoint-2" / "thesis.tex").write_text("mine")
    events = watch(run, outs, OFTEN)
    assert next(events).event is FAILED
    free = os.statvfs(run)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*free[:4], 0, *free[5:])))
    shutil.rmtree(run / "checkpoint-2")
    found = [next(events) for _ in range(3)]
    events.close()
    assert sorted(_kinds(found), key=str) == [
        (EXPORTED, "checkpoint-4"),
        (EXPORTED, "checkpoint-6"),
        (EventKind.LOST, "checkpoint-2"),
    ]
    assert _links(outs) == []


def test_symlinks_are_read_as_an_export_reads_them(tmp_path: Path) -> None:
    """One leads out of the run and is not needed; a tag is elsewhere in the run."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    tag = _save(run, 2) / "global_step2"
    (run / "store" / "of" / "all").mkdir(parents=True)
    tag.rename(run / "store" / "of" / "all" / "there")
    tag.symlink_to(run / "store" / "of" / "all" / "there")
    (tag / ".ipynb_checkpoints").mkdir()
    (tmp_path / "log").write_text("of the launcher")
    (run / "train.log").symlink_to(tmp_path / "log")
    assert _kinds(watch(run, outs, ONCE)) == [(EXPORTED, "checkpoint-2")]


def test_mixture_of_two_saves_is_never_published(tmp_path: Path) -> None:
    """The second is written into the files of the first, which hard links show, too."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    again = tmp_path / "again" / "checkpoint-2"
    for folder, seed in ((run / "checkpoint-2", 1), (again, 2)):
        save(Model([{"lin.weight": values((13, 7), seed)}]), Run(), folder)
        (folder / "trainer_state.json").write_text("{}")
    consolidate(again, tmp_path / "whole")

    def write_again() -> None:
        while not (outs / ".zexport-watch" / "stamps" / "checkpoint-2.json").exists():
            time.sleep(0.005)
        for path in again.glob("*/*rank_1*"):
            (run / path.relative_to(again.parent)).write_bytes(path.read_bytes())

    writer = threading.Thread(target=write_again)
    writer.start()
    events = [*watch(run, outs, _once(then=f"touch {tmp_path}/ran"))]
    writer.join()
    assert [one.event for one in events] == [EventKind.CHANGED, EventKind.WAITING]
    assert not (outs / "checkpoint-2").exists()
    assert not (tmp_path / "ran").exists()
    shutil.copytree(again, run / "checkpoint-2", dirs_exist_ok=True)
    (run / "checkpoint-2" / "trainer_state.json").touch()
    assert _kinds(watch(run, outs, ONCE)) == [(EXPORTED, "checkpoint-2")]
    made, whole = _files(outs / "checkpoint-2"), _files(tmp_path / "whole")
    assert made["model.safetensors"] == whole["model.safetensors"]


def test_checkpoint_without_a_newer_trainer_state_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    os.utime(_save(run, 2) / "trainer_state.json", (1e9, 1e9))  # it is being saved again
    _save(run, 4, is_whole=False)
    waiting = [(EventKind.WAITING, "checkpoint-2"), (EventKind.WAITING, "checkpoint-4")]
    assert _kinds(watch(run, outs, ONCE)) == waiting
    _pass_time(monkeypatch, 700)
    exported = [(EXPORTED, "checkpoint-2"), (EXPORTED, "checkpoint-4")]
    assert _kinds(watch(run, outs, ONCE)) == exported


def test_last_checkpoint_gets_the_time_to_settle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training ends seconds after it has saved a plain tag again."""
    run, outs = tmp_path / "run", tmp_path / "outs"
    save(small_model(), Run(steps=2), run, "global_step2")
    assert _kinds(watch(run, outs, ONCE)) == [(EXPORTED, "global_step2")]
    save(small_model(), Run(steps=2), run, "global_step2")
    assert _kinds(watch(run, outs, ONCE)) == [(EventKind.WAITING, "global_step2")]
    _pass_time(monkeypatch, speed=60)
    assert _kinds(watch(run, outs, OFTEN, is_over=lambda: True)) == [(EXPORTED, "global_step2")]


def test_failed_export_delays_no_other_and_is_retried_when_files_change(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4):
        _save(run, step)
    (outs / "checkpoint-4").mkdir(parents=True)
    (outs / "checkpoint-4" / "thesis.tex").write_text("mine")
    damaged = next((run / "checkpoint-2").glob("*/*rank_1*optim*"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-300] + bytes(200) + whole[-100:])
    (run / "checkpoint-2" / "trainer_state.json").touch()
    _save(run, 6)
    events = [*watch(run, outs, ONCE)]
    assert _kinds(events) == [
        (FAILED, "checkpoint-4"),
        (FAILED, "checkpoint-2"),
        (EXPORTED, "checkpoint-6"),
    ]
    assert [one.code for one in events] == [6, 3, 0]
    message = events[1].failure.message if events[1].failure is not None else ""
    assert str(run / "checkpoint-2") in message
    assert (outs / "checkpoint-4" / "thesis.tex").read_text() == "mine"
    consolidate(run / "checkpoint-6", outs / "checkpoint-2")  # by hand: never replaced
    before = _files(outs / "checkpoint-2")
    assert (FAILED, "checkpoint-2") in _kinds(watch(run, outs, ONCE))
    assert _files(outs / "checkpoint-2") == before
    shutil.rmtree(outs / "checkpoint-2")
    damaged.write_bytes(whole)
    (run / "checkpoint-2" / "trainer_state.json").touch()
    assert (EXPORTED, "checkpoint-2") in _kinds(watch(run, outs, ONCE))


def test_plain_run_is_exported_once_all_files_are_complete(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    save(small_model(), Run(steps=1), run, "global_step1")
    save(small_model(), Run(steps=2), run, "global_step2")
    late = next((run / "global_step2").glob("*rank_1*optim*"))
    whole = late.read_bytes()
    late.write_bytes(whole[: len(whole) // 2])
    waiting = (EventKind.WAITING, "global_step2")
    assert _kinds(watch(run, outs, ONCE)) == [(EXPORTED, "global_step1"), waiting]
    late.write_bytes(whole)
    assert _kinds(watch(run, outs, ONCE)) == [(EXPORTED, "global_step2")]
    consolidate(run, tmp_path / "2", tag="global_step2")
    assert _files(outs / "global_step2") == _files(tmp_path / "2")


def test_command_gets_folder_and_step_and_runs_again_until_it_succeeds(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "it's $(touch there); outs"
    _save(run, 2)
    log = tmp_path / "log"
    fails = _once(keep=1, then=_shell(f"printf '%s|' \"$@\" >> {log}; exit 3"))
    events = [*watch(run, outs, fails)]
    assert [one.event for one in events] == [EXPORTED, EventKind.COMMAND_FAILED]
    assert events[1].code == OutputError.exit_code
    assert log.read_text() == f"{outs / 'checkpoint-2'}|2|"
    _save(run, 4)
    assert [one.event for one in watch(run, outs, fails)].count(EventKind.COMMAND_FAILED) == 2
    assert (outs / "checkpoint-2").exists()  # its command is owed
    moves = _once(keep=1, then=_shell(f'mv "$1" {tmp_path}/$2'))
    assert _kinds(watch(run, outs, moves)) == [(EventKind.RAN, f"checkpoint-{n}") for n in (2, 4)]
    assert [*watch(run, outs, moves)] == [*watch(run, outs, ONCE)] == []
    assert (tmp_path / "2").is_dir()


def test_export_is_not_replaced_while_a_command_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, outs, go, log = (tmp_path / name for name in ("run", "outs", "go", "log"))
    for step in (2, 4):
        _save(run, step)
    then = _shell(f"echo $2 >> {log}; until [ -e {go} ]; do sleep 0.1; done")
    _pass_time(monkeypatch, 70)
    events = watch(run, outs, WatchOptions(interval_s=0.1, then=then))
    assert {next(events).event, next(events).event} == {EXPORTED}
    for step in (4, 2):  # the command reads the second
        shutil.rmtree(run / f"checkpoint-{step}")
        _save(run, step)
    assert _kinds([next(events)]) == [(EXPORTED, "checkpoint-4")]
    assert log.read_text() == "2\n"
    go.touch()
    found = [next(events) for _ in range(4)]
    events.close()
    assert sorted(_kinds(found), key=str) == [
        (EXPORTED, "checkpoint-2"),
        *([(EventKind.RAN, "checkpoint-2")] * 2),
        (EventKind.RAN, "checkpoint-4"),
    ]


def test_keep_removes_only_unmodified_exports_of_a_watch(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (4, 6, 8, 10):
        _save(run, step, best_model_checkpoint=str(run / "checkpoint-6"))
    assert len([*watch(run, outs, ONCE)]) == 4
    (outs / "checkpoint-4" / "notes.txt").write_text("mine")
    (outs / "good").symlink_to("checkpoint-10")
    by_hand = ExportOptions(dtype="bf16", overwrite=True)  # type: ignore[arg-type]
    consolidate(run / "checkpoint-8", outs / "checkpoint-8", by_hand)
    for step in (12, 14):
        _save(run, step, best_model_checkpoint=str(run / "checkpoint-6"))
    events = [*watch(run, outs, _once(keep=1))]
    kinds = _kinds(events)
    assert kinds[-1] == (REMOVED, "checkpoint-12")
    assert {name for kind, name in kinds if kind is EventKind.LEFT} == {
        *("checkpoint-4", "checkpoint-6", "checkpoint-10")
    }
    assert (EventKind.NOT_AGAIN, "checkpoint-8") in kinds
    assert max(one.code for one in events) == OutputError.exit_code
    stay = {f"checkpoint-{step}" for step in (4, 6, 8, 10, 14)}
    assert {path.name for path in outs.iterdir()} == {".zexport-watch", "good", *stay}
    assert EXPORTED not in {kind for kind, _ in _kinds(watch(run, outs, ONCE))}


def test_killed_removal_leaves_complete_exports(tmp_path: Path) -> None:
    assert killed_removals(tmp_path, step=6) > 3


def test_other_options_do_not_export_again_but_a_missing_export_does(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    bf16 = ExportOptions(dtype="bf16")  # type: ignore[arg-type]
    assert len([*watch(run, outs, ONCE, bf16)]) == 1
    (event,) = watch(run, outs, ONCE)
    assert (event.event, event.why) == (EventKind.NOT_AGAIN, "exported before with dtype bf16")
    assert [*watch(run, outs, ONCE, bf16)] == []
    shutil.rmtree(outs / "checkpoint-2")
    assert _kinds(watch(run, outs, ONCE, bf16)) == [(EXPORTED, "checkpoint-2")]


def test_newest_only_and_every_skip_checkpoints(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4, 6):
        _save(run, step)
    assert [*watch(run, outs, _once(every=5))] == []
    newest = _once(newest_only=True)
    assert _kinds(watch(run, outs, newest)) == [
        (EventKind.SKIPPED, "checkpoint-2"),
        (EventKind.SKIPPED, "checkpoint-4"),
        (EXPORTED, "checkpoint-6"),
    ]
    assert [*watch(run, outs, newest)] == []


def test_dry_run_prints_decisions_and_changes_nothing(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    for step in (2, 4, 6):
        _save(run, step)
    done = typed("watch", run, outs, "--dry-run", "--every", "4")
    assert (done.returncode, outs.exists()) == (0, False)
    assert done.stdout.splitlines() == [
        "checkpoint-2 (step 2): skip: --every 4 excludes it",
        "checkpoint-4 (step 4): export: the Trainer has saved it",
        "checkpoint-6 (step 6): skip: --every 4 excludes it",
    ]
    assert len([*watch(run, outs, ONCE)]) == 3
    before = state_of(outs)
    done = typed("watch", run, outs, "--dry-run", "--keep", "2")
    assert "export checkpoint-2: remove: --keep 2: newer exports exist" in done.stdout
    assert state_of(outs) == before


def test_invalid_arguments_are_refused_by_the_call(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    with pytest.raises(NotACheckpointError, match="does not exist"):
        watch(run, outs, ONCE)
    watch(run, outs).close()  # which waits for it
    run.mkdir()
    with pytest.raises(UsageError, match="verify cannot be 'no'"):
        watch(run, outs, ONCE, verify="no")
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
    with pytest.raises(UsageError, match="keep cannot be"):
        WatchOptions(keep=0)
    for seconds in (float("nan"), 1e300):
        with pytest.raises(UsageError, match="interval_s cannot be"):
            WatchOptions(interval_s=seconds)


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    run, outs = tmp_path / "run", tmp_path / "outs"
    _save(run, 2)
    first = watch(run, outs, OFTEN)
    next(first)
    with pytest.raises(OutputError, match="another watch exports to this folder"):
        next(watch(run, outs, ONCE))
    first.close()
    refused: list[tuple[Path, Path, str]] = [
        (run, run, "is in the run"),
        (run, run / "models", "is in the run"),
        (outs, run, "contains checkpoints, not exports"),
        (run / "checkpoint-2" / "global_step2", tmp_path / "more", "is one checkpoint of a run"),
        (run / "checkpoint-2", tmp_path / "more", "is one checkpoint of a run"),
    ]
    for folder, models, problem in refused:
        with pytest.raises(UsageError, match=problem):
            watch(folder, models, ONCE)
    assert [one.name for one in run.iterdir()] == ["checkpoint-2"]


def test_watch_ends_soon_and_leaves_no_process(tmp_path: Path) -> None:
    run, outs, pid = tmp_path / "run", tmp_path / "outs", tmp_path / "pid"
    _save(run, 2)
    then = _shell(f"echo $$ > {pid}; sleep 300")
    words = [sys.executable, "-m", "zexport", "watch", run, outs, "--interval", "0.1", "--json"]
    process = subprocess.Popen([*words, "--then", then], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "exported"
    _wait_for(lambda: pid.exists() and bool(pid.read_text().strip()))
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    assert time.monotonic() - began < 10
    _wait_for(lambda: not Path("/proc", pid.read_text().strip()).exists())


def _wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(1500):
        if happened():
            return
        time.sleep(0.02)
    raise AssertionError("nothing happened within 30 s")
