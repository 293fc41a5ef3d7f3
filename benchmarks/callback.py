"""Cost of the export callback in a training run: ``python -m benchmarks.callback [--rounds N]``.

The same training on two ranks, which saves at every second step, with the callback and without it
in turn. Its times are ratios within one run; seconds of the ranks' processors change little where
the machine does other work as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.machine import machine_in_words

_WARM_UP = 2
"""Steps that are left out: the first ones load what all others have."""

_LIMIT_S = 1800
Spent = list[tuple[float, float]]
"""Seconds from each step to the next, by the clock and of the processor."""


def main() -> None:
    """Print a line for steps with a save and one for those without, and what was exported."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.callback")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8, help="of 3.4 million parameters each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zexport-callback-") as scratch:
        work = Path(scratch)
        print(machine_in_words(work))
        spent: dict[bool, Spent] = {False: [], True: []}
        exported = 0
        for number in range(options.rounds):
            for has_callback in random.sample([False, True], 2):
                folder = work / f"{number}-{has_callback}"
                spent[has_callback] += _train(folder, options, has_callback=has_callback)
                exported += len([*(folder / "models").glob("checkpoint-*/model.safetensors")])
        _tell(spent, options.rounds, exported)


def _train(folder: Path, options: argparse.Namespace, *, has_callback: bool) -> Spent:
    """One training; what its ranks have spent on each step, without those that warm up."""
    folder.mkdir()
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = [folder / "run", options.steps, options.layers]
    words += [folder / "models"] * has_callback
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, *ranks, "-m", "benchmarks.callback_training", *map(str, words)],
        env=os.environ | settings,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=_LIMIT_S,
    )
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("run.*.json")))
    return [(wall, cpu) for one in found for wall, cpu in one[_WARM_UP:]]


def _tell(spent: dict[bool, Spent], rounds: int, exported: int) -> None:
    for at, what in enumerate(("by the clock", "of the ranks' processors")):
        without, with_callback = (median(one[at] for one in spent[key]) for key in (False, True))
        total = sum(one[at] for one in spent[True]) / sum(one[at] for one in spent[False])
        print(
            f"{what}: {without:.3f} s a step without it, {with_callback:.3f} s with it (medians), "
            f"{total:.3f} times as much in all"
        )
    print(f"{rounds} rounds of each, {exported} checkpoints exported meanwhile")


if __name__ == "__main__":
    main()
