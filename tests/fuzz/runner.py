"""Runs one target for so many seconds and says how often it was fed, and what went wrong."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FunctionType

from tests.fuzz.mutations import mutated
from tests.fuzz.target import Target

NAMES = ("pickles", "zips", "legacy", "safetensors_files", "checkpoints", "states")
_GUIDING = ("zexport", "zipfile", "json")
_INPUT_NBYTES_MAX = 1 << 16
_ADDRESSES_NBYTES = 8 << 30


@dataclass
class Figures:
    """What a run came to."""

    executions: int = 0
    accepted: int = 0
    crashes: int = 0

    def line(self, name: str, seconds: float) -> str:
        """The figures in words."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        return (
            f"{name}: {self.executions} executions in {seconds:.0f} s, {self.accepted} accepted, "
            f"{self.crashes} crashes, {peak} MiB at most"
        )


def run_plain(
    target: Target,
    folder: Path,
    *,
    seed: int,
    more: Callable[[int], bool],
    keep: Path | None = None,
) -> Figures:
    """Feed mutations from a fixed seed while ``more`` (told their number) says so.

    With ``keep`` an input that goes wrong is kept there and counted; without, it raises.
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


def main(target: Target) -> None:
    """The command line of one target."""
    parser = argparse.ArgumentParser(description=f"Feed hostile bytes to {target.name}.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--inputs", type=int, default=0, help="at least, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--keep", type=Path, help="folder for inputs that go wrong")
    chosen = parser.parse_args()
    # What takes the machine's memory shall end in a MemoryError, and not end the machine.
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES_NBYTES, most))
    keep = chosen.keep or Path(tempfile.gettempdir()) / "zexport-fuzz"
    with tempfile.TemporaryDirectory() as name:
        if importlib.util.find_spec("atheris") and not chosen.plain:
            _run_atheris(target, Path(name), keep, chosen.seconds)
        start = time.monotonic()
        figures = run_plain(
            target,
            Path(name),
            seed=chosen.seed,
            more=lambda n: n < chosen.inputs or time.monotonic() - start < chosen.seconds,
            keep=keep,
        )
        print(figures.line(target.name, time.monotonic() - start), flush=True)
    sys.exit(bool(figures.crashes))


def _run_atheris(target: Target, folder: Path, keep: Path, seconds: float) -> None:
    """Guided by coverage; it ends the process itself, at once when something goes wrong."""
    import atheris  # type: ignore[import-not-found]

    corpus = folder / "corpus"
    corpus.mkdir()
    keep.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(seed)
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={_INPUT_NBYTES_MAX}",
        f"-artifact_prefix={keep}/crash-{target.name}-",
        "-print_final_stats=1",
        "-rss_limit_mb=1024",
        "-verbosity=1",
    ]
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and str(function.__module__).startswith(_GUIDING):
            atheris.instrument_func(function)
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: target.check(data, folder))
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_all(names: Sequence[str], seconds: float, *, plain: bool, keep: Path | None) -> int:
    """Targets in turn, each in a process of its own; how many went wrong."""
    wrong = 0
    for name in names:
        command = [sys.executable, "-m", f"tests.fuzz.{name}", "--seconds", str(seconds)]
        command += ["--plain"] if plain else []
        command += ["--keep", str(keep)] if keep is not None else []
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        for line in _telling(name, f"{done.stdout}\n{done.stderr}"):
            print(line, flush=True)
        if done.returncode:
            wrong += 1
            print(f"{name}: ended with {done.returncode}\n{done.stderr[-4000:]}", flush=True)
    return wrong


def _telling(name: str, output: str) -> list[str]:
    """The lines that tell how often a target was fed."""
    lines = output.splitlines()
    kept = [line for line in lines if line.startswith(f"{name}: ")]
    return kept + [
        f"{name}: {line.strip()}"
        for line in lines
        if line.startswith(("stat::number_of_executed_units", "stat::peak_rss_mb", "Done "))
    ]
