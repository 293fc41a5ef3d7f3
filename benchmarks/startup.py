"""How long the command takes to start: its help and the inspection of a small checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import SystemRandom
from statistics import median

from benchmarks.measure import run
from benchmarks.methods import zexport
from benchmarks.table import Target

PYTHON = "python -c pass"
HELP = "zexport --help"
INSPECT = "zexport inspect"
_MAX_HELP = 0.25  # seconds beyond Python's own start
_MAX_INSPECT = 0.6


def train_small(folder: Path, env: Mapping[str, str]) -> None:
    """A small checkpoint by DeepSpeed itself: two ranks, two steps, ZeRO-3."""
    options = ["--world-size", "2", "--stage", "3", "--steps", "2"]
    run([*zexport(), "train", str(folder), *options], env)


def measure_startup(
    checkpoint: Path, env: Mapping[str, str], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each command, in random order; one untimed run first fills the disk's cache."""
    commands = {
        PYTHON: [sys.executable, "-c", "pass"],
        HELP: [*zexport(), "--help"],
        INSPECT: [*zexport(), "inspect", str(checkpoint)],
    }
    for argv in commands.values():
        run(argv, env)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        order = list(commands)
        SystemRandom().shuffle(order)
        for name in order:
            times[name].append(run(commands[name], env)[0].seconds)
    return times


def render_startup(times: Mapping[str, list[float]]) -> str:
    """The table in GitHub's markdown."""
    lines = ["### Start", "", "| command | runs | min s | median s |", "|---|---:|---:|---:|"]
    lines += [
        f"| `{name}` | {len(found)} | {min(found):.3f} | {median(found):.3f} |"
        for name, found in times.items()
    ]
    return "\n".join(lines)


def startup_targets(times: Mapping[str, list[float]]) -> Iterator[Target]:
    """What is to be reached."""
    extra = median(times[HELP]) - median(times[PYTHON])
    text = f"`{HELP}` within {_MAX_HELP:g} s of `{PYTHON}`"
    yield Target(text, f"{extra:.3f} s", extra <= _MAX_HELP)
    whole = median(times[INSPECT])
    text = f"`{INSPECT}` of a small checkpoint within {_MAX_INSPECT:g} s"
    yield Target(text, f"{whole:.3f} s", whole <= _MAX_INSPECT)
