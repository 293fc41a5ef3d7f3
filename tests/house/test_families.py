"""benchmarks/families.json, compared with the installed transformers for a sample of families."""

from __future__ import annotations

import json

import pytest

from benchmarks import families

RESULTS = json.loads(families.RESULTS.read_text(encoding="utf-8"))


def test_every_family_that_is_small_enough_to_compare_is_equal() -> None:
    verdicts = [outcome["verdict"] for outcome in RESULTS["changed"].values()]
    assert set(verdicts) <= {"equal", "too large to compare"}
    assert verdicts.count("equal") > 10 * verdicts.count("too large to compare")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gemma3", "molmo2", "nemotron_h"])
def test_recorded_outcome_is_that_of_the_installed_transformers(family: str) -> None:
    outcome = families.examine(family)
    assert isinstance(outcome, families.Outcome)
    assert outcome.json() == RESULTS["changed"][family]
