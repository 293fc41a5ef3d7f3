"""The page of model families, against the installed transformers for a sample of them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from benchmarks import families

_ROW = re.compile(r"\| `([\w.-]+)` \| (\w+) \| (\d+) \| (\d+) \| ([\w ,]+) \| (\d+) \| ([\w ]+) \|")


def _rows() -> dict[str, str]:
    lines = families.PAGE.read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| `")]
    matches = [_ROW.fullmatch(line) for line in table]
    assert all(matches)
    return {match[1]: line for match, line in zip(matches, table, strict=True) if match}


def test_no_family_comes_out_wrong() -> None:
    matches = [_ROW.fullmatch(row) for row in _rows().values()]
    verdicts = Counter(match[7] for match in matches if match)
    assert verdicts.keys() <= {"equal", "too large to compare"}
    assert verdicts["equal"] > 10 * verdicts["too large to compare"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gemma3", "molmo2", "nemotron_h"])
def test_the_page_says_what_comes_out(family: str) -> None:
    outcome = families.examine(family)
    assert isinstance(outcome, families.Outcome)
    assert outcome.row == _rows()[family]
