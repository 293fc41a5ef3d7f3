"""A resharding by several workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.real_cases import FIXTURES
from tests.support.stopping import files
from tests.support.train_runs import run
from zexport import ExportReport, PartReport, ReshardOptions, Share, reshard, reshard_part

SOURCE = FIXTURES / "z3_w2_bf16_frozen" / "ckpt"
COMMAND = (sys.executable, "-m", "zexport")


@pytest.mark.parametrize(
    ("name", "stage", "count"),
    [
        ("z3_w2_bf16_frozen", 2, 2),
        ("z3_w2_bf16_frozen", 3, 7),
        ("z2_w2_bf16_tied", 1, 40),
        ("uni_z3_w2_bf16_frozen", 3, 3),
    ],
)
def test_parts_in_any_order_give_the_same_bytes_as_one_process(
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


def test_finish_completes_parts_whose_last_process_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last worker died just before it would have published."""
    config, out = tmp_path / "ds.json", tmp_path / "out"
    zero = {"stage": 2, "round_robin_gradients": True}
    config.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    options = ReshardOptions(world_size=3, ds_config=config)
    reshard(SOURCE, tmp_path / "whole", options)
    words = ("reshard", SOURCE, out, "-n", 3, "--ds-config", config, "--json", "--part", "1/2")
    first = run(*words, command=COMMAND)
    assert (first.status, first.result["missing"]) == (0, [2])
    with monkeypatch.context() as patch:
        patch.setattr("zexport.export.run.finish", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            reshard_part(SOURCE, out, Share(2, 2), options)
    done = run("finish", out, command=COMMAND)
    assert done.stdout.startswith(f"Resharded to {out} from ")
    assert "in files for other ranks" in done.stdout
    assert files(out) == files(tmp_path / "whole")


def _interrupted(*_: object) -> ExportReport:
    raise KeyboardInterrupt
