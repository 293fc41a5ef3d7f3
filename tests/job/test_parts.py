"""``--part``: several processes write one export."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.checkpoints import Run, save, small_model
from tests.support.stopping import SHARD_NBYTES, SHARDS, Job, files, flip, four_shards
from tests.torture.faults import RENAMES, Calls, ended, forked, killing, watched
from zexport import (
    CheckpointError,
    ExportDType,
    ExportOptions,
    ExportReport,
    OutputError,
    PartReport,
    VerificationError,
    ZexportError,
    finish_export,
    verify_export,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
FIXTURE = FIXTURES / "z3_w2_bf16" / "ckpt"


@pytest.fixture
def real(tmp_path: Path) -> Job:
    """An export with config and tokenizer."""
    return Job(shutil.copytree(FIXTURE, tmp_path / "ckpt"), tmp_path / "out", ExportOptions())


def _parts(job: Job, count: int, *numbers: int) -> list[ExportReport | PartReport]:
    return [job.part(number, count) for number in numbers]


def _error(act: Callable[[], object]) -> str:
    """Return the error; empty on success."""
    try:
        act()
    except ZexportError as error:
        return error.sentence()
    return ""


def _published(job: Job, count: int, numbers: Sequence[int]) -> list[str]:
    """Run parts, and do what errors ask for, until the folder exists; return the errors."""
    errors: list[str] = []
    for _ in range(3):
        for number in numbers:
            if not job.out.exists():
                errors.append(_error(lambda number=number: job.part(number, count)))  # type: ignore[misc]
                if "remove the folder" in errors[-1]:
                    shutil.rmtree(job.partial)
    return [one for one in errors if one]


@pytest.mark.parametrize("job", ["zero", "fsdp"], indirect=True)
@pytest.mark.parametrize("count", [4, 7])
def test_parts_in_any_order_give_the_bytes_of_one_process(
    job: Job, whole: dict[str, bytes], count: int
) -> None:
    order = [*range(2, count + 1, 2), *range(1, count + 1, 2)]
    *before, last = _parts(job, count, *order)
    assert files(job.out) == whole
    assert isinstance(last, ExportReport)
    assert all(isinstance(report, PartReport) for report in before)
    if count == len(SHARDS):
        assert {one.nbytes_written for one in before} == {SHARD_NBYTES}
    assert job.left() == {"out"}


@pytest.mark.parametrize("job", ["zero", "fsdp"], indirect=True)
def test_parallel_parts_and_twins_give_the_same_bytes(job: Job, whole: dict[str, bytes]) -> None:
    workers = [forked(lambda n=n: _error(lambda: job.part(n, 3)), Calls()) for n in (1, 2, 3) * 2]  # type: ignore[misc]
    assert {ended(worker) for worker in workers} == {0}
    _published(job, 3, (1, 2, 3))
    assert files(job.out) == whole
    assert job.left() == {"out"}


def test_twin_of_a_working_part_is_refused_and_one_process_too(
    job: Job, whole: dict[str, bytes]
) -> None:
    _parts(job, 2, 2)
    code = (
        "import os, sys, time\n"
        "from zexport.__main__ import main\n"
        "def write(*given, whole=os.pwrite):\n"
        "    if len(given[1]) > 500_000: print('at work', flush=True); time.sleep(60)\n"
        "    return whole(*given)\n"
        "os.pwrite = write; main()\n"
    )
    words = ("consolidate", job.source, job.out, "--layout", "memory", "--max-shard-size", "1MB")
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words), "--part", "1/2", "--quiet"],
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"at work\n"
        with pytest.raises(OutputError, match="another process writes part 1/2 of this folder"):
            job.part(1, 2)
        with pytest.raises(OutputError, match=r"another (process|export)"):
            job.run()
        with pytest.raises(OutputError, match=r"still being written|missing"):
            finish_export(job.out)
        worker.kill()
    _parts(job, 2, 1)
    assert files(job.out) == whole


def test_part_that_runs_again_finds_its_work_done(job: Job, whole: dict[str, bytes]) -> None:
    _parts(job, 3, 1, 2, 3)
    for report in _parts(job, 3, 3, 2):
        assert isinstance(report, PartReport)
        assert (report.missing, report.nbytes_written) == ((), 0)
    assert files(job.out) == whole
    assert job.left() == {"out"}
    (job.out / SHARDS[3]).unlink()
    with pytest.raises(OutputError, match="exists and is not empty"):
        _parts(job, 3, 1)


# --- parts with other options or checkpoints ---


def _other_dtype(job: Job) -> Job:
    return job.with_options(dtype=ExportDType.BF16)


def _other_latest(job: Job) -> Job:
    save(small_model(), Run(stage=2, steps=4), job.source, "global_step4")
    return job


def _touched(job: Job) -> Job:
    os.utime(next(job.source.glob("*/*optim*")))
    return job


@pytest.mark.parametrize("change", [_other_dtype, _other_latest, _touched])
def test_part_with_another_option_or_checkpoint_is_refused(
    job: Job, change: Callable[[Job], Job]
) -> None:
    _parts(job, 2, 1)
    before = files(job.partial)
    problems = "other options|file changed"
    with pytest.raises((OutputError, CheckpointError), match=problems) as caught:
        change(job).part(2, 2)
    assert caught.value.hint
    assert files(job.partial) == before


def test_part_of_another_zexport_or_count_is_refused(job: Job) -> None:
    _parts(job, 2, 1)
    done = job.typed("--part", "2/2", version="9.9")
    assert done.returncode == OutputError.exit_code
    assert "plan of zexport" in " ".join(done.stderr.split())
    with pytest.raises(OutputError, match="parts 3"):
        _parts(job, 3, 2)


def test_complete_folder_of_other_weights_is_not_taken_for_the_parts_own(job: Job) -> None:
    _parts(job, 2, 1, 2)
    before = files(job.out)
    with pytest.raises(OutputError, match="exists and is not empty"):
        _other_dtype(job).part(1, 2)
    four_shards(job.source.parent, seed=7)
    with pytest.raises(OutputError, match="exists and is not empty"):
        _parts(job, 2, 1)
    assert files(job.out) == before


# --- the last step ---


def test_finish_is_refused_while_parts_are_missing(job: Job) -> None:
    with pytest.raises(OutputError, match="nothing to finish"):
        finish_export(job.out)
    _parts(job, 3, 1, 3)
    with pytest.raises(OutputError, match=rf"missing.*({SHARDS[1]}|{SHARDS[2]})"):
        finish_export(job.out)
    assert not job.out.exists()
    for path in (job.out, job.partial):
        with pytest.raises(VerificationError, match=r"is not finished .*zexport finish"):
            verify_export(path)


def test_export_is_completed_after_the_last_part_was_killed(
    job: Job, whole: dict[str, bytes]
) -> None:
    """By ``zexport finish`` or by the same part, after a kill at any call."""
    _parts(job, 3, 1, 3)
    before = shutil.copytree(job.partial, job.out.with_name("before"))
    with watched(Calls()) as calls:
        _parts(job, 3, 2)
    outcomes = set()
    for at in range(calls.counts.total() - 50, calls.counts.total() + 1, 6):
        job.restore(before)
        ended(forked(lambda: job.part(2, 3), killing(at)))
        outcomes.add(job.out.exists())
        if not job.out.exists() and (at % 12 < 6 or _error(lambda: finish_export(job.out))):
            _parts(job, 3, 2)
        assert files(job.out) == whole
        assert job.left() <= {"out", "out.partial.journal"}  # removed by the next command
    assert outcomes == {True, False}


# --- damage between the parts ---


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "bit": lambda path: flip(path, path.stat().st_size // 2),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_damage_between_the_parts_never_reaches_the_output(real: Job, damage: str) -> None:
    """Whichever file it is: a shard, a small file, a note, or what the folder was begun for."""
    real = real.with_options(max_shard_nbytes=20_000)
    whole = real.made()
    _parts(real, 3, 1)
    kept = shutil.copytree(real.partial, real.out.with_name("kept"))
    names = sorted(path.relative_to(kept) for path in kept.rglob("*") if path.is_file())
    for name in names:
        _DAMAGE[damage](real.partial / name)
        _published(real, 3, (2, 3, 1))
        assert files(real.out) == whole, name
        real.restore(kept)
    assert len(names) > 5


def test_parts_without_locks_end_right_or_with_an_error(
    job: Job, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks, as on NFS without a lock server, all parts begin and finish at once."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr("fcntl.lockf", refuse)
    for _ in range(2):
        with ThreadPoolExecutor(4) as workers:
            errors = [*workers.map(lambda n: _error(lambda: job.part(n, 4)), range(1, 5))]
        if not job.out.exists():
            assert any(errors)
            _published(job, 4, (1, 2, 3, 4))
        assert files(job.out) == whole
        shutil.rmtree(job.out)


def test_journal_that_another_process_puts_back_is_removed(
    job: Job, whole: dict[str, bytes]
) -> None:
    """Without locks, a process that begins may take the one that publishes for dead."""
    aside, moved = job.partial.with_name("out.partial.journal"), list[Path]()

    def put_back(name: str, _number: int) -> None:
        if name in RENAMES and not moved and aside.exists():
            moved.append(aside)
            aside.rename(job.partial / ".zexport_journal")

    with watched(Calls(put_back)):
        job.run()
    assert moved
    assert files(job.out) == whole
