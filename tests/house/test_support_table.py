"""The support table says what is so: each row is held against committed checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

import zexport
from docs.support import SUPPORT

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize(
    "fixture", [name for row in SUPPORT if not row.refused for name in row.fixtures]
)
def test_what_the_table_calls_exported_has_no_problems(fixture: str) -> None:
    checkpoint = zexport.open_checkpoint(FIXTURES / fixture / "ckpt")
    assert checkpoint.problems == ()
    assert all(tensor.source is not None for tensor in checkpoint.tensors)
    assert (FIXTURES / fixture / "truth.safetensors").is_file()


def test_every_fixture_is_of_a_layout_in_the_table() -> None:
    in_table = {name.split("_")[0] for row in SUPPORT for name in row.fixtures}
    there = {path.name.split("_")[0] for path in FIXTURES.iterdir() if (path / "ckpt").is_dir()}
    assert there <= in_table
