"""Run fuzzers: one in this process, several each in its own."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FunctionType

from tests.fuzz.runner import NAMES, Figures, Target, run_plain, target

_GUIDING = ("zexport", "zipfile", "json")
_INPUT_NBYTES_MAX = 1 << 16
_ADDRESSES_NBYTES = 8 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Run fuzzers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (all)")
    parser.add_argument("--seconds", type=float, default=60, help="for each")
    parser.add_argument("--inputs", type=int, default=0, help="at least, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--keep", type=Path, help="folder for inputs that fail")
    chosen = parser.parse_args()
    if len(chosen.names) == 1:
        return _run(target(chosen.names[0]), chosen)
    failed = 0
    options = [word for word in sys.argv[1:] if word not in chosen.names]
    for name in chosen.names or NAMES:
        command = [sys.executable, "-m", "tests.fuzz", name, *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        for line in f"{done.stdout}\n{done.stderr}".splitlines():
            if line.startswith((f"{name}: ", "stat::number_of_executed_units", "Done ")):
                print(line, flush=True)
        if done.returncode:
            failed += 1
            print(f"{name}: ended with {done.returncode}\n{done.stderr[-4000:]}", flush=True)
    return int(failed > 0)


def _run(one: Target, chosen: argparse.Namespace) -> int:
    # Excess memory must end in a MemoryError.
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES_NBYTES, most))
    keep = chosen.keep or Path(tempfile.gettempdir()) / "zexport-fuzz"
    with tempfile.TemporaryDirectory() as name:
        if importlib.util.find_spec("atheris") and not chosen.plain:
            _run_atheris(one, Path(name), keep, chosen.seconds)
        start = time.monotonic()

        def more(count: int) -> bool:
            return count < chosen.inputs or time.monotonic() - start < chosen.seconds

        figures: Figures = run_plain(one, Path(name), seed=chosen.seed, more=more, keep=keep)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{one.name}: {figures.executions} executions in {time.monotonic() - start:.0f} s, "
        f"{figures.accepted} accepted, {figures.crashes} crashes, {peak} MiB at most"
    )
    return int(figures.crashes > 0)


def _run_atheris(one: Target, folder: Path, keep: Path, seconds: float) -> None:
    """Run guided by coverage; atheris ends the process."""
    import atheris  # type: ignore[import-not-found]

    corpus = folder / "corpus"
    corpus.mkdir()
    keep.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(one.seeds()):
        (corpus / str(number)).write_bytes(seed)
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and str(function.__module__).startswith(_GUIDING):
            atheris.instrument_func(function)
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={_INPUT_NBYTES_MAX}",
        f"-artifact_prefix={keep}/crash-{one.name}-",
        "-print_final_stats=1",
        "-rss_limit_mb=1024",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: one.check(data, folder))
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
