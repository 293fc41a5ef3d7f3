"""``zexport inspect`` of a run, and the exit code of ``--fail``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import zexport
from zexport.cli.main import cli

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO3 = FIXTURES / "z3_w2_bf16" / "ckpt"
TAG = "global_step2"


def zexport_says(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a whole checkpoint and a later one that lacks a rank's file."""
    run = shutil.copytree(ZERO3, tmp_path / "run")
    shutil.copytree(run / TAG, run / "global_step4")
    next((run / "global_step4").glob("*rank_1*optim_states.pt")).unlink()
    return run


def test_checkpoints_of_a_run_are_listed_with_their_sizes(run: Path) -> None:
    told = json.loads(zexport_says("inspect", run, "--json").stdout)["tags"]
    sizes = {
        tag: sum(file.stat().st_size for file in (run / tag).iterdir())
        for tag in (TAG, "global_step4")
    }
    assert {tag["name"]: tag["nbytes"] for tag in told} == sizes
    assert {tag["name"]: tag["complete"] for tag in told} == {TAG: True, "global_step4": False}


def test_fail_ends_with_the_code_of_consolidate(run: Path, tmp_path: Path) -> None:
    cases: list[tuple[object, ...]] = [
        (ZERO3,),
        (run, "--tag", "global_step4"),
        (_without_latest(run),),
        (FIXTURES / "z3_w2_bf16",),
        (tmp_path / "nothing",),
    ]
    for words in cases:
        _ends_alike(words, tmp_path)
    assert zexport_says("inspect", run, "--tag", "global_step4").exit_code == 0


def test_fail_knows_what_only_planning_finds(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(ZERO3, tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    for sidecar in checkpoint.glob("zexport_source.json"):
        sidecar.unlink()
    assert _ends_alike((checkpoint,), tmp_path) != 0
    done = zexport_says("inspect", checkpoint, "--fail")
    assert done.stdout
    assert done.stderr.startswith("Error: ")


def _without_latest(run: Path) -> Path:
    other = shutil.copytree(run, run.with_name("other"))
    (other / "latest").unlink(missing_ok=True)
    return other


def _ends_alike(words: tuple[object, ...], tmp_path: Path) -> int:
    """The exit code of both commands."""
    inspected = _code("inspect", *words, "--fail")
    assert inspected == _code("consolidate", *words, "-o", tmp_path / "out"), words
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    return inspected


def _code(*words: object) -> int:
    done = CliRunner().invoke(cli, [*map(str, words)])
    error = done.exception
    return error.exit_code if isinstance(error, zexport.ZexportError) else done.exit_code
