"""An export by several workers, each of which knows the checkpoint and the unfinished folder."""

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

import zexport
from tests.support.checkpoints import Run, save, small_model
from tests.support.forked import typed
from tests.support.stopping import SHARD_NBYTES, SHARDS, Job, files, flip, four_shards, place_of
from tests.torture.faults import Calls, ended, forked, killing, watched
from zexport import (
    CheckpointError,
    DamagedCheckpointError,
    Engine,
    ExportDType,
    ExportOptions,
    ExportReport,
    OutputError,
    PartReport,
    ReshardOptions,
    UsageError,
    VerificationError,
    ZexportError,
    finish_export,
    verify_export,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
FIXTURE = FIXTURES / "z3_w2_bf16" / "ckpt"


@pytest.fixture
def real(tmp_path: Path) -> Job:
    """An export with small files beside the weights."""
    return Job(shutil.copytree(FIXTURE, tmp_path / "ckpt"), tmp_path / "out", ExportOptions())


def _parts(job: Job, count: int, *numbers: int) -> list[ExportReport | PartReport]:
    return [job.part(number, count) for number in numbers]


def _told(act: Callable[[], object]) -> str:
    """The refusal that it ends with; empty if it ends well."""
    try:
        act()
    except ZexportError as error:
        return error.sentence()
    return ""


def _published(job: Job, count: int, numbers: Sequence[int]) -> list[str]:
    """Run parts until the folder is there, doing what refusals say; those refusals."""
    told: list[str] = []
    for _ in range(3):
        for number in numbers:
            if not job.out.exists():
                told.append(_told(lambda number=number: job.part(number, count)))  # type: ignore[misc]
                if "remove the folder" in told[-1]:
                    shutil.rmtree(job.partial)
    return [one for one in told if one]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_in_any_order_give_the_bytes_of_one_process(
    job: Job, whole: dict[str, bytes], count: int
) -> None:
    order = [*range(2, count + 1, 2), *range(1, count + 1, 2)]
    *before, last = _parts(job, count, *order)
    assert files(job.out) == whole
    assert isinstance(last, ExportReport)
    assert all(isinstance(report, PartReport) for report in before)
    assert job.left() == {"out"}


@pytest.mark.parametrize("count", [2, 4])
def test_part_is_whole_files(job: Job, count: int) -> None:
    for number, report in enumerate(_parts(job, count, *range(1, count)), 1):
        assert isinstance(report, PartReport)
        assert report.nbytes_written == SHARD_NBYTES * 4 // count
        assert report.missing == tuple(range(number + 1, count + 1))
        assert not job.out.exists()


@pytest.mark.parametrize(
    ("name", "stage"), [("z3_w2_bf16_frozen", 2), ("z2_w2_bf16_tied", 3), ("z3_w2_bf16", 1)]
)
def test_resharding_by_parts_gives_the_bytes_of_one_process(
    name: str, stage: int, tmp_path: Path
) -> None:
    options = ReshardOptions(world_size=3, stage=stage)
    job = Job(FIXTURES / name / "ckpt", tmp_path / "out", options)
    whole = job.made()
    _parts(job, 4, 3, 1, 4, 2)
    assert files(job.out) == whole


def test_parts_and_twins_side_by_side_give_the_same_bytes(
    job: Job, whole: dict[str, bytes]
) -> None:
    """Of two workers of one part one is refused, or finds the work done."""
    workers = [forked(lambda n=n: _told(lambda: job.part(n, 3)), Calls()) for n in (1, 2, 3) * 2]  # type: ignore[misc]
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
        "from zexport.cli.main import main\n"
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
        with pytest.raises(
            OutputError, match=r"still being written.*\(found parts 1/2\)\. Wait|lacks"
        ):
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


# --- workers that do not fit each other ---


def _other_dtype(job: Job) -> Job:
    return job.with_options(dtype=ExportDType.BF16)


def _other_latest(job: Job) -> Job:
    save(small_model(), Run(stage=2, steps=4), job.source, "global_step4")
    return job


def _touched(job: Job) -> Job:
    os.utime(next(job.source.glob("*/*optim*")))
    return job


@pytest.mark.parametrize("change", [_other_dtype, _other_latest, _touched])
def test_worker_with_another_option_or_checkpoint_is_refused(
    job: Job, change: Callable[[Job], Job]
) -> None:
    _parts(job, 2, 1)
    before = files(job.partial)
    problems = r"was begun for another plan|file changed after planning"
    with pytest.raises((OutputError, CheckpointError), match=problems) as caught:
        change(job).part(2, 2)
    assert caught.value.hint
    assert files(job.partial) == before


@pytest.mark.parametrize(
    ("part", "version", "told"),
    [
        ("2/2", "9.9", "is not a plan of this zexport"),
        (
            "2/3",
            zexport.__version__,
            "was begun for another plan (found parts 2, expected parts 3)",
        ),
    ],
)
def test_worker_of_another_zexport_or_number_of_parts_is_refused(
    job: Job, part: str, version: str, told: str
) -> None:
    _parts(job, 2, 1)
    done = job.typed("--part", part, version=version)
    assert done.returncode == OutputError.exit_code
    assert told in " ".join(done.stderr.split())


def test_worker_with_other_small_files_is_refused(real: Job) -> None:
    whole = real.made()
    _parts(real, 2, 1)
    (real.source / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="file changed after planning"):
        _parts(real, 2, 2)
    shutil.copy2(FIXTURE / "tokenizer_config.json", real.source)
    _parts(real, 2, 2)
    assert files(real.out) == whole


def test_complete_folder_of_other_weights_is_not_taken_for_the_parts_own(job: Job) -> None:
    _parts(job, 2, 1, 2)
    before = files(job.out)
    with pytest.raises(OutputError, match="exists and is not empty"):
        _other_dtype(job).part(1, 2)
    four_shards(job.source.parent, seed=7)
    with pytest.raises(OutputError, match="exists and is not empty"):
        _parts(job, 2, 1)
    assert files(job.out) == before


def test_reference_engine_has_no_parts(real: Job) -> None:
    with pytest.raises(UsageError, match="need --engine native"):
        real.with_options(engine=Engine.DEEPSPEED).part(1, 2)
    assert not real.left()


# --- the last step ---


def test_finish_is_refused_while_parts_are_missing(job: Job) -> None:
    with pytest.raises(OutputError, match="has no parts to finish"):
        finish_export(job.out)
    _parts(job, 3, 1, 3)
    done = typed("finish", job.out)
    assert done.returncode == OutputError.exit_code
    assert "lacks parts" in done.stderr
    assert SHARDS[1] in done.stderr or SHARDS[2] in done.stderr
    assert not job.out.exists()
    for path in (job.out, job.partial):
        with pytest.raises(VerificationError, match=r"is not finished .*zexport finish"):
            verify_export(path)


@pytest.mark.parametrize("is_finished_by_hand", [False, True])
def test_folder_is_completed_after_the_last_worker_was_killed(
    job: Job, whole: dict[str, bytes], is_finished_by_hand: bool
) -> None:
    """At any call of its last step, after which other workers come no more."""
    _parts(job, 3, 1, 3)
    before = shutil.copytree(job.partial, job.out.with_name("before"))
    job.restore(before)
    with watched(Calls()) as calls:
        _parts(job, 3, 2)
    ways = set()
    for at in range(calls.counts.total() - 50, calls.counts.total() + 1, 3):
        job.restore(before)
        ended(forked(lambda: job.part(2, 3), killing(at)))
        ways.add(job.out.exists())
        if not job.out.exists():
            told = _told(lambda: finish_export(job.out)) if is_finished_by_hand else ""
            if told or not is_finished_by_hand:
                assert "lacks parts" in told or not told
                _parts(job, 3, 2)
        assert files(job.out) == whole
        assert job.left() <= {"out", "out.partial.journal"}  # removed by the next command
    assert ways == {True, False}


def test_one_process_continues_the_work_of_parts(job: Job, whole: dict[str, bytes]) -> None:
    _parts(job, 2, 1)
    assert job.run().resumed == SHARDS[:2]
    assert files(job.out) == whole


# --- damage between the parts ---


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "bit": lambda path: flip(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "other JSON": lambda path: path.write_bytes(b"{}"),
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


def test_checkpoint_that_one_part_read_wrong_is_refused(job: Job) -> None:
    """The other part reads bytes that are no longer what was saved."""
    _parts(job, 2, 1)
    (source,) = job.source.glob("*/*rank_1_*optim*")
    flip(source, place_of(2, source))
    with pytest.raises(DamagedCheckpointError, match="does not hold the bytes that were saved"):
        _parts(job, 2, 2)
    assert not job.out.exists()


def test_workers_without_locks_end_right_or_with_a_sentence(
    job: Job, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NFS without a lock server: all begin the folder, and all come to its end, at once."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr("fcntl.lockf", refuse)
    for _ in range(3):
        with ThreadPoolExecutor(4) as workers:
            told = [*workers.map(lambda n: _told(lambda: job.part(n, 4)), range(1, 5))]
        if not job.out.exists():  # one was in the way of another: it is said, and tried again
            assert any(told)
            _published(job, 4, (1, 2, 3, 4))
        assert files(job.out) == whole
        shutil.rmtree(job.out)
