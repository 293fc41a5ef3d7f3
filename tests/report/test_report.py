"""What export, plan, verification, errors and progress look like, to people and to programs."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from rich.console import Console

from tests.support.checkpoints import Model, Run, save
from zexport import plan_export, run_export, verify_export
from zexport.checkpoint.open import open_checkpoint
from zexport.cli import progress
from zexport.errors import DamagedCheckpointError, UsageError
from zexport.export.plan import ExportPlan
from zexport.export.summary import summarize
from zexport.options import ExportOptions, NameLayout
from zexport.report.export import print_verify
from zexport.report.failure import Failure, Told
from zexport.report.text import (
    near,
    near_text,
)
from zexport.run.execute import ExportReport, Phase, Progress
from zexport.store.address import Address
from zexport.store.json import form_of

NUMBER = {"type": "integer", "minimum": 0}
PLAN_SCHEMA = {
    "type": "object",
    "required": [
        "schema",
        "out_dir",
        "files",
        "side_files",
        "sources",
        "tensors",
        "nbytes_to_read",
        "nbytes_to_write",
        "memory_nbytes",
        "seconds_at_1_gb_per_s",
        "warnings",
        "checkpoint",
        "options",
        "loadable",
    ],
    "properties": {
        "schema": {"const": 2},
        "nbytes_to_read": NUMBER,
        "nbytes_to_write": NUMBER,
        "memory_nbytes": NUMBER,
        "files": {
            "items": {
                "required": ["name", "nbytes", "tensors"],
                "additionalProperties": False,
                "properties": {"name": {"type": "string"}, "nbytes": NUMBER, "tensors": NUMBER},
            }
        },
    },
}


def plan_of(tmp_path: Path, **options: Any) -> ExportPlan:
    tensors = {"a": torch.arange(6.0), "b": torch.tensor([1.0, float("nan")]), "z": torch.zeros(3)}
    root = save(Model([tensors]), Run(stage=2), tmp_path / "checkpoint")
    chosen = ExportOptions(layout=NameLayout.MEMORY, **options)
    return plan_export(open_checkpoint(root), tmp_path / "out", chosen)


@pytest.fixture
def plan(tmp_path: Path) -> ExportPlan:
    """A plan over a small checkpoint with a NaN, and with no config beside it."""
    return plan_of(tmp_path)


def printed(show: Any, value: object) -> str:
    out = io.StringIO()
    show(Console(file=out, width=80), value)
    return out.getvalue()


def test_paths_are_told_as_they_are_typed_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = f"{tmp_path}/run: is no folder. Give '{tmp_path}/a b', or /data{tmp_path}/run"
    assert near_text(told) == f"run: is no folder. Give 'a b', or /data{tmp_path}/run"
    for name in ("-model", "~x", "s3:/x"):  # which mean something else without their folder
        assert near_text(f"{tmp_path}/{name}") == f"{tmp_path}/{name}"
    below = tmp_path / "here" / "below"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert (near_text(told), near(tmp_path / "run")) == (told, f"{tmp_path}/run")
    monkeypatch.setattr(sys, "argv", ["zexport", "verify", "m", "../m", "--base=../../a b"])
    assert near_text(told) == f"../../run: is no folder. Give '../../a b', or /data{tmp_path}/run"
    paths = (tmp_path / "run", below / "m", below.parent / "m", tmp_path.parent / "m")
    assert [*map(near, paths)] == ["../../run", "m", "../m", f"{tmp_path.parent}/m"]
    monkeypatch.chdir("/")
    assert near_text(told) == told
    for address in ("s3://bucket/model", Address("s3://bucket/model")):
        assert near(address) == "s3://bucket/model"


def test_a_plan_in_json_adds_up(plan: ExportPlan) -> None:
    found: Any = json.loads(json.dumps(form_of(summarize(plan), plan.provenance), allow_nan=False))
    jsonschema.validate(found, PLAN_SCHEMA)
    assert found["nbytes_to_write"] == sum(file["nbytes"] for file in found["files"])
    assert found["nbytes_to_read"] == (6 + 2 + 3) * 4
    together = found["nbytes_to_read"] + found["nbytes_to_write"]
    assert found["seconds_at_1_gb_per_s"] == together / 1e9
    assert found["checkpoint"]["stage"] == 2


@pytest.fixture
def done(plan: ExportPlan) -> ExportReport:
    """The report of running it."""
    return run_export(plan)


def test_an_export_in_json_says_what_was_done_and_what_came_out(
    plan: ExportPlan, done: ExportReport
) -> None:
    found: Any = json.loads(json.dumps(form_of(done, plan.provenance), allow_nan=False))
    assert found["schema"] == 2
    assert (found["tensors"], found["verified"], found["loadable"]) == (3, "readback", False)
    nan = {"kind": "nan", "tensor": "b", "count": 1, "detail": "", "accepted": False}
    assert nan in found["findings"]
    assert found["nbytes_written"] == sum(p.stat().st_size for p in plan.out_dir.iterdir())
    assert set(found["files"]) == {path.name for path in plan.out_dir.iterdir()}


def test_a_verification_names_the_file_and_the_tensor_at_fault(done: ExportReport) -> None:
    assert "whole" in printed(print_verify, verify_export(done.out_dir))
    path = done.out_dir / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = verify_export(done.out_dir)
    shown = printed(print_verify, found)
    assert "model.safetensors" in shown
    assert all(problem.tensor in shown for problem in found.problems)
    assert "whole" not in shown
    assert found.to_json()["ok"] is False


def test_an_error_in_json_has_every_fact_and_the_sentence() -> None:
    error = DamagedCheckpointError("is empty", path=Path("a.pt"), found="0 bytes", hint="Copy it")
    assert form_of(Failure(Told.of(error))) == {
        "schema": 2,
        "error": {
            "code": 3,
            "kind": "damaged",
            "path": "a.pt",
            "message": "a.pt: is empty (found 0 bytes). Copy it.",
            "hint": "Copy it",
        },
    }
    assert Told.of(UsageError("no")).path is None


# --- progress ---

TOTAL = 4_000_000_000


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time stands still unless a test moves it."""
    return Clock(monkeypatch)


