"""A process that is gone at any of its requests to a bucket, and the run after it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

import zexport
from tests.support.buckets import BUCKET, Answer, Request, Server, serving
from tests.support.checkpoints import Model, Run, save, values
from tests.support.refusing import refused_at_every
from zexport.filenames import MANIFEST_NAME
from zexport.options import ExportOptions, ReshardOptions
from zexport.store.objects import forget_listings

_REAL = Path(__file__).parents[2] / "fixtures" / "z2_w2_bf16_groups" / "ckpt"
_SHARDS = ExportOptions(max_shard_nbytes=1_000_000)


class _Work(Struct, frozen=True):
    """What fills an address: before, as a command that is killed, and as a call that goes on."""

    name: str
    words: tuple[str, ...]
    again: Callable[[str], object]
    before: Callable[[str], object] = lambda _: None


def every_bucket_kill(folder: Path) -> str:
    """Kill exports, reshardings and parts at each request, before it is done and after.

    Exports and reshardings are refused each of their requests as well.

    Raises:
        AssertionError: something half-made had a manifest, or the rerun differs.
    """
    kills = refusals = 0
    with serving() as server:
        os.environ |= server.environment
        for work in _works(folder):
            if work.name != "part":
                refusals += refused_at_every(1, server, f"{work.name}/refused", work.again)
            top = f"{work.name}/whole"
            work.before(f"s3://{BUCKET}/{top}")
            server.requests.clear()
            assert _process(work, top, server).wait() == 0
            count, whole = len(server.requests), server.get(top)
            for at in range(1, count + 1):
                for is_done in (False, True):
                    prefix = f"{work.name}/{at}-{is_done:d}"
                    work.before(f"s3://{BUCKET}/{prefix}")
                    _kill(work, prefix, server, at, is_done=is_done)
                    _assert_right(work, prefix, server, whole)
                    kills += 1
    return f"{kills} kills of {len([*_works(folder)])} kinds of work, {refusals} refusals"


def _works(folder: Path) -> Iterator[_Work]:
    ckpt = folder / "ckpt"
    if not ckpt.exists():
        layers = {f"layers.{n}.w": values((300, 300), n) for n in range(8)}
        save(Model([layers]), Run(stage=2), ckpt)
    shards = ("--max-shard-size", "1MB", "-q")
    yield _Work(
        "export",
        ("consolidate", str(ckpt), *shards),
        lambda out: zexport.consolidate(ckpt, out, _SHARDS),
    )
    yield _Work(
        "reshard",
        ("reshard", str(_REAL), "-n", "3", "-q"),
        lambda out: zexport.reshard(_REAL, out, ReshardOptions(world_size=3)),
    )
    yield _Work(
        "part",
        ("consolidate", str(ckpt), *shards, "--part", "2/2"),
        lambda out: zexport.consolidate_part(ckpt, out, zexport.Share(2, 2), _SHARDS),
        lambda out: zexport.consolidate_part(ckpt, out, zexport.Share(1, 2), _SHARDS),
    )


def _process(work: _Work, prefix: str, server: Server) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "zexport", *work.words]
    place = words.index(str(next(word for word in work.words if "/" in word))) + 1
    words.insert(place, f"s3://{BUCKET}/{prefix}")
    return subprocess.Popen(words, env={**os.environ, **server.environment})


def _kill(work: _Work, prefix: str, server: Server, at: int, *, is_done: bool) -> None:
    seen = 0
    process: list[subprocess.Popen[bytes]] = []

    def kill(_: Request) -> Answer | None:
        nonlocal seen
        seen += 1
        if seen < at:
            return None
        process[0].kill()
        process[0].wait()
        return None if is_done and seen == at else Answer()

    server.fault = kill
    process.append(_process(work, prefix, server))
    assert process[0].wait() in (0, -9)
    server.fault = lambda _: None


def _assert_right(work: _Work, prefix: str, server: Server, whole: dict[str, bytes]) -> None:
    forget_listings()
    left = {n: d for n, d in server.get(prefix).items() if not n.startswith(".zexport_journal")}
    if MANIFEST_NAME in left:
        assert left == whole, f"{prefix}: what looks complete is not"
    if MANIFEST_NAME not in left or work.name == "part":
        work.again(f"s3://{BUCKET}/{prefix}")
        assert server.get(prefix) == whole, f"{prefix}: the rerun gave other bytes"
