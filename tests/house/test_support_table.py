"""The support table, compared with the committed checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

import zexport
from docs.support import SUPPORT

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("fixture", [name for row in SUPPORT for name in row.fixtures])
def test_supported_layout_opens_without_problems(fixture: str) -> None:
    checkpoint = zexport.open_checkpoint(FIXTURES / fixture / "ckpt")
    assert checkpoint.problems == ()
    assert all(tensor.source is not None for tensor in checkpoint.tensors)


def test_every_fixture_has_a_layout_in_the_table() -> None:
    listed = {name.split("_")[0] for row in SUPPORT for name in row.fixtures}
    found = {path.name.split("_")[0] for path in FIXTURES.iterdir() if (path / "ckpt").is_dir()}
    assert found <= listed
