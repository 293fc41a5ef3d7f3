"""Exports that a training starts by itself: at a save, beside it, and never in its way."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.pruning import trainers_run
from zexport import NotACheckpointError, UsageError, verify_export
from zexport.callbacks.exports import Exports


def test_a_save_starts_an_export_and_the_end_of_the_training_waits_for_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second save is made, and rotated away, while the first one is exported."""
    caplog.set_level(logging.INFO)
    run, out = tmp_path / "run", tmp_path / "out"
    first = trainers_run(run, steps=(2,))
    exports = Exports(out, "bf16", newest_only=False, interval_s=0.05, collect_s=120)
    began = time.perf_counter()
    exports.begin(run)
    assert time.perf_counter() - began < 0.5  # of a machine that does much else
    second = trainers_run(run, steps=(4,))
    exports.begin(run)
    deadline = time.monotonic() + 60
    while not (out / ".zexport-watch" / "pins" / "checkpoint-4").exists():
        assert time.monotonic() < deadline
        if (out / "checkpoint-4").exists():
            break
        time.sleep(0.01)
    shutil.rmtree(second)
    exports.collect()
    assert verify_export(out / "checkpoint-2", against=first).ok
    assert verify_export(out / "checkpoint-4").ok
    assert next(x for x in caplog.messages if "exported" in x).startswith("checkpoint-2: ")


def test_what_goes_wrong_is_logged_and_never_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainers_run(tmp_path / "run", steps=(2,))
    (tmp_path / "out").write_text("mine")
    exports = Exports(tmp_path / "out", collect_s=60)
    exports.collect()  # nothing was saved yet
    exports.begin(tmp_path / "run")
    exports.collect()
    assert (tmp_path / "out").read_text() == "mine"
    assert any("out: is no folder" in line for line in caplog.messages)


def test_a_watch_that_was_killed_is_told_of_and_another_does_its_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainers_run(tmp_path / "run", steps=(2,))
    exports = Exports(tmp_path / "out", interval_s=0.05, collect_s=120)
    exports.begin(tmp_path / "run")
    watch = exports._job
    assert watch is not None
    os.kill(watch._process.pid, signal.SIGKILL)
    assert watch.wait(20) == -signal.SIGKILL
    exports.collect()
    assert any("ended with code -9" in line for line in caplog.messages)
    assert verify_export(tmp_path / "out" / "checkpoint-2").ok


def test_a_training_of_several_ranks_waits_for_nothing_and_hears_what_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks go on into the next collective; what runs beside them is no rank."""
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    for name in of_a_rank:
        monkeypatch.setenv(name, "1")
    at_exit: list[object] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    run, env = tmp_path / "run", tmp_path / "env"
    trainers_run(run, steps=(2,))
    then = f"sh -c 'env > {env}; echo a traceback >&2; exit 9'"
    exports = Exports(tmp_path / "out", then=then, interval_s=0.05, collect_s=120)
    deadline = time.monotonic() + 120
    while not any("a traceback" in line for line in caplog.messages):
        assert time.monotonic() < deadline
        exports.begin(run)
        time.sleep(0.1)
    assert exports._job is not None
    exports.end(2)
    assert exports._job.wait(0) is None
    assert at_exit == [exports._at_exit]
    assert not {line.split("=")[0] for line in env.read_text().splitlines()} & {*of_a_rank}
    exports.collect()
    assert exports._job is None


def test_ctrl_c_ends_the_training_and_what_was_saved_is_exported(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    trainers_run(run)
    script = (
        "import pathlib, time\n"
        "from zexport.callbacks.exports import Exports\n"
        f"Exports({str(out)!r}, interval_s=0.05).begin(pathlib.Path({str(run)!r}))\n"
        "print(flush=True)\n"
        "time.sleep(60)"
    )
    training = subprocess.Popen(
        (sys.executable, "-c", script), stdout=subprocess.PIPE, start_new_session=True
    )
    assert training.stdout is not None
    training.stdout.readline()
    time.sleep(0.5)
    os.killpg(training.pid, signal.SIGINT)
    assert training.wait(20) != 0
    deadline = time.monotonic() + 60
    while _of_session(training.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert verify_export(out / "checkpoint-4").ok


def _of_session(session: int) -> list[str]:
    """The processes of a session that are at work."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
            found += [path.parent.name] * (of == str(session) and state != "Z")
    return found


def test_the_end_of_a_training_is_seen_though_its_workers_live_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers of a DataLoader are forked, and have what was open then."""
    trainers_run(tmp_path / "run", steps=(2,))
    exports = Exports(tmp_path / "out", interval_s=0.1, collect_s=20)
    exports.begin(tmp_path / "run")
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    try:
        exports.collect()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    assert verify_export(tmp_path / "out" / "checkpoint-2").ok
    assert not any("go on by themselves" in line for line in caplog.messages)


def test_an_option_that_cannot_be_meant_is_refused_before_the_training_begins() -> None:
    with pytest.raises(UsageError, match="program not found"):
        Exports("models", then="no-such {}")
    with pytest.raises(NotACheckpointError, match="nope"):
        Exports("models", base="nope")
    with pytest.raises(UsageError, match="keep cannot be True"):
        Exports("models", keep=True)
    with pytest.raises(TypeError, match="quickly"):
        Exports("models", quickly=True)