def told(clock: Clock, mode: str, *, seconds_a_step: float, steps: int) -> None:
    with progress.progress_printer(mode) as tell:
        assert tell is not None
        for step in range(1, steps + 1):
            clock.now += seconds_a_step
            tell(Progress(TOTAL * step // steps, TOTAL, Phase.WRITE))


def test_quiet_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for mode in ("auto", "json"):
        with progress.progress_printer(mode, quiet=True) as tell:
            assert tell is None
    assert capfd.readouterr() == ("", "")


def test_a_pipe_gets_a_line_a_tenth_without_carriage_returns(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    told(clock, "auto", seconds_a_step=0.5, steps=100)
    out, err = capfd.readouterr()
    assert out == ""
    assert "\r" not in err
    assert "\x1b" not in err
    lines = err.splitlines()
    assert len(lines) == 10
    assert lines[4] == "Writing: 50 % (2.0 GB of 4.0 GB, 80.0 MB/s, 25 s left)"


def test_json_progress_is_an_object_a_line_on_stderr(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    told(clock, "json", seconds_a_step=0.25, steps=8)
    out, err = capfd.readouterr()
    assert out == ""
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["nbytes_done"] for line in lines] == [TOTAL * n // 8 for n in (1, 3, 5, 7, 8)]
    assert lines[-1] == {
        "phase": "write",
        "nbytes_done": TOTAL,
        "nbytes_total": TOTAL,
        "nbytes_resumed": 0,
        "bytes_per_second": TOTAL // 2,
        "seconds_left": 0.0,
    }


PROGRAM = """
from zexport.cli import progress
from zexport.run.execute import Phase, Progress
progress._LINE_SECONDS = progress._LINE_SECONDS_MIN = 0.0
with progress.progress_printer("auto") as tell:
    tell(Progress(500_000_000, 1_000_000_000, Phase.WRITE))
"""


@pytest.mark.parametrize(("term", "is_bar"), [("xterm", True), ("dumb", False)])
def test_only_a_terminal_that_can_draw_gets_a_bar(term: str, is_bar: bool) -> None:
    shown = on_terminal({"TERM": term})
    assert ("Writing: 50 %" in shown) == (not is_bar)
    assert ("\x1b" in shown) == is_bar
    assert "Writing" in shown


def on_terminal(environment: dict[str, str]) -> str:
    """What the program writes to a terminal on stderr."""
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLORTERM")}
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stderr=theirs,
        env=kept | environment,
        check=True,
        timeout=60,
    )
    os.set_blocking(ours, False)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return shown.decode()
