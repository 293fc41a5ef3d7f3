"""A short run of every fuzzer, from a fixed seed: every input ends in an answer or an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.runner import NAMES, run_plain, target

_EXECUTIONS = {"pickles": 800, "zips": 200, "legacy": 300, "safetensors_files": 400, "states": 50}


@pytest.mark.parametrize("name", NAMES)
def test_every_seed_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    one = target(name)
    if name != "states":
        assert all(one.check(seed, tmp_path) for seed in one.seeds()[:5])


@pytest.mark.parametrize("name", NAMES)
def test_mutations_from_a_fixed_seed_end_in_an_answer_or_an_error(
    name: str, tmp_path: Path
) -> None:
    count = _EXECUTIONS[name]
    figures = run_plain(target(name), tmp_path, seed=1, more=lambda number: number < count)
    assert figures.executions == count
    assert figures.accepted < count
