"""What a stopped export leaves, and how the next one continues from it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

import zexport
from tests.support.checkpoints import values
from tests.support.sparse_checkpoint import write_sparse_zero3
from tests.support.stopping import SHARD_NBYTES, SHARDS, Job, files, flip, place_of
from zexport import (
    CheckpointError,
    DamagedCheckpointError,
    ExportDType,
    ExportOptions,
    NameLayout,
    OutputError,
    Progress,
    ReshardOptions,
    VerificationError,
)
from zexport.filenames import RECEIPTS

FIXTURES = Path(__file__).parents[2] / "fixtures"


class Stop:
    """A listener to progress that ends an export once so many bytes are written or read again."""

    def __init__(self, phase: str, nbytes: int, error: BaseException | None = None) -> None:
        self.phase, self.nbytes = phase, nbytes
        self.error = error or KeyboardInterrupt()

    def __call__(self, step: Progress) -> None:
        is_reached = step.nbytes_done >= min(self.nbytes, step.nbytes_total)
        if step.phase.value == self.phase and is_reached:
            time.sleep(0.05)  # until what was written before is noted
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
    [("readback", "write"), ("readback", "verify"), ("disk", "verify"), ("none", "write")],
)
def test_interrupt_keeps_finished_shards_and_a_rerun_gives_the_same_bytes(
    job: Job, whole: dict[str, bytes], mode: str, phase: str
) -> None:
    taken_over = []
    for count in range(1, 5):
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
        taken_over.append(len(kept))
    assert max(taken_over) >= 2


@pytest.mark.parametrize("mode", ["readback", "disk", "none"])
def test_progress_only_grows_and_ends_at_its_total(job: Job, mode: str) -> None:
    told: list[Progress] = []
    job.run(verify=mode, progress=told.append)
    phases = ["write"] if mode == "none" else ["write", "verify"]
    assert list(dict.fromkeys(step.phase.value for step in told)) == phases
    for phase in phases:
        steps = [step for step in told if step.phase.value == phase]
        done = [step.nbytes_done for step in steps]
        assert done == sorted(done)
        assert done[-1] == steps[-1].nbytes_total == pytest.approx(4 * SHARD_NBYTES, rel=1e-3)


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


def test_refusal_by_confirm_leaves_nothing(job: Job) -> None:
    options = ExportOptions(layout=NameLayout.MEMORY)
    plan = zexport.plan_export(zexport.open_checkpoint(job.source), job.out, options)
    read: list[Progress] = []

    def refuse() -> None:
        assert read
        raise CheckpointError("moved away")

    with pytest.raises(CheckpointError, match="moved away"):
        zexport.run_export(plan, progress=read.append, confirm=refuse)
    assert not job.left()


@pytest.mark.parametrize("error", [VerificationError("bad"), DamagedCheckpointError("bad")])
def test_nothing_is_kept_after_a_refusal(job: Job, error: Exception) -> None:
    _stop(job, error)
    assert not job.left()


# --- what is damaged, or another's, in the unfinished folder ---


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "first bit": lambda path: flip(path, 0),
    "last bit": lambda path: flip(path, -1),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "other JSON": lambda path: path.write_bytes(b"{}"),
    "gone": Path.unlink,
    "link": lambda path: path.symlink_to(path.rename(Path(mkdtemp()) / path.name)),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_damaged_file_of_a_stopped_export_is_written_again(
    job: Job, whole: dict[str, bytes], damage: str
) -> None:
    """Whichever it is: a shard, a note of it, or what the folder was begun for."""
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


def test_stray_files_of_a_stopped_export_are_removed(job: Job, whole: dict[str, bytes]) -> None:
    left = _stop(job)
    (left / "sub").mkdir()
    for name in ("sub/stray", "stray.safetensors", f"{RECEIPTS}/stray.safetensors.json"):
        (left / name).touch()
    assert job.run().resumed
    assert files(job.out) == whole


def test_export_stopped_again_and_again_ends_with_other_threads_and_memory(
    job: Job, whole: dict[str, bytes]
) -> None:
    for _ in range(3):
        _stop(job)
    assert job.with_options(jobs=1, max_memory_nbytes=1 << 30).run().resumed
    assert files(job.out) == whole


def test_another_export_starts_over(job: Job) -> None:
    _stop(job)
    os.utime(next(job.source.glob("*/*optim*")))
    assert job.run().resumed == ()
    shutil.rmtree(job.out)
    _stop(job)
    assert job.with_options(dtype=ExportDType.BF16).run().resumed == ()
    assert zexport.verify_export(job.out, against=job.source).ok


@pytest.mark.parametrize(("version", "resumes"), [(zexport.__version__, True), ("9.9", False)])
def test_another_zexport_starts_over(job: Job, version: str, resumes: bool) -> None:
    _stop(job)
    done = job.typed("--json", version=version)
    assert bool(json.loads(done.stdout)["resumed"]) == resumes


def test_source_that_was_damaged_while_the_stopped_export_read_it_is_refused(job: Job) -> None:
    """The first run read a wrong byte, which is right again when the second begins."""
    (source,) = job.source.glob("*/*rank_0_*optim*")
    flip(source, at := place_of(0, source) + 40)
    _stop(job)
    assert [path.name for path in job.partial.glob("*.safetensors")]
    flip(source, at)
    with pytest.raises(DamagedCheckpointError, match="does not hold the bytes that were saved"):
        job.run()
    assert not job.left()
    assert job.run().resumed == ()


# --- what the disk does ---


@pytest.mark.parametrize("mode", ["readback", "disk"])
def test_disk_that_returns_other_bytes_is_detected(job: Job, mode: str) -> None:
    spoiled: list[Progress] = []

    def spoil(progress: Progress) -> None:
        """Change a file once all is written, before it is read again."""
        if progress.phase.value == "verify" and not spoiled:
            spoiled.append(progress)
            flip(job.partial / SHARDS[3], -1)

    with pytest.raises(VerificationError, match="does not read back as written"):
        job.run(verify=mode, progress=spoil)
    assert not job.left()


@pytest.mark.parametrize("place", [0, 4], ids=["value", "padding"])
def test_flipped_bit_in_the_checkpoint_leaves_nothing(
    zero3: Path, tmp_path: Path, place: int
) -> None:
    (source,) = zero3.glob("*/*rank_2_*optim*")
    last = values((5,), 3)[4:].numpy().tobytes()
    flip(source, source.read_bytes().rindex(last) + place)
    job = Job(zero3, tmp_path / "out", ExportOptions())
    with pytest.raises(DamagedCheckpointError, match="does not hold the bytes that were saved"):
        job.run()
    assert not job.left()


def test_full_disk_keeps_finished_shards(
    job: Job, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def write(descriptor: int, data: memoryview, offset: int, write: Any = os.pwrite) -> int:
        written.append(offset)
        if len(data) > SHARD_NBYTES // 2 and len(written) > 8:
            time.sleep(0.2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done: int = write(descriptor, data, offset)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(OutputError, match="Free some space") as caught:
            job.run()
    assert "Run the same command to continue" in str(getattr(caught.value, "__notes__", ""))
    assert job.run().resumed
    assert files(job.out) == whole


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """A tensor of 600 MB goes through a process that stays below 120."""
    write_sparse_zero3(tmp_path / "ckpt", {"x": (150, 1_000_000)}, world_size=2)
    code = (
        "from zexport.cli.main import main\n"
        "try: main()\n"
        "finally: print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    words = ("consolidate", tmp_path / "ckpt", tmp_path / "out", "--dtype", "bf16", "--quiet")
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert int(done.stdout) < 120 * 1024


def test_folder_that_cannot_be_made_is_refused_before_the_work(job: Job) -> None:
    with pytest.raises(OutputError, match="File name too long"):
        replace(job, out=job.out.with_name("n" * 250)).run()
    assert [path.name for path in job.out.parent.iterdir()] == ["ckpt"]
