"""Exports from and into a bucket, compared with obstore moving the same bytes.

``python -m benchmarks.buckets`` asks moto's server, in a process of its own, for the same bytes in
both ways, in turn; ratios are of medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import obstore

from tests.support.buckets import BUCKET, Server, serving
from tests.support.checkpoints import Model, Run, save, values
from zexport import VerifyMode, consolidate, open_checkpoint, plan_export, run_export
from zexport.export.plan import ExportPlan
from zexport.storage.blocks import BLOCK_NBYTES, joined
from zexport.storage.location import Address

_AT_ONCE = 12
"""Requests of the library at a time, as many as its own default is for parts of an upload."""


def _serve(url: Any) -> None:
    with serving() as server:
        url.put(server.url)
        Event().wait()


@contextmanager
def _server() -> Iterator[Server]:
    """A server in a process of its own, named by this one's environment."""
    context = get_context("spawn")
    url = context.Queue()
    process = context.Process(target=_serve, args=(url,))
    process.start()
    try:
        server = Server(url.get())
        os.environ |= server.environment
        yield server
    finally:
        process.terminate()
        process.join()


def _fetch(server: Server, plan: ExportPlan) -> None:
    """Read the bytes of a plan with obstore only."""
    wanted: dict[Address, list[tuple[int, int]]] = {}
    for tensor in (tensor for file in plan.shards for tensor in file.tensors):
        for one in tensor.source.extents(0, tensor.source.nbytes):
            wanted.setdefault(Address(one.path), []).append((one.offset, one.offset + one.nbytes))
    ranges = [(path.key, block) for path, found in wanted.items() for block in joined(found)]
    store = server.store
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = (
            pool.submit(obstore.get_range, store, k, start=b, end=e) for k, (b, e, _) in ranges
        )
        for fetched in list(asked):
            fetched.result()


def _measure(server: Server, work: Path, nbytes: int, rounds: int) -> None:
    """Measure both directions and obstore with as many bytes; print the ratios."""
    tensors = {f"layers.{n}.w": values((2048, 1024), n) for n in range(nbytes >> 23)}
    run = save(Model([tensors]), Run(stage=3), work / "run")
    far = server.put(run, "run")
    consolidate(run, work / "model")
    model = work / "model" / "model.safetensors"
    names = map(str, count())

    def planned(source: Path | str, out: Path | str) -> ExportPlan:
        return plan_export(open_checkpoint(source), out)

    def send() -> None:
        obstore.put(server.store, next(names), model, chunk_size=BLOCK_NBYTES)

    for name in ("reading", "writing"):
        found = []
        for _ in range(rounds):
            is_read, number = name == "reading", next(names)
            into = work / number if is_read else f"s3://{BUCKET}/{number}"
            plan = planned(far if is_read else run, into)
            own = partial(run_export, plan, verify=VerifyMode.NONE)
            found.append(
                (_seconds(own), _seconds(partial(_fetch, server, plan) if is_read else send))
            )
            shutil.rmtree(work / number, ignore_errors=True)
        ours, theirs = (median(times) for times in zip(*found, strict=True))
        rate = model.stat().st_size / ours / 1e6
        _tell(f"{name}: {rate:.0f} MB/s, {theirs / ours:.0%} of the library's by itself")


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)


def main() -> None:
    """Print what each direction reaches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buckets", description=__doc__)
    parser.add_argument("--nbytes", type=int, default=256 << 20, help="of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where the files go, such as /dev/shm")
    options = parser.parse_args()
    with (
        TemporaryDirectory(dir=options.work, prefix="zexport-buckets-") as work,
        _server() as server,
    ):
        _measure(server, Path(work), options.nbytes, options.rounds)


if __name__ == "__main__":
    main()
