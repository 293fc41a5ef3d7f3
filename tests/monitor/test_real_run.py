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
    assert_is,
    make_base,
)
from zexport import ExportOptions, consolidate, prune

STEPS = 5


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(3 * LIMIT_S)
def test_every_checkpoint_is_exported_as_the_engine_had_it(
    tmp_path: Path,
) -> None:
    """By a watch that is restarted, and by the callback."""
    called, watched = tmp_path / "called", tmp_path / "watched"
    base = make_base(tmp_path / "base")
    training = Training(base, tmp_path / "training" / "run", STEPS, called)
    command = [sys.executable, "-m", "zexport", "watch", str(training.out), str(watched)]
    command += ["--dtype", "bf16"]
    watching = subprocess.Popen([*command, "--interval", "0.2"], env=training.environment)
    training.finish()
    watching.send_signal(signal.SIGTERM)
    assert watching.wait(60) == 130
    subprocess.run([*command, "--once"], env=training.environment, timeout=LIMIT_S, check=True)
    truths = training.truths()
    assert len(truths) == STEPS
    for name, truth in truths.items():
        assert_is(watched / name, truth)
        assert_is(called / name, truth)
    assert (training.out / f"checkpoint-{STEPS}" / "trainer_state.json").exists()
    assert median(training.on_save_s()) < 0.05

    name = f"checkpoint-{STEPS - 1}"
    pruned = prune(training.out / name, called / name).pruned
    assert pruned is not None
    consolidate(pruned, tmp_path / "again", ExportOptions(dtype="bf16"))  # type: ignore[arg-type]
    assert_is(tmp_path / "again", truths[name])
