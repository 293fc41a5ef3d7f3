"""``python -m benchmarks.reshard``: resharding, a copy of its output, and ds_to_universal.

Every command runs once a round, in random order, on a settled disk with the source in the page
cache; ratios are of medians. The copy ends with its bytes on the disk, as a resharding does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import SystemRandom
from statistics import median
from tempfile import mkdtemp

from benchmarks.cases import Case
from benchmarks.machine import machine_in_words
from benchmarks.measure import CommandFailedError, Sample, copy, run
from benchmarks.methods import zexport
from benchmarks.table import seconds, spread

_RANKS = 3
BARE, WHOLE = "zexport reshard --verify none", "zexport reshard"
COPY, UNIVERSAL = "cp + sync -d of its files", "ds_to_universal"
TARGETS = {BARE: 1.3, WHOLE: 2.0}
"""Limit, as a multiple of the copy."""

Commands = Mapping[str, Callable[[Path], Sample]]


def main() -> None:
    """Measure and print; ends with code 1 when a command fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=__doc__)
    parser.add_argument("--numel", type=float, default=0.4e9, help="parameters (0.4e9)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command (5)")
    parser.add_argument("--work", type=Path, default=Path("build"), help="where to work (build)")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    work = Path(mkdtemp(prefix="reshard-", dir=asked.work)).resolve()
    print(f"{machine_in_words(work)}.\n")
    try:
        for stage in (3, 2):
            _measure(Case(work, int(asked.numel), 4, stage, frozen=False), asked.rounds)
    except CommandFailedError as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(work)


def _measure(case: Case, rounds: int) -> None:
    """One checkpoint's table, printed; nothing of it is left."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    case.make(env)
    reference = case.work / "reference"
    _reshard(case, env, ())(reference)
    commands: Commands = {
        BARE: _reshard(case, env, ("--verify", "none")),
        WHOLE: _reshard(case, env, ()),
        COPY: partial(copy, next(p for p in reference.iterdir() if p.is_dir()), env),
        UNIVERSAL: _universal(case, env),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name in SystemRandom().sample([*commands], len(commands)):
            os.sync()
            for file in sorted(case.folder.rglob("*.pt")):
                _read(file)
            samples[name].append(commands[name](case.work / "out"))
            shutil.rmtree(case.work / "out")
    shutil.rmtree(reference)
    shutil.rmtree(case.folder)
    print(f"### {case.title}, to {_RANKS} ranks\n\n{_table(samples)}\n", flush=True)


def _reshard(case: Case, env: Mapping[str, str], more: Sequence[str]) -> Callable[[Path], Sample]:
    argv = [*zexport(), "reshard", str(case.folder)]
    options = ["--world-size", str(_RANKS), "--json", *more]
    return lambda out: run([*argv, str(out), *options], env)[0]


def _universal(case: Case, env: Mapping[str, str]) -> Callable[[Path], Sample]:
    """A run of DeepSpeed's own converter; it ends before its bytes are on the disk."""
    argv = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    tag = case.folder / (case.folder / "latest").read_text(encoding="utf-8").strip()
    folders = ["--input_folder", str(tag), "--output_folder"]
    return lambda out: run([*argv, *folders, str(out / "universal")], env)[0]


def _read(path: Path) -> None:
    """Have the page cache hold a file."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 22):
            pass


def _table(samples: Mapping[str, Sequence[Sample]]) -> str:
    rows = [
        "| command | median s | x cp | spread | CPU s | peak RSS MB | at most |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in samples.items():
        ratio = seconds(found) / seconds(samples[COPY])
        rss = max(sample.peak_rss for sample in found) / 1e6
        target = f"{TARGETS[name]:g}" if name in TARGETS else ""
        cells = (
            name,
            f"{seconds(found):.2f}",
            f"{ratio:.2f}",
            f"{spread(found):.1f}",
            f"{median(sample.cpu_seconds for sample in found):.1f}",
            f"{rss:.0f}",
        )
        rows.append(f"| {' | '.join(cells)} | {target} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
