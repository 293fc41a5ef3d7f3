"""An output inside the checkpoint is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import zexport
from zexport import OutputError


def _tree(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_an_output_inside_the_checkpoint_is_refused(zero3: Path) -> None:
    before = _tree(zero3)
    with pytest.raises(OutputError, match="outside the checkpoint"):
        zexport.consolidate(zero3, zero3 / "global_step2" / "out")
    assert _tree(zero3) == before
