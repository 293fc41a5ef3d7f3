"""A process that is gone at any of its requests to a bucket, and the run after it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zexport
from tests.support.buckets import BUCKET, Answer, Request, Server, serving
from tests.support.refusing import forget_listings, refused_at_every
from tests.support.stopping import SHARD_WORDS, Job, four_shards
from zexport import ReshardOptions
from zexport.filenames import MANIFEST_NAME, RECEIPTS

_REAL = Path(__file__).parents[2] / "fixtures" / "z2_w2_bf16_groups" / "ckpt"


def every_bucket_kill(folder: Path) -> str:
    """Kill exports, reshardings and parts before the first write and after each.

    Other requests change nothing. Exports and reshardings are also refused each request.
    """
    export = four_shards(folder)
    resharding = Job(_REAL, folder, ReshardOptions(world_size=3))
    kills = refusals = 0
    with serving() as server:
        os.environ |= server.environment
        for job, words in (
            (export, ("consolidate", *SHARD_WORDS)),
            (resharding, ("reshard", "-n3")),
        ):
            act = _acting(job)
            refusals += refused_at_every(1, server, f"{words[0]}/refused", act)
            kills += _killed(server, job, words, act)
        part = ("consolidate", *SHARD_WORDS, "--part", "2/2")
        kills += _killed(server, export, part, _acting(export, 2), _acting(export, 1))
    return f"{kills} kills of 3 kinds of work, {refusals} refusals"


def _acting(job: Job, part: int = 0) -> Callable[[str], object]:
    """What does a job, or a part of two, into an address."""

    def act(out: str) -> object:
        if isinstance(job.options, ReshardOptions):
            return zexport.reshard(job.source, out, job.options)
        if not part:
            return zexport.consolidate(job.source, out, job.options)
        return zexport.consolidate_part(job.source, out, zexport.Share(part, 2), job.options)

    return act


def _killed(
    server: Server,
    job: Job,
    words: tuple[str, ...],
    again: Callable[[str], object],
    before: Callable[[str], object] | None = None,
) -> int:
    """Kill a command after every write, with what comes before it; how often that was."""

    def started(prefix: str) -> subprocess.Popen[bytes]:
        command, *options = words
        line = (command, job.source, f"s3://{BUCKET}/{prefix}", "-q", *options)
        return subprocess.Popen([sys.executable, "-m", "zexport", *map(str, line)])

    place = "-".join(words).replace("/", "-")
    if before:
        before(f"s3://{BUCKET}/{place}/whole")
    server.requests.clear()
    assert started(f"{place}/whole").wait() == 0
    count, whole = sum(map(_is_write, server.requests)), server.get(f"{place}/whole")
    for number in range(count + 1):
        prefix = f"{place}/{number}"
        if before:
            before(f"s3://{BUCKET}/{prefix}")
        server.requests.clear()
        _kill(server, lambda: started(prefix), number)  # noqa: B023
        left = {n: d for n, d in server.get(prefix).items() if not n.startswith(RECEIPTS)}
        if MANIFEST_NAME in left:
            assert left == whole, f"{prefix}: what looks complete is not"
        if MANIFEST_NAME not in left or before:
            again(f"s3://{BUCKET}/{prefix}")
            assert server.get(prefix) == whole, f"{prefix}: the rerun gave other bytes"
    return count + 1


def _is_write(one: Request) -> bool:
    return one.method in ("PUT", "POST", "DELETE")


def _kill(server: Server, start: Callable[[], subprocess.Popen[bytes]], at: int) -> None:
    """Kill a process after a number of writes, whose last one is done; at 0, before the first."""
    process: list[subprocess.Popen[bytes]] = []
    seen: list[Request] = []

    def kill(one: Request) -> Answer | None:
        if not _is_write(one):
            return None
        seen.append(one)
        if len(seen) < at:
            return None
        process[0].kill()
        process[0].wait()
        return None if len(seen) == at else Answer()

    server.fault = kill
    process.append(start())
    assert process[0].wait() in (0, -9)
    time.sleep(0.3)  # the server may still be storing the last write
    server.fault = lambda _: None
    forget_listings()
