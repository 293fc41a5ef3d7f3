"""A short run of every fuzzer, from a fixed seed: every input ends in an answer or an error."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.fuzz.runner import NAMES, run_plain
from tests.fuzz.target import Target

_EXECUTIONS = {"pickles": 800, "zips": 200, "legacy": 300, "safetensors_files": 400, "states": 150}
_SLOW_EXECUTIONS = 20


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
