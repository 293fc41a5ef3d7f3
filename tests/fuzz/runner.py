"""Targets, and what must hold for every input: a result or an error, in time."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutated
from zexport import ZexportError

NAMES = ("pickles", "zips", "legacy", "safetensors_files", "states")
_SECONDS_MAX = 20.0
_MESSAGE_LENGTH_MAX = 50_000
_EXIT_CODES = (2, 3, 4, 5)


@dataclass(frozen=True)
class Target:
    """One reader: valid inputs to mutate, and a function that reads an input in a folder."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[bytes, Path], object]

    def check(self, data: bytes, folder: Path) -> bool:
        """Return whether the input was accepted; raise for a crash."""
        start, refusal = time.monotonic(), None
        try:
            self.read(data, folder)
        except ZexportError as error:
            refusal = error
        assert time.monotonic() - start < _SECONDS_MAX
        if refusal is None:
            return True
        assert refusal.exit_code in _EXIT_CODES, refusal
        assert str(refusal).isprintable(), ascii(str(refusal))
        assert len(str(refusal)) < _MESSAGE_LENGTH_MAX
        return False


def target(name: str) -> Target:
    home = "states" if name == "states" else "readers"
    found = importlib.import_module(f"tests.fuzz.{home}").TARGETS[name]
    assert isinstance(found, Target)
    return found


@dataclass
class Figures:
    executions: int = 0
    accepted: int = 0
    crashes: int = 0


def run_plain(
    target: Target,
    folder: Path,
    *,
    seed: int,
    more: Callable[[int], bool],
    keep: Path | None = None,
) -> Figures:
    """Read mutations from a fixed seed while ``more`` (given their number) is true.

    Inputs that crash are saved in ``keep`` and counted; without it, they raise.
    """
    random, figures, seeds = Random(seed), Figures(), target.seeds()
    while more(figures.executions):
        data = mutated(random, seeds)
        figures.executions += 1
        try:
            figures.accepted += target.check(data, folder)
        except Exception:
            if keep is None:
                (folder / f"crash-{target.name}").write_bytes(data)
                raise
            figures.crashes += 1
            traceback.print_exc()
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"crash-{target.name}-{figures.executions}").write_bytes(data)
    return figures
