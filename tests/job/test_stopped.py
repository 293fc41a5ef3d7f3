"""What a stopped export leaves, and how the next one continues from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from errno import ENOMEM
from pathlib import Path
from tempfile import mkdtemp

import pytest

import zexport
from tests.support.sparse_checkpoint import write_sparse_zero3
from tests.support.stopping import SHARD_NBYTES, SHARDS, Job, files, flip, place_of
from tests.torture.faults import Calls, watched
from zexport import (
    DamagedCheckpointError,
    ExportDType,
    Progress,
    ReshardOptions,
    VerificationError,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"


class Stop:
    """A progress listener that ends an export after ``nbytes`` of a phase."""

    def __init__(self, phase: str, nbytes: int, error: BaseException | None = None) -> None:
        self.phase, self.nbytes = phase, nbytes
        self.error = error or KeyboardInterrupt()

    def __call__(self, step: Progress) -> None:
        is_reached = step.nbytes_done >= min(self.nbytes, step.nbytes_total)
        if step.phase.value == self.phase and is_reached:
            time.sleep(0.05)  # until earlier files have receipts
            raise self.error


def _stop(job: Job, error: BaseException | None = None) -> Path:
    """Stop an export that has finished all shards but one; the folder that it leaves."""
    stop = Stop("verify", 4 * SHARD_NBYTES, error)
    with pytest.raises(type(stop.error)) as caught:
        job.run(progress=stop)
    assert caught.value is stop.error
    assert not job.out.exists()
    return job.partial


@pytest.mark.parametrize(
    ("mode", "phase"),
    [("readback", "write"), ("disk", "verify"), ("none", "write")],
)
def test_interrupt_keeps_finished_shards_and_a_rerun_gives_the_same_bytes(
    job: Job, whole: dict[str, bytes], mode: str, phase: str
) -> None:
    resumed = 0
    for count in (1, 3, 4):
        stop = Stop(phase, count * SHARD_NBYTES)
        with pytest.raises(KeyboardInterrupt):
            job.run(progress=stop, verify=mode)
        kept = {path.name for path in job.partial.glob("*.safetensors")}
        assert bool(kept) == bool(getattr(stop.error, "__notes__", []))
        report = job.run(verify=mode)
        assert {*report.resumed} == kept
        assert report.nbytes_read == (len(SHARDS) - len(kept)) * SHARD_NBYTES
        assert files(job.out) == whole
        assert job.left() == {"out"}
        shutil.rmtree(job.out)
        resumed = max(resumed, len(kept))
    assert resumed >= 2


def test_resharding_continues_after_an_interrupt(tmp_path: Path) -> None:
    source = FIXTURES / "z3_w2_bf16_frozen" / "ckpt"
    job = Job(source, tmp_path / "out", ReshardOptions(world_size=3))
    whole = job.made()
    _stop(job)
    stale = job.partial / "old" / "deep" / "c.pt"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of another plan")
    assert job.run().resumed
    assert files(job.out) == whole


def test_finished_shards_are_kept_without_memory(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(ENOMEM, "Cannot allocate memory")

    _stop(job)
    with monkeypatch.context() as patch:
        patch.setattr("zexport.export.stream.mmap", refused)
        with pytest.raises(OSError, match="memory"):
            job.run()
    assert job.run().resumed


@pytest.mark.parametrize("error", [VerificationError("bad"), DamagedCheckpointError("bad")])
def test_nothing_is_kept_after_a_refusal(job: Job, error: Exception) -> None:
    _stop(job, error)
    assert not job.left()


# --- damaged and foreign files in the unfinished folder ---


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "last bit": lambda path: flip(path, -1),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "gone": Path.unlink,
    "link": lambda path: path.symlink_to(path.rename(Path(mkdtemp()) / path.name)),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_damaged_file_of_a_stopped_export_is_written_again(
    job: Job, whole: dict[str, bytes], damage: str
) -> None:
    """Each in turn: shards, receipts, and the sealed plan."""
    left = _stop(job)
    kept = shutil.copytree(left, job.out.with_name("kept"))
    names = [path.relative_to(kept) for path in kept.rglob("*") if path.is_file()]
    resumed: set[str] = set()
    for name in names:
        _DAMAGE[damage](left / name)
        report = job.run()
        assert name.name not in report.resumed
        assert files(job.out) == whole
        assert not any(path.is_symlink() for path in job.out.iterdir())
        resumed |= {*report.resumed}
        job.restore(kept)
    assert len(names) > 3
    assert resumed


def test_another_export_starts_over(job: Job) -> None:
    _stop(job)
    os.utime(next(job.source.glob("*/*optim*")))
    assert job.run().resumed == ()
    shutil.rmtree(job.out)
    _stop(job)
    assert job.with_options(dtype=ExportDType.BF16).run().resumed == ()
    assert zexport.verify_export(job.out, against=job.source).ok


def test_source_that_was_damaged_while_the_stopped_export_read_it_is_refused(job: Job) -> None:
    """The first run read a wrong byte; the second run reads the right one."""
    (source,) = job.source.glob("*/*rank_0_*optim*")
    flip(source, at := place_of(0, source) + 40)
    _stop(job)
    assert [path.name for path in job.partial.glob("*.safetensors")]
    flip(source, at)
    with pytest.raises(DamagedCheckpointError, match="CRC-32"):
        job.run()
    assert not job.left()
    assert job.run().resumed == ()


# --- disks ---


def test_disk_that_returns_other_bytes_is_detected(job: Job) -> None:
    spoiled: list[Progress] = []

    def spoil(progress: Progress) -> None:
        if progress.phase.value == "verify" and not spoiled:
            spoiled.append(progress)
            flip(job.partial / SHARDS[3], -1)

    with pytest.raises(VerificationError, match="read back"):
        job.run(progress=spoil)
    assert not job.left()


def test_disk_that_returns_other_bytes_of_a_small_file_is_detected(job: Job) -> None:
    spoiled, path = [False], job.partial / "README.md"

    def spoil(*_: object) -> None:
        if path.exists() and not spoiled[0]:
            spoiled[0] = True
            flip(path, -1)

    with watched(Calls(spoil)), pytest.raises(VerificationError, match="read back"):
        job.run()
    assert not job.left()


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """A tensor of 320 MB is exported within 120 MB."""
    write_sparse_zero3(tmp_path / "ckpt", {"x": (80, 1_000_000)}, world_size=2)
    code = (
        "from zexport.__main__ import main\n"
        "try: main()\n"
        "finally: print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    words = ("consolidate", tmp_path / "ckpt", tmp_path / "out", "--dtype", "bf16", "--quiet")
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert int(done.stdout) < 120 * 1024
