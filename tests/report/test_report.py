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
from zexport.export.summary import side_nbytes, summarize
from zexport.options import ExportOptions, NameLayout
from zexport.report.export import print_export, print_plan, print_verify
from zexport.report.failure import Failure, Told
from zexport.report.text import (
    duration,
    folded,
    near,
    near_text,
    plural,
    print_table,
    size,
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


def plan_for_people(plan: ExportPlan) -> str:
    out = io.StringIO()
    print_plan(Console(file=out, width=80), summarize(plan), side_nbytes(plan))
    return out.getvalue()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_649_999_999, "1.6 GB"),
        (999_960, "1.0 MB"),
        (70_000_000_000_000, "70.0 TB"),
    ],
)
def test_sizes_are_decimal_with_one_digit(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (59.7, "1 min 0 s"), (3900, "1 h 5 min")],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_columns_of_numbers_line_up_on_the_right_and_cells_are_never_cut() -> None:
    out = io.StringIO()
    rows = [("a", "1,000", "x" * 100), ("漢字", "2", "y")]
    print_table(Console(file=out, width=40), ("Name", ">Count", "Rest"), rows)
    assert out.getvalue().splitlines() == [
        "",
        "  Name  Count  Rest",
        f"  a     1,000  {'x' * 100}",
        "  漢字      2  y",
    ]


def test_a_row_too_wide_for_a_terminal_stands_in_steps_and_is_never_cut() -> None:
    out = io.StringIO()
    terminal = Console(file=out, width=30, force_terminal=True, color_system=None)
    rows = [("model.layers.0", "1,000", "x" * 20), ("model.layers.0", "2", ""), ("", "3", "y" * 40)]
    print_table(terminal, ("Name", ">Count", "Rest"), rows)
    assert out.getvalue().splitlines() == [
        "",
        "  Name",
        "    Count",
        "      Rest",
        "  model.layers.0",
        "    1,000",
        f"      {'x' * 20}",
        "    2",
        "  -",
        "    3",
        f"      {'y' * 40}",
    ]


def test_a_line_that_is_folded_has_its_command_whole() -> None:
    command = "zexport verify model --against run/checkpoint-100"
    assert folded(f"is a checkpoint, and no export. As in: {command}", 40, 2) == [
        "is a checkpoint, and no export. As in:",
        f"  {command}",
    ]
    assert folded("is a checkpoint", 40) == ["is a checkpoint"]


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


def test_words_follow_their_number() -> None:
    assert (plural(1, "file"), plural(1024, "file")) == ("1 file", "1,024 files")


def test_a_plan_in_json_adds_up(plan: ExportPlan) -> None:
    found: Any = json.loads(json.dumps(form_of(summarize(plan), plan.provenance), allow_nan=False))
    jsonschema.validate(found, PLAN_SCHEMA)
    assert found["nbytes_to_write"] == sum(file["nbytes"] for file in found["files"])
    assert found["nbytes_to_read"] == (6 + 2 + 3) * 4
    together = found["nbytes_to_read"] + found["nbytes_to_write"]
    assert found["seconds_at_1_gb_per_s"] == together / 1e9
    assert found["checkpoint"]["stage"] == 2


def test_a_plan_for_people_names_every_file_and_warning(plan: ExportPlan) -> None:
    shown = plan_for_people(plan)
    assert "model.safetensors" in shown
    assert "README.md" in shown
    assert "zexport_manifest.json" in shown
    assert "if the disk does 1 GB/s" in shown
    assert all(warning in shown for warning in plan.warnings)
    assert plan.warnings
    assert not plan.out_dir.exists()


def test_the_shards_of_a_plan_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.ones(100) for index in range(30)}
    root = save(Model([tensors]), Run(stage=2), tmp_path / "checkpoint")
    options = ExportOptions(layout=NameLayout.MEMORY, max_shard_nbytes=400)
    plan = plan_export(open_checkpoint(root), tmp_path / "out", options)
    shown = plan_for_people(plan)
    assert shown.count("-of-00030.safetensors") == 20
    assert "and 10 more" in shown


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


def test_an_export_for_people_tells_of_remarkable_values(done: ExportReport) -> None:
    shown = printed(print_export, done)
    assert "b: nan (1 element)" in shown
    assert "z: all-zero (3 elements)" in shown
    assert "every file was read again" in shown
    assert str(done.out_dir) in shown


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


def test_a_long_job_gets_a_line_every_ten_seconds(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    told(clock, "auto", seconds_a_step=1.0, steps=1000)
    assert 90 <= len(capfd.readouterr().err.splitlines()) <= 110


def test_a_short_job_gets_no_line_at_all(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    told(clock, "auto", seconds_a_step=0.001, steps=500)
    assert capfd.readouterr().err == ""


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


def test_the_bar_has_no_colours_where_none_are_wanted() -> None:
    assert "\x1b[38" not in on_terminal({"TERM": "xterm", "NO_COLOR": "1"})
    assert "\x1b[38" in on_terminal({"TERM": "xterm-256color"})


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
