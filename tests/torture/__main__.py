"""``python -m tests.torture [--seconds N] [--kills N] [--numel N]``: the long forms.

Prints a table of what was done and found; the first broken promise ends it with a traceback.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.support.real_cases import FIXTURES
from tests.support.resharding import any_move, departures
from tests.support.stopping import SHARDS, Job, four_shards
from tests.torture.bucket_kills import every_bucket_kill
from tests.torture.changes import every_change
from tests.torture.commands import Export, killed_at_random, make_checkpoint
from tests.torture.kills import count_calls, killed_at, killed_twice, killed_workers
from tests.torture.large import every_large
from tests.torture.memory import refused_memory
from tests.torture.power_loss import every_cut
from tests.torture.prunings import killed_prunings, killed_removals
from tests.torture.refusals import FAULTS, every_fault
from tests.torture.small_disk import every_filling, every_size
from zexport import ReshardOptions

_MOVES_AT_ONCE = 100
"""Of one group of processes for each number of ranks, which takes long to start."""

_SOURCE = FIXTURES / "z3_w2_bf16_frozen" / "ckpt"
_REPOSITORY = Path(__file__).parents[2]


def main() -> None:
    """Run everything, the quick parts first."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture")
    parser.add_argument("--seconds", type=int, default=60, help="for each fuzzer, and for moves")
    parser.add_argument("--kills", type=int, default=200, help="commands ended at random")
    parser.add_argument("--numel", type=float, default=2e7, help="parameters of the checkpoint")
    parser.add_argument("--states", type=int, default=10_000, help="checkpoints with other values")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zexport-torture-") as scratch:
        folder = Path(scratch)
        for source in ("ZeRO", "FSDP"):
            job = four_shards(folder / source, fsdp=source == "FSDP")
            _check(f"{source}: killed before every call of the system", partial(_every_kill, job))
        _check("rerun killed too", lambda: _every_second_kill(folder / "twice"))
        resharding = Job(_SOURCE, folder / "resharding" / "out", ReshardOptions(world_size=3))
        for what, job in {
            "folder": four_shards(folder / "parts"),
            "resharding": resharding,
        }.items():
            _check(
                f"workers of one {what} killed anywhere",
                partial(_worker_kills, job, options.kills, options.seed),
            )
        _check("every call refused, by every fault", lambda: _every_fault(folder / "faults"))
        _check("disks of every size", lambda: every_size(folder / "disk"))
        _check("disk filled by another process", lambda: every_filling(folder / "full"))
        _check("memory refused", lambda: _every_allocation(folder / "memory"))
        _check("source changed at every third call", lambda: every_change(folder / "source", 3))
        _check(
            "commands ended at random moments", lambda: _random_kills(folder / "random", options)
        )
        _check("prunings killed anywhere", lambda: f"{killed_prunings(folder / 'prune')} kills")
        _check("removals killed anywhere", lambda: f"{killed_removals(folder / 'watch')} kills")
        _check("power lost at any moment", lambda: every_cut(folder / "power"))
        _check(
            "training moved to other ranks and stages", lambda: _moves(folder / "moves", options)
        )
        _check("larger than 32 bits count", lambda: every_large(folder / "large"))
        _check("killed at every request to a bucket", lambda: every_bucket_kill(folder / "bucket"))
    _check("fuzzers", lambda: _fuzz("tests.fuzz", "--seconds", options.seconds))
    states = ("tests.fuzz", "states", "--plain", "--seconds", 1, "--inputs", options.states)
    _check("checkpoints of every layout with values exchanged", lambda: _fuzz(*states))


def _check(name: str, act: Callable[[], str]) -> None:
    began = time.monotonic()
    found = act()
    print(f"{name}: {found} ({time.monotonic() - began:.0f} s)", flush=True)


def _every_kill(job: Job) -> str:
    whole, count = job.made(), count_calls(job).total()
    resumed = [killed_at(job, at, whole) for at in range(1, count + 1)]
    shards = ", ".join(f"{resumed.count(n)} with {n}" for n in range(len(SHARDS) + 1))
    return f"{count} kills; reruns that took finished shards over: {shards}"


def _every_second_kill(folder: Path) -> str:
    job = four_shards(folder)
    whole, count = job.made(), count_calls(job).total()
    firsts = range(1, count + 1, count // 20)
    kills = sum(killed_twice(job, first, 8, whole) for first in firsts)
    return f"{kills} kills: at {len(firsts)} calls, and at every eighth of each rerun"


def _every_allocation(folder: Path) -> str:
    job = four_shards(folder)
    return refused_memory(job, job.made(), range(100, 120_000, 100), range(0, 24 << 20, 256 << 10))


def _worker_kills(job: Job, times: int, seed: int) -> str:
    found = killed_workers(job, 3, times, seed, job.made())
    return f"{found['kills']} kills of 3 workers; {found['folders']} folders, all whole"


def _every_fault(folder: Path) -> str:
    job = four_shards(folder)
    whole = job.made()
    stopped = [found for fault in FAULTS for found in every_fault(job, fault, whole, step=1)]
    return f"{len(stopped)} refusals of {len(FAULTS)} kinds; {sum(stopped)} ended the export"


def _random_kills(folder: Path, options: argparse.Namespace) -> str:
    sixteenth = str(int(options.numel / 4))  # of the output's bytes, as fp32
    export = Export(make_checkpoint(folder / "ckpt", options.numel), folder / "out", sixteenth)
    found = killed_at_random(export, options.kills, options.seed)
    return ", ".join(f"{count} {word}" for word, count in sorted(found.items()))


def _moves(folder: Path, options: argparse.Namespace) -> str:
    """Real DeepSpeed saves, loads what was resharded, and trains on, while there is time."""
    chance = random.Random(options.seed)  # noqa: S311 - chooses runs
    began, done = time.monotonic(), 0
    while done == 0 or time.monotonic() - began < options.seconds:
        own = folder / str(done)
        own.mkdir(parents=True)
        found = departures([any_move(chance) for _ in range(_MOVES_AT_ONCE)], own)
        if found:
            raise SystemExit("\n".join(f"{move}: {what}" for move, what in found.items()))
        shutil.rmtree(own)
        done += _MOVES_AT_ONCE
    return f"{done} moves resumed with equal state"


def _fuzz(*words: object) -> str:
    """The fuzzers of ``tests/fuzz``, which keep their own figures."""
    line = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(line, cwd=_REPOSITORY, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"fuzzers: {done.stdout}")
    return "; ".join(done.stdout.splitlines())


if __name__ == "__main__":
    main()
