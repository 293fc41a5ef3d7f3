"""A real run that deletes its checkpoints while they are exported."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.support.training_run import (
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
def test_every_checkpoint_is_exported_as_the_engine_had_it(
    tmp_path: Path,
) -> None:
    """By a watch that is restarted, then by the callback, which changes no loss."""
    base = make_base(tmp_path / "base")
    watched = Training(base, tmp_path / "watched" / "run", STEPS)
    models = tmp_path / "watched" / "models"
    command = [sys.executable, "-m", "zexport", "watch", str(watched.out), str(models)]
    command += ["--dtype", "bf16"]
    watching = subprocess.Popen([*command, "--interval", "0.2"], env=watched.environment)
    watched.finish()
    watching.send_signal(signal.SIGTERM)
    assert watching.wait(60) == 130
    subprocess.run([*command, "--once"], env=watched.environment, timeout=LIMIT_S, check=True)
    assert_all_exported(watched, models)
    assert (watched.out / f"checkpoint-{STEPS}" / "trainer_state.json").exists()

    models = tmp_path / "training" / "models"
    training = Training(base, tmp_path / "training" / "run", STEPS, models=str(models))
    training.finish()
    assert_all_exported(training, models)
    assert median(training.log("on_save_s").values()) < 0.05
    assert training.log("loss") == watched.log("loss")
    assert len(training.log("loss")) == STEPS

    name = f"checkpoint-{STEPS - 1}"
    pruned = prune(training.out / name, models / name).pruned
    assert pruned is not None
    consolidate(pruned, tmp_path / "again", ExportOptions(dtype="bf16"))  # type: ignore[arg-type]
    assert_is(tmp_path / "again", training.truths()[name])
