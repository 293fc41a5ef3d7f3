"""``fixtures/`` agree with DeepSpeed's converter and can be made again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fixtures.make import CASES, run_rank
from tests.support.sharded_runs import run_ranks

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = sorted(CASES)
REMADE = "z3_w2_bf16_frozen"
REFUSED = {"z1_w2_bf16opt"}  # deepspeed 0.19.8 takes its files for no ZeRO checkpoint


def agrees_with_deepspeed(folder: Path) -> bool:
    """Return whether DeepSpeed's converter reads the truth from the files, bit for bit."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    truth = load_file(folder / "truth.safetensors")
    read = get_fp32_state_dict_from_zero_checkpoint(str(folder / "ckpt"))
    trained = truth.keys() - set(json.loads((folder / "case.json").read_text())["frozen"])
    return trained <= read.keys() and all(
        torch.equal(value.float(), truth[name].float()) for name, value in read.items()
    )


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_deepspeeds_own_converter_reads_the_truth(name: str) -> None:
    assert agrees_with_deepspeed(FIXTURES / name)


def _make(_rank: int, out: Path) -> None:
    run_rank(REMADE, out)


@pytest.mark.deepspeed
@pytest.mark.slow
def test_fixture_script_reproduces_a_fixture(tmp_path: Path) -> None:
    fresh, kept = tmp_path / REMADE, FIXTURES / REMADE
    fresh.mkdir()
    run_ranks(CASES[REMADE].world, partial(_make, out=tmp_path), tmp_path / "ranks")
    # Not the same bits: kernels differ from one processor to the next.
    found, expected = (
        {n: (t.dtype, t.shape) for n, t in load_file(folder / "truth.safetensors").items()}
        for folder in (fresh, kept)
    )
    assert found == expected
    assert agrees_with_deepspeed(fresh)
