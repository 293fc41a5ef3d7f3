"""A resharding by several workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.real_cases import FIXTURES
from tests.support.stopping import files
from zexport import ExportReport, PartReport, ReshardOptions, Share, reshard, reshard_part


@pytest.mark.parametrize(
    ("name", "stage", "count"),
    [
        ("z3_w2_bf16_frozen", 3, 7),
        ("z2_w2_bf16_tied", 1, 40),
    ],
)
def test_parts_in_any_order_equal_one_process(
    name: str, stage: int, count: int, tmp_path: Path
) -> None:
    source, options = FIXTURES / name / "ckpt", ReshardOptions(world_size=3, stage=stage)
    reshard(source, tmp_path / "whole", options)
    order = [*range(2, count + 1, 2), *range(1, count + 1, 2)]
    done = [reshard_part(source, tmp_path / "out", Share(n, count), options) for n in order]
    assert [isinstance(one, ExportReport) for one in done].count(True) == 1
    again = reshard_part(source, tmp_path / "out", Share(1, count), options)
    assert isinstance(again, PartReport)
    assert again.missing == ()
    assert files(tmp_path / "out") == files(tmp_path / "whole")
