"""A short run of every fuzzer, from a fixed seed: every input ends in an answer or an error."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import target as fuzz_target
from tests.fuzz.runner import NAMES, run_plain
from tests.fuzz.target import Target
from zexport.errors import OutputError

_EXECUTIONS = {"pickles": 800, "zips": 200, "legacy": 300, "safetensors_files": 400, "states": 150}
_SLOW_EXECUTIONS = 20
REPOSITORY = Path(__file__).parents[2]


def _target(name: str) -> Target:
    target = importlib.import_module(f"tests.fuzz.{name}").TARGET
    assert isinstance(target, Target)
    return target


@pytest.mark.parametrize("name", NAMES)
def test_every_seed_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    target = _target(name)
    if name != "states":
        assert all(target.check(seed, tmp_path) for seed in target.seeds()[:5])


@pytest.mark.parametrize("name", NAMES)
def test_mutations_from_a_fixed_seed_end_in_an_answer_or_an_error(
    name: str, tmp_path: Path
) -> None:
    count = _EXECUTIONS.get(name, _SLOW_EXECUTIONS)
    figures = run_plain(_target(name), tmp_path, seed=1, more=lambda number: number < count)
    assert figures.executions == count
    assert figures.accepted < count


def _too_deep() -> None:
    raise RecursionError


def _blames_the_output() -> None:
    raise OutputError("is full")


@pytest.mark.parametrize(
    ("does", "found"),
    [
        (_too_deep, RecursionError),
        (_blames_the_output, AssertionError),
        (lambda: time.sleep(0.2), AssertionError),
    ],
    ids=["another error", "an exit code of something else", "too late"],
)
def test_a_reader_that_breaks_the_promise_is_found_and_its_input_kept(
    does: Callable[[], object],
    found: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fuzz_target, "SECONDS_MAX", 0.1)
    target = Target("broken", lambda: [b"seed"], lambda _data, _folder: does())
    keep = tmp_path / "kept"
    with pytest.raises(found):
        run_plain(target, tmp_path, seed=0, more=lambda number: number < 1)
    figures = run_plain(target, tmp_path, seed=0, more=lambda number: number < 2, keep=keep)
    assert (figures.executions, figures.crashes) == (2, 2)
    assert len(list(keep.iterdir())) == 2


def test_fuzzers_are_run_in_turn_by_one_command() -> None:
    names = ("safetensors_files", "legacy")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *names, "--seconds", "0.3", "--plain"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(names)
    assert done.stdout.count(" 0 crashes") == 2
