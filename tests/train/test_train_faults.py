"""What ``zexport train`` does when a disk, a rank or the command itself fails."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.train_runs import (
    Run,
    ended,
    everything_under,
    gone,
    interrupt,
    ranks_of,
    run,
    started,
    trained,
)
from zexport.errors import CheckpointError, OutputError, TrainingError, UsageError
from zexport.train.launch import failure_of
from zexport.train.options import check_free
from zexport.train.save import cause_of, recorded_failures
from zexport.train.worker import Failure

PROMPTLY_S = 60
MANY_STEPS = ("--steps", 100_000)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one good checkpoint, at its second step."""
    out = tmp_path_factory.mktemp("good") / "run"
    trained(out, "--steps", 2, "--stage", 2)
    return out


@pytest.fixture(scope="module")
def failed(good: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The run resumed, with rank 1 alone unable to write a file of more than 2000 bytes."""
    out = tmp_path_factory.mktemp("failed") / "run"
    shutil.copytree(good, out)
    with started(out, "--resume", "--steps", 60) as process:
        resource.prlimit(ranks_of(process)[1], resource.RLIMIT_FSIZE, (2000, 2000))
        return out, ended(process, PROMPTLY_S + 30)


@pytest.mark.deepspeed
@pytest.mark.slow
class TestASaveThatFailsOnOneRank:
    def test_ends_the_command_with_the_output_code(self, failed: tuple[Path, Run]) -> None:
        assert failed[1].status == OutputError.exit_code

    def test_is_reported_with_rank_file_and_cause(self, failed: tuple[Path, Run]) -> None:
        out, done = failed
        file = out / "global_step60" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        cause = f"rank 1: {file}: File too large"
        assert f"global_step60 not saved: {cause}" in done.stderr
        assert done.stderr.splitlines()[-2:] == [
            f"Error: {out}: the last checkpoint could not be saved: {cause}.",
            "  The last good one is global_step2.",
        ]

    def test_leaves_the_last_good_checkpoint(self, good: Path, failed: tuple[Path, Run]) -> None:
        out, _ = failed
        assert (out / "latest").read_text() == "global_step2"
        assert contents(out / "global_step2") == contents(good / "global_step2")
        assert not (out / "global_step60").exists()


@pytest.mark.deepspeed
@pytest.mark.slow
class TestARankThatFails:
    def test_by_a_signal_ends_the_run_promptly(self, tmp_path: Path) -> None:
        with started(tmp_path / "run", *MANY_STEPS) as process:
            everyone = everything_under(process)
            os.kill(ranks_of(process)[1], signal.SIGKILL)
            done = ended(process, PROMPTLY_S)
        assert done.status == TrainingError.exit_code
        assert "Error: rank 1 was ended by SIGKILL." in done.stderr
        assert gone(everyone, within_s=5)

    def test_by_an_error_is_quoted(self, tmp_path: Path) -> None:
        config = tmp_path / "ds.json"
        config.write_text('{"optimizer": {"type": "Adamant"}}')
        done = run(tmp_path / "run", "--ds-config", config, "--world-size", 1)
        assert done.status == TrainingError.exit_code
        first, last = done.stderr.splitlines()[-2:]
        assert first.startswith("Error: rank ")
        assert "Adamant" in first
        log = Path(last.rpartition("The full traceback is in ")[2].removesuffix("."))
        assert "Traceback (most recent call last)" in log.read_text()

    def test_to_get_going_is_given_up(self, tmp_path: Path) -> None:
        done = run(tmp_path / "run", "--timeout", 1)
        assert done.status == TrainingError.exit_code
        assert "the first step was not done after 1 seconds.\n  Give it longer" in done.stderr
        assert not (tmp_path / "run").exists()

    def test_by_the_users_mistake_says_which(self, tmp_path: Path) -> None:
        done = run(tmp_path / "run", "--freeze", "no such parameter", "--world-size", 1)
        assert done.status == UsageError.exit_code
        assert "--freeze no such parameter matches no parameter" in done.stderr


@pytest.mark.deepspeed
@pytest.mark.slow
class TestACommandThatEnds:
    def test_by_ctrl_c_takes_its_ranks_along(self, tmp_path: Path) -> None:
        with started(tmp_path / "run", *MANY_STEPS) as process:
            everyone = everything_under(process)
            interrupt(process)
            assert ended(process, PROMPTLY_S).status == 130
        assert len(everyone) >= 3
        assert gone(everyone, within_s=5)

    def test_by_being_killed_takes_its_ranks_along(self, tmp_path: Path) -> None:
        with started(tmp_path / "run", *MANY_STEPS) as process:
            everyone = everything_under(process)
            process.kill()
            assert gone(everyone, within_s=PROMPTLY_S)


def test_a_rank_ends_when_its_command_is_gone() -> None:
    waiting = "import zexport.train.worker as w, time; w.end_with_the_command(); time.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", waiting], stdin=subprocess.PIPE)
    assert rank.stdin is not None
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(1)
    rank.stdin.close()
    assert rank.wait(5) == 1


class TestWhatTheRanksSay:
    def test_of_an_error_comes_back_whole(self, tmp_path: Path) -> None:
        error = OutputError("is full", path=tmp_path, found=1, expected=2, hint="Empty it")
        back = Failure.from_json(Failure.of(error, 1.0).to_json()).error()
        assert type(back) is OutputError
        assert str(back) == str(error)

    def test_first_is_the_cause_of_the_rest(self, tmp_path: Path) -> None:
        for rank, problem in enumerate(("connection closed", "out of luck", "connection closed")):
            failure = Failure.of(TrainingError(problem), when=abs(rank - 1) + 0.5)
            (tmp_path / f"failure{rank}.json").write_text(failure.to_json())
        assert failure_of(tmp_path, 1).problem == "out of luck"

    def test_is_not_believed_when_a_signal_ended_another(self, tmp_path: Path) -> None:
        failure = Failure.of(TrainingError("connection closed"), 1.0)
        (tmp_path / "failure0.json").write_text(failure.to_json())
        table = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 77) (SIGKILL)\n"
        other = "  rank      : 2 (local_rank: 2)\n  exitcode  : -15 (pid: 78) (SIGTERM)\n"
        (tmp_path / "launcher.log").write_text(other + table)
        assert failure_of(tmp_path, 1).problem == "rank 1 was ended by SIGKILL"

    def test_may_be_nothing(self, tmp_path: Path) -> None:
        error = failure_of(tmp_path, 3)
        assert isinstance(error, TrainingError)
        assert error.found == "exit status 3 of torch.distributed.run"

    def test_keeps_the_kind_of_a_checkpoint_error(self) -> None:
        failure = Failure.of(CheckpointError("holds no place"), 1.0)
        assert failure.error().exit_code == 3


class Files:
    """Stands for DeepSpeed's checkpoint engine: writes a file, or fails as torch does."""

    def save(self, state_dict: object, path: str) -> None:
        if state_dict == "no":
            raise RuntimeError("unexpected pos 128 vs 22")
        Path(path).write_text(str(state_dict))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Path(path).mkdir(exist_ok=exist_ok)


class Engine:
    """Stands for a DeepSpeed engine, whose write calls are what is looked at."""

    def __init__(self) -> None:
        self.checkpoint_engine = Files()

    def _copy_recovery_script(self, folder: str) -> None:
        (Path(folder) / "script").write_text("")


class TestRecordedFailures:
    def test_do_not_stop_the_save(self, tmp_path: Path) -> None:
        engine = Engine()
        with recorded_failures(engine) as causes:
            engine.checkpoint_engine.makedirs(str(tmp_path))
            engine.checkpoint_engine.save("no", str(tmp_path / "torch"))
            engine.checkpoint_engine.save("yes", str(tmp_path / "missing" / "file"))
            engine._copy_recovery_script(str(tmp_path / "absent"))
            engine.checkpoint_engine.save(state_dict="yes", path=str(tmp_path / "file"))
        assert causes == [
            f"{tmp_path}: File exists",
            f"{tmp_path}/torch: unexpected pos 128 vs 22",
            f"{tmp_path}/missing/file: No such file or directory",
            f"{tmp_path}/absent/script: No such file or directory",
        ]
        assert (tmp_path / "file").read_text() == "yes"

    def test_are_recorded_for_one_save_only(self, tmp_path: Path) -> None:
        engine = Engine()
        with recorded_failures(engine):
            pass
        with pytest.raises(FileExistsError):
            engine.checkpoint_engine.makedirs(str(tmp_path))


class TestFiles:
    def test_that_torch_could_not_write_tell_the_true_cause(self, tmp_path: Path) -> None:
        error = RuntimeError("unexpected pos 128 vs 22\nframe #0")
        assert cause_of(error, tmp_path / "no" / "file").endswith("No such file or directory")
        assert cause_of(error, tmp_path / "file").endswith("/file: unexpected pos 128 vs 22")


class TestAFolderInUse:
    def test_is_not_begun_again(self, tmp_path: Path) -> None:
        (tmp_path / "latest").write_text("global_step1")
        with pytest.raises(OutputError, match=r"is not empty.*--resume"):
            check_free(tmp_path)

    def test_stops_the_command_before_torch_is_imported(self, tmp_path: Path) -> None:
        (tmp_path / "latest").write_text("global_step1")
        done = run(tmp_path)
        assert done.status == OutputError.exit_code
        assert done.stderr.count("\n") == 1


class TestTheCommandItself:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (("--freeze", "("), "--freeze ( is no regular expression"),
            (("--hidden-size", "20"), "does not divide into attention heads"),
            (("--resume",), "holds no checkpoint to resume"),
        ],
    )
    def test_refuses_what_cannot_be_meant(
        self, tmp_path: Path, options: tuple[str, ...], problem: str
    ) -> None:
        done = run(tmp_path / "run", *options)
        assert done.status == UsageError.exit_code
        assert problem in done.stderr
        assert not (tmp_path / "run").exists()

    def test_refuses_a_launcher_with_another_number_of_ranks(self, tmp_path: Path) -> None:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
        done = run(tmp_path / "run", "--world-size", 2, **rank)
        assert done.status == UsageError.exit_code
        assert "another number of ranks than the run has (found 3, expected 2)" in done.stderr
