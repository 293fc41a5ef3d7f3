"""Exports that a callback starts during training."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pruning import trainers_run
from zexport import NotACheckpointError, UsageError, verify_export
from zexport.callbacks.process import Exports


def _wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_end_of_training_waits_for_the_last_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run deletes the second checkpoint while the first one is exported."""
    caplog.set_level(logging.INFO)
    run, out = tmp_path / "run", tmp_path / "out"
    first = trainers_run(run, steps=(2,))
    exports = Exports(out, "bf16", newest_only=False, interval_s=0.05, collect_s=120)
    began = time.perf_counter()
    exports.begin(run)
    assert time.perf_counter() - began < 0.5  # a save does not wait
    second = trainers_run(run, steps=(4,))
    exports.begin(run)
    links = out / ".zexport-watch" / "links"
    _wait_for(lambda: [*links.glob("*/run/checkpoint-4")] or (out / "checkpoint-4").exists())
    shutil.rmtree(second)
    exports.collect()
    assert verify_export(out / "checkpoint-2", against=first).ok
    assert verify_export(out / "checkpoint-4").ok
    assert next(x for x in caplog.messages if "exported" in x).startswith("checkpoint-2 ")


def test_failures_are_logged_and_never_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainers_run(tmp_path / "run", steps=(2,))
    (tmp_path / "out").write_text("mine")
    exports = Exports(tmp_path / "out", collect_s=60)
    exports.collect()  # nothing was saved yet
    exports.begin(tmp_path / "run")
    exports.collect()
    assert (tmp_path / "out").read_text() == "mine"
    assert any("cannot be written: Not a directory" in line for line in caplog.messages)


def test_killed_process_is_logged_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainers_run(tmp_path / "run", steps=(2,))
    exports = Exports(tmp_path / "out", interval_s=0.05, collect_s=120)
    exports.begin(tmp_path / "run")
    assert exports._job is not None
    os.kill(exports._job._process.pid, signal.SIGKILL)
    assert exports._job.wait(20) == -signal.SIGKILL
    exports.collect()
    assert any("ended with code -9" in line for line in caplog.messages)
    assert verify_export(tmp_path / "out" / "checkpoint-2").ok


def test_with_several_ranks_only_the_exit_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are in the next collective; a command after an export is no rank."""
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    for name in of_a_rank:
        monkeypatch.setenv(name, "1")
    at_exit: list[object] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    run, env = tmp_path / "run", tmp_path / "env"
    trainers_run(run, steps=(2,))
    then = f"sh -c 'env > {env}; echo a traceback >&2; exit 9'"
    exports = Exports(tmp_path / "out", then=then, interval_s=0.05, collect_s=120)

    def has_failed() -> bool:
        exports.begin(run)
        return any("a traceback" in line for line in caplog.messages)

    _wait_for(has_failed)
    assert exports._job is not None
    exports.end(2)
    assert exports._job.wait(0) is None
    assert at_exit == [exports._at_exit]
    assert not {line.split("=")[0] for line in env.read_text().splitlines()} & {*of_a_rank}
    exports.collect()
    assert exports._job is None


def test_exports_finish_after_ctrl_c_in_the_training_script(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    trainers_run(run)
    script = (
        "import pathlib, time\n"
        "from zexport.callbacks.process import Exports\n"
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
    _wait_for((out / "checkpoint-4" / "zexport_manifest.json").exists)
    assert verify_export(out / "checkpoint-4").ok


def test_end_is_noticed_though_forked_workers_hold_the_pipe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers of a DataLoader inherit open files."""
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
    assert not any("in the background" in line for line in caplog.messages)


def test_invalid_option_is_refused_before_training() -> None:
    with pytest.raises(UsageError, match="program not found"):
        Exports("models", then="no-such {}")
    with pytest.raises(NotACheckpointError, match="nope"):
        Exports("models", base="nope")
    with pytest.raises(UsageError, match="keep cannot be True"):
        Exports("models", keep=True)
    with pytest.raises(TypeError, match="quickly"):
        Exports("models", quickly=True)
