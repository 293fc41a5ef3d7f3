"""``zexport train`` if a disk, a rank or the command itself fails."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.train_runs import (
    FIXTURE_RUN,
    Run,
    ended,
    everything_under,
    fixture_run,
    gone,
    ranks_of,
    run,
    started,
)
from zexport import OutputError, TrainingError, UsageError

PROMPTLY_S = 60
MANY_STEPS = ("--steps", 100_000)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A resumed run in which only rank 1 cannot write files of more than 2000 bytes."""
    out = fixture_run(tmp_path_factory.mktemp("failed") / "run")
    with started(out, "--resume", "--steps", 20) as process:
        resource.prlimit(ranks_of(process)[1], resource.RLIMIT_FSIZE, (2000, 2000))
        return out, ended(process, PROMPTLY_S + 30)


@pytest.mark.deepspeed
@pytest.mark.slow
class TestASaveThatFailsOnOneRank:
    def test_command_exits_with_the_output_code(self, failed: tuple[Path, Run]) -> None:
        assert failed[1].status == OutputError.exit_code

    def test_rank_file_and_cause_are_reported(self, failed: tuple[Path, Run]) -> None:
        out, done = failed
        file = out / "global_step20" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
        cause = f"rank 1: {file}: File too large"
        assert f"global_step20 not saved: {cause}" in done.stderr
        assert done.stderr.splitlines()[-2:] == [
            f"Error: {out}: the last checkpoint could not be saved: {cause}.",
            "  The last good one is global_step2.",
        ]

    def test_last_good_checkpoint_is_unchanged(self, failed: tuple[Path, Run]) -> None:
        out, _ = failed
        assert (out / "latest").read_text() == "global_step2"
        assert contents(out / "global_step2") == contents(FIXTURE_RUN / "global_step2")
        assert not (out / "global_step20").exists()


@pytest.mark.deepspeed
@pytest.mark.slow
class TestARankThatFails:
    def test_killed_rank_ends_the_run(self, tmp_path: Path) -> None:
        with started(tmp_path / "run", *MANY_STEPS) as process:
            everyone = everything_under(process)
            os.kill(ranks_of(process)[1], signal.SIGKILL)
            done = ended(process, PROMPTLY_S)
        assert done.status == TrainingError.exit_code
        assert "Error: rank 1 was ended by SIGKILL." in done.stderr
        assert gone(everyone, within_s=5)

    def test_error_is_quoted(self, tmp_path: Path) -> None:
        config = tmp_path / "ds.json"
        config.write_text('{"optimizer": {"type": "Adamant"}}')
        done = run(tmp_path / "run", "--ds-config", config, "--world-size", 1)
        assert done.status == TrainingError.exit_code
        first, last = done.stderr.splitlines()[-2:]
        assert first.startswith("Error: rank ")
        assert "Adamant" in first
        log = Path(last.rpartition("The full traceback is in ")[2].removesuffix("."))
        assert "Traceback (most recent call last)" in log.read_text()

    def test_timeout_ends_the_run(self, tmp_path: Path) -> None:
        done = run(tmp_path / "run", "--timeout", 1)
        assert done.status == TrainingError.exit_code
        assert "the first step was not done after 1 seconds." in done.stderr
        assert "Raise --timeout" in done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.deepspeed
@pytest.mark.slow
class TestACommandThatEnds:
    def test_ctrl_c_ends_the_ranks(self, tmp_path: Path) -> None:
        with started(tmp_path / "run", *MANY_STEPS, "--world-size", 1) as process:
            everyone = everything_under(process)
            process.send_signal(signal.SIGINT)  # not to its process group
            assert ended(process, PROMPTLY_S).status == 130
        assert len(everyone) >= 2
        assert gone(everyone, within_s=5)


def test_rank_ends_when_its_standard_input_closes() -> None:
    waiting = (
        "from zexport.train import launch; import time; launch.end_with_parent(); time.sleep(60)"
    )
    rank = subprocess.Popen([sys.executable, "-c", waiting], stdin=subprocess.PIPE)
    assert rank.stdin is not None
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(1)
    rank.stdin.close()
    assert rank.wait(5) == 1


class TestAFolderInUse:
    def test_non_empty_folder_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "latest").write_text("global_step1")
        done = run(tmp_path)
        assert done.status == OutputError.exit_code
        assert done.stderr.count("\n") == 1


class TestTheCommandItself:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (("--freeze", "("), "--freeze (: invalid regular expression"),
            (("--hidden-size", "20"), "does not divide into attention heads"),
            (("--resume",), "no checkpoint to resume"),
        ],
    )
    def test_invalid_option_is_rejected(
        self, tmp_path: Path, options: tuple[str, ...], problem: str
    ) -> None:
        done = run(tmp_path / "run", *options)
        assert done.status == UsageError.exit_code
        assert problem in done.stderr
        assert not (tmp_path / "run").exists()

    def test_ds_config_that_contradicts_an_option_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
        done = run(tmp_path / "run", "--stage", 2, "--ds-config", tmp_path / "ds.json")
        assert done.status == UsageError.exit_code
        assert "contradicts --stage (found 1, expected 2)" in done.stderr

    def test_launcher_with_another_world_size_is_rejected(self, tmp_path: Path) -> None:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
        done = run(tmp_path / "run", "--world-size", 2, **rank)
        assert done.status == UsageError.exit_code
        assert "another number of ranks than the run has (found 3, expected 2)" in done.stderr
