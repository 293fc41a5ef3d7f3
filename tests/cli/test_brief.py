"""What fits on a screen: public values printed, and a run's checkpoints in a table."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result

import zexport
from zexport.api import export
from zexport.cli.main import cli

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO3 = FIXTURES / "z3_w2_bf16" / "ckpt"
TAG = "global_step2"
WIDTH, LINES = 100, 20


def zexport_says(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a whole checkpoint and a later one that lacks a rank's file."""
    run = shutil.copytree(ZERO3, tmp_path / "run")
    shutil.copytree(run / TAG, run / "global_step4")
    next((run / "global_step4").glob("*rank_1*optim_states.pt")).unlink()
    return run


def test_every_public_value_prints_in_a_few_lines(tmp_path: Path) -> None:
    checkpoint = zexport.open_checkpoint(ZERO3)
    plan = zexport.plan_export(checkpoint, tmp_path / "model")
    done = zexport.run_export(plan)
    verified = zexport.verify_export(tmp_path / "model", against=ZERO3)
    difference = zexport.diff_models(tmp_path / "model", tmp_path / "model")
    tensor = checkpoint.tensors[0]
    values = (checkpoint, plan, done, verified, difference, tensor, difference.tensors[0])
    for value in (*values, zexport.ExportOptions()):
        assert len(repr(value)) < WIDTH * LINES, type(value)
        assert repr(value).startswith(type(value).__name__)
    assert f"tensors=<{len(checkpoint.tensors)} items>" in repr(checkpoint)
    assert "layout='ZeRO-3'" in repr(checkpoint)
    assert " left_out=" not in repr(checkpoint)


def test_a_run_is_a_table_of_its_checkpoints_with_their_sizes(run: Path) -> None:
    told = json.loads(zexport_says("inspect", run, "--json").stdout)["tags"]
    sizes = {
        tag: sum(file.stat().st_size for file in (run / tag).iterdir())
        for tag in (TAG, "global_step4")
    }
    assert {tag["name"]: tag["nbytes"] for tag in told} == sizes
    assert {tag["name"]: tag["complete"] for tag in told} == {TAG: True, "global_step4": False}
    table = zexport_says("inspect", run).stdout
    assert "Size" in table
    assert f"{sizes[TAG] / 1000:.1f} kB" in table
    assert "2 of 2 complete" in table
    assert "1 of 2 incomplete" in table


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


def test_the_bar_moves_while_an_export_is_planned(tmp_path: Path) -> None:
    shown = on_terminal("consolidate", ZERO3, tmp_path / "model")
    assert "Preparing" in shown
    assert shown.index("Preparing") < shown.index("Writing")


def test_the_bar_counts_the_model_once(tmp_path: Path) -> None:
    told: list[zexport.Progress] = []
    zexport.consolidate(ZERO3, tmp_path / "model", progress=told.append)
    nbytes = sum(t.numel * 4 for t in zexport.open_checkpoint(ZERO3).tensors)
    ends = {step.phase.value: (step.nbytes_done, step.nbytes_total) for step in told}
    assert ends == {"write": (nbytes, nbytes), "verify": (nbytes, nbytes)}


def test_the_time_shown_is_that_of_planning_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*words: Any) -> zexport.ExportPlan:
        time.sleep(1.5)
        return plan_export(*words)

    plan_export = export.plan_export
    monkeypatch.setattr(export, "plan_export", slowly)
    done = json.loads(zexport_says("consolidate", ZERO3, tmp_path / "model", "--json").stdout)
    assert done["seconds"] > 1.5
    assert zexport.consolidate(ZERO3, tmp_path / "other").seconds > 1.5


def on_terminal(*words: object) -> str:
    """What a command writes to a terminal on stderr."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "zexport", *map(str, words)],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        shown = b"".join(iter(lambda: _part(terminal), b"")).decode()
    assert process.wait(timeout=60) == 0
    return shown


def _part(terminal: IO[bytes]) -> bytes:
    try:
        return terminal.read(1 << 16)
    except OSError:  # nothing more will come
        return b""


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
