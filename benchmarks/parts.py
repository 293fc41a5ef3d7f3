"""Several workers of one folder: do n of them take an nth of the time?

``python -m benchmarks.parts`` forks workers whose reading is throttled, each to the same rate, as
storage does that gives every machine its share: so they need hardly any processor, and sixteen of
them fit on two idle cores.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from tests.support.sparse_checkpoint import write_sparse_zero3
from zexport import ExportOptions, Share, consolidate_part
from zexport.storage.local import LocalInput


class _Throttle:
    """Lets bytes through at a rate, to all threads of this process together."""

    def __init__(self, nbytes_a_second: float) -> None:
        self._rate = nbytes_a_second
        self._lock = Lock()
        self._free_at = 0.0
        self.first = 0.0

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.first = self.first or time.time()
            self._free_at = max(self._free_at, time.time()) + nbytes / self._rate
            wait = self._free_at - time.time()
        time.sleep(max(wait, 0.0))


def _worker(work: Path, out: Path, share: Share, rate: float, start: Any, times: Any) -> None:
    throttle, whole = _Throttle(rate), LocalInput.read

    def read(self: LocalInput, offset: int, part: memoryview) -> int:
        if self.path.suffix == ".pt":
            throttle(part.nbytes)
        return whole(self, offset, part)

    LocalInput.read = read  # type: ignore[method-assign]
    options = ExportOptions(jobs=1, max_shard_nbytes=1_000_000)  # a file for each tensor
    start.wait()  # machines do not wait for each other's processes to be forked
    consolidate_part(work / "ckpt", out, share, options)
    times.put((throttle.first, time.time()))


def workers(work: Path, counts: Sequence[int], rate: float, numel: int) -> None:
    """From the first data byte to publication: at most 1.1/n of one worker's time."""
    shapes = {f"model.layers.{n}.weight": (numel // 64 // 1024, 1024) for n in range(64)}
    write_sparse_zero3(work / "ckpt", shapes, 8)
    context, single = get_context("fork"), 0.0
    for count in counts:
        out = work / f"out{count}"
        start, times = context.Barrier(count), context.Queue()
        each = [
            context.Process(target=_worker, args=(work, out, Share(n, count), rate, start, times))
            for n in range(1, count + 1)
        ]
        for process in each:
            process.start()
        found = [times.get(timeout=300) for _ in each]
        for process in each:
            process.join()
        seconds = max(end for _, end in found) - min(first for first, _ in found)
        single = single or seconds * count
        _report(
            f"{count} workers: {seconds:.1f} s, {seconds * count / single:.3f}/n of a single worker"
        )
        shutil.rmtree(out)


def _report(line: str) -> None:
    print(f"  {line}", flush=True)


def main() -> None:
    """Print the figure of each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rate", type=float, default=2e6, help="bytes a second of each worker")
    parser.add_argument("--numel", type=int, default=1 << 24, help="parameters")
    parser.add_argument("--work", type=Path, help="where the files go, such as /dev/shm")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.work, prefix="zexport-parts-") as scratch:
        workers(Path(scratch), options.counts, options.rate, options.numel)


if __name__ == "__main__":
    main()
