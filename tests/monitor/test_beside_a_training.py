"""Exports beside a training that really trains, and removes its checkpoints as it goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.support.beside_training import (
    LIMIT_S,
    Training,
    assert_all_exported,
    assert_is,
    make_base,
)
from zexport import ExportOptions, consolidate, prune

STEPS = 8


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(3 * LIMIT_S)
def test_every_save_is_exported_as_the_engine_had_it_though_the_run_keeps_two(
    tmp_path: Path,
) -> None:
    """By a watch that is ended in the middle; then by the callback: equal losses."""
    base = make_base(tmp_path / "base")
    beside = Training(base, tmp_path / "beside" / "run", STEPS)
    models = tmp_path / "beside" / "models"
    command = [sys.executable, "-m", "zexport", "watch", str(beside.out), str(models)]
    command += ["--dtype", "bf16"]
    watching = subprocess.Popen([*command, "--interval", "0.2"], env=beside.environment)
    beside.finish()
    watching.send_signal(signal.SIGTERM)
    assert watching.wait(60) == 130
    subprocess.run([*command, "--once"], env=beside.environment, timeout=LIMIT_S, check=True)
    assert_all_exported(beside, models)
    assert (beside.out / f"checkpoint-{STEPS}" / "trainer_state.json").exists()

    models = tmp_path / "within" / "models"
    within = Training(base, tmp_path / "within" / "run", STEPS, models=str(models))
    within.finish()
    assert_all_exported(within, models)
    assert median(within.log("on_save_s").values()) < 0.05
    assert within.log("loss") == beside.log("loss")
    assert len(within.log("loss")) == STEPS

    name = f"checkpoint-{STEPS - 1}"
    pruned = prune(within.out / name, models / name).pruned
    assert pruned is not None
    consolidate(pruned, tmp_path / "again", ExportOptions(dtype="bf16"))  # type: ignore[arg-type]
    assert_is(tmp_path / "again", within.truths()[name])
