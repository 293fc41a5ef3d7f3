"""A training with exports beside it, all of which are killed at random moments."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.support.beside_training import Training, assert_all_exported, make_base

_WATCH_S = (5.0, 60.0)
"""Between two kills of the watch, or of what runs for it."""

_UNSEEN_S = 30.0
"""So long after a kill nobody may have looked: then a save may come and go without a word."""

_TRAINING_SAVES = (3, 25)
"""Between two kills of the training, which so gets on, however slow its start is."""


def trainings(folder: Path, saves: int, seed: int) -> str:
    """Train for so many saves; what was seen, in words.

    Raises:
        AssertionError: an export is not what the engine had, a save has neither an export nor a
            word on it, or a loss is another than without all this.
    """
    chance = random.Random(seed)  # noqa: S311 - nothing secret
    base = make_base(folder / "base")
    plain = Training(base, folder / "plain" / "run", saves, pause_s=0.0)
    plain.finish()
    beside = Training(base, folder / "beside" / "run", saves)
    models, told = folder / "beside" / "models", folder / "told.jsonl"
    killed, times = _train(beside, models, told, chance)
    with told.open("a") as file:
        words = [*_words(beside, models), "--once"]
        subprocess.run(words, env=beside.environment, stdout=file, check=True)
    lost, unseen = _lost(told), _unseen(beside, times)
    exported = assert_all_exported(beside, models, [*lost, *unseen])
    unseen -= {*lost} | {path.name for path in models.iterdir()}
    assert beside.log("loss") == plain.log("loss")
    assert len(beside.log("loss")) == saves
    assert (beside.out / f"checkpoint-{saves}" / "trainer_state.json").exists()
    kills = ", ".join(f"{count} of {what}" for what, count in sorted(killed.items()))
    return (
        f"{saves} saves, {exported} exported as the engine had them, {len(lost)} told as rotated "
        f"away, {len(unseen)} came and went while no watch was up, "
        f"losses equal; kills: {kills}"
    )


def _words(training: Training, models: Path) -> list[str]:
    command = [sys.executable, "-m", "zexport", "watch", str(training.out), str(models), "--json"]
    return [*command, "--dtype", "bf16", "--interval", "0.2"]


def _train(
    training: Training, models: Path, told: Path, chance: random.Random
) -> tuple[Counter[str], list[float]]:
    """Train to the end, whatever is killed; how often what was, and when there was no watch."""
    killed: Counter[str] = Counter()
    times: list[float] = []
    trainer = training.start()
    next_watch = time.monotonic()
    next_training = chance.randint(*_TRAINING_SAVES)
    watching: subprocess.Popen[bytes] | None = None
    with told.open("ab") as file:
        while (code := trainer.poll()) != 0:
            now = time.monotonic()
            if watching is None or watching.poll() is not None:
                words = _words(training, models)
                times.append(time.time())
                watching = subprocess.Popen(words, env=training.environment, stdout=file)
                next_watch = now + chance.uniform(*_WATCH_S)
            elif now > next_watch:
                killed[_kill_beside(watching, chance)] += 1
            if code is not None:
                trainer = training.start()
                next_training = _saves(training) + chance.randint(*_TRAINING_SAVES)
            elif _saves(training) >= next_training:
                os.killpg(trainer.pid, signal.SIGKILL)
                trainer.wait()
                killed["the training"] += 1
            time.sleep(0.05)
        if watching is not None:
            watching.terminate()
            watching.wait()
    return killed, times


def _unseen(training: Training, times: list[float]) -> set[str]:
    """The saves that a run may have removed before a watch that had just been started saw them."""
    saved_at = training.log("saved_at")
    lives = {step: (when, saved_at.get(step + 2, 0.0) + 1) for step, when in saved_at.items()}
    return {
        f"checkpoint-{step}"
        for step, (saved, removed) in lives.items()
        if any(saved < began + _UNSEEN_S and began < removed for began in times)
    }


def _saves(training: Training) -> int:
    """How many saves were made, those that were made again among them."""
    log = training.out.with_name(f"{training.out.name}.log.jsonl")
    return log.read_text().count("saved_at") if log.exists() else 0


def _kill_beside(watching: subprocess.Popen[bytes], chance: random.Random) -> str:
    """Kill the watch, or what runs for it, or all; in words, which."""
    children = _children(watching.pid)
    if children and chance.random() < 2 / 3:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if chance.random() < 1 / 2:
            return "an export"
    watching.send_signal(chance.choice((signal.SIGKILL, signal.SIGTERM)))
    watching.wait()
    return "the watch"


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


def _lost(told: Path) -> list[str]:
    """The checkpoints that the watches told of as gone."""
    found = set()
    for line in told.read_text().splitlines():
        with suppress(ValueError):  # of one that was killed while it wrote
            event = json.loads(line)
            if event["event"] in ("lost", "skipped"):
                found.add(event["checkpoint"])
    return sorted(found)
