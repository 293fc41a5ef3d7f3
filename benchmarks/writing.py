"""What writing costs: ``python -m benchmarks.writing``.

Every figure is the least of some runs in random order: a copy of a finished export (cp and sync),
an export that is not read back, one that is, and one reading of the output with CRC-32. With
``--against`` another checkout exports, too; ``--work /dev/shm`` shows processor time only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory

from benchmarks.cases import Case
from benchmarks.machine import machine_in_words
from benchmarks.measure import Sample, copy, run

_HERE = Path(__file__).resolve().parent.parent
_CRC32 = """
import sys
from pathlib import Path
from isal.isal_zlib import crc32
buffer = memoryview(bytearray(1 << 20))
for path in sorted(Path(sys.argv[1]).iterdir()):
    with path.open("rb", buffering=0) as file:
        crc = 0
        while count := file.readinto(buffer):
            crc = crc32(buffer[:count], crc)
"""


def _export(tree: Path, case: Case, verify: str) -> Callable[[Path], Sample]:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    argv = [sys.executable, "-P", "-m", "zexport", "consolidate", str(case.folder), "--quiet"]
    return lambda out: run([*argv, str(out), "--dtype", "fp32", "--verify", verify], env)[0]


def measure(case: Case, work: Path, trees: Sequence[Path], rounds: int) -> dict[str, list[Sample]]:
    """Return the samples of each command, in random order, each on a settled disk."""
    case.make(dict(os.environ))
    out, reference = work / "out", work / "reference"
    shutil.rmtree(reference, ignore_errors=True)
    _export(_HERE, case, "none")(reference)
    read = [sys.executable, "-c", _CRC32, str(reference)]
    commands: dict[str, Callable[[Path], Sample]] = {
        "cp + sync": lambda out: copy(reference, os.environ, out),
        "read with CRC-32": lambda _: run(read, os.environ)[0],
    }
    for tree in trees:
        commands[f"{tree}: unverified"] = _export(tree, case, "none")
        commands[f"{tree}: read back"] = _export(tree, case, "readback")
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    for _ in range(rounds):
        order = list(commands)
        SystemRandom().shuffle(order)  # what wrote before decides how fast memory is to be had
        for name in order:
            os.sync()
            case.warm()
            samples[name].append(commands[name](out))
            shutil.rmtree(out, ignore_errors=True)
    return samples


def main() -> None:
    """Print seconds, processor seconds and peak memory, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=float, default=0.37e9)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", type=Path, help="another checkout, measured in the same run")
    parser.add_argument("--work", type=Path, default=Path("build"), help="such as /dev/shm")
    options = parser.parse_args()
    trees = [_HERE, *([options.against.resolve()] if options.against else [])]
    options.work.mkdir(exist_ok=True)
    print(machine_in_words(options.work))
    with TemporaryDirectory(dir=options.work, prefix="writing-") as name:
        work = Path(name)
        case = Case(work, int(options.numel), 4, 3, frozen=False)
        samples = measure(case, work, trees, options.rounds)
    least = {name: min(one.seconds for one in found) for name, found in samples.items()}
    for name, found in samples.items():
        cpu, peak = min(one.cpu_seconds for one in found), max(one.peak_rss for one in found)
        print(f"{name:40} {least[name]:6.2f} s {cpu:6.2f} CPU s {peak / 1e6:5.0f} MB")
    for tree in trees:
        bare, checked = least[f"{tree}: unverified"], least[f"{tree}: read back"]
        print(f"{tree}: unverified {bare / least['cp + sync']:.2f} x cp + sync")
        print(f"  reading back {(checked - bare) / least['read with CRC-32']:.2f} x one reading")


if __name__ == "__main__":
    main()
