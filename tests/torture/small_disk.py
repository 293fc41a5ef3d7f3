"""A real file system that is too small, if this machine allows mounts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tests.support.stopping import Job, files, four_shards
from tests.torture.faults import Calls, watched
from tests.torture.kills import count_calls
from zexport import OutputError, Progress

_PAGE = 4096


@contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[bool]:
    """Mount a tmpfs on ``folder`` for the block; yield whether the system allows it."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder))
    allowed = subprocess.run(words, check=False, capture_output=True, timeout=30).returncode == 0
    try:
        yield allowed
    finally:
        if allowed:
            subprocess.run(("umount", str(folder)), check=True, timeout=30)


def every_size(folder: Path, step: int = 32) -> str:
    """Export to disks of growing size, ``step`` pages apart; describe the results."""
    job = four_shards(folder)
    whole = job.made()
    refused = 0
    sizes = range(_PAGE, 2 * sum(map(len, whole.values())) + (1 << 20), step * _PAGE)
    for nbytes in sizes:
        with mounted(folder / "mount", nbytes) as allowed:
            if not allowed:
                return "none: no permission to mount"
            refused += _refused(replace(job, out=folder / "mount" / "out"), whole)
    assert 0 < refused < len(sizes)
    return f"{len(sizes)} tmpfs; {refused} too small, each noticed before a byte was written"


def _refused(job: Job, whole: dict[str, bytes]) -> bool:
    """Return whether the disk was too small; then nothing may be left."""
    written: list[Progress] = []
    try:
        job.run(progress=written.append)
    except OutputError as error:
        problem = error.problem
    else:
        assert files(job.out) == whole
        shutil.rmtree(job.out)
        return False
    assert not written, f"noticed after {written}"
    assert "disk space" in problem or "No space left" in problem, problem
    assert not list(job.out.parent.iterdir()), "something is left"
    return True


def every_filling(folder: Path, step: int = 1) -> str:
    """Have another process take all space before every ``step``-th call; describe the results."""
    job = four_shards(folder)
    whole = job.made()
    points = range(1, count_calls(job).total() + 1, step)
    with mounted(folder / "mount", 3 * sum(map(len, whole.values()))) as allowed:
        if not allowed:
            return "none: no permission to mount"
        own = replace(job, out=folder / "mount" / "out")
        resumed = [_filled(own, at, whole) for at in points]
    refused = [count for count in resumed if count is not None]
    assert max(refused) > 0
    return f"{len(points)} fillings; {len(refused)} refused, {sum(map(bool, refused))} resumed"


def _filled(job: Job, at: int, whole: dict[str, bytes]) -> int | None:
    """Return how many shards the rerun resumed; ``None`` if the first run needed no more space."""
    other = job.out.with_name("other")

    def fill(_name: str, number: int) -> None:
        if number == at:
            with other.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))

    problem = ""
    try:
        with watched(Calls(fill)):
            job.run()
    except OutputError as error:
        problem = error.problem
    resumed = None
    if problem:
        assert "disk space" in problem or "No space left" in problem, problem
        assert not job.out.exists()
        kept = {path.name for path in job.partial.glob("model-*.safetensors")}
        other.unlink()
        assert {*job.run().resumed} == kept
        resumed = len(kept)
    assert files(job.out) == whole
    other.unlink(missing_ok=True)
    shutil.rmtree(job.out)
    return resumed
