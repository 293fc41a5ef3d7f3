"""What a target's layout is decided by: its own configuration, or the source's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_cases import FIXTURES
from zexport import open_checkpoint
from zexport.options import ReshardOptions
from zexport.resume.plan import plan_reshard
from zexport.resume.settings import settle

_AUTO = {"stage": "auto", "round_robin_gradients": "auto", "sub_group_size": "auto"}
_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": "auto"}}


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("z3_w2_bf16_sub1000", None, "ZeRO-3 with a sub_group_size of 1,000, by the config"),
        ("z3_w2_bf16_sub1000", {"zero_optimization": _AUTO}, "size of 1,000, by --ds-config"),
        ("z3_w2_bf16_sub1000", {"zero_optimization": "auto"}, "size of 1,000, by --ds-config"),
        (
            "z3_w2_bf16_sub1000",
            {"zero_optimization": {"stage": 3, "sub_group_size": 5e8}},
            "size of 500,000,000,",
        ),
        ("z3_w2_bf16_sub1000", {"zero_optimization": {"stage": 3}}, "size of 1,000,000,000,"),
        (
            "z2_w2_bf16_groups",
            {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
            "ZeRO-1 with round_robin_gradients",
        ),
        ("z2_w2_bf16_groups", {"zero_optimization": {"stage": 1}, **_IN_FP32}, "BF16_Optimizer"),
        (
            "z2_w2_bf16_groups",
            {
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
                **_IN_FP32,
            },
            "ZeRO-1 without round_robin_gradients",
        ),
        ("z1_w2_bf16opt", None, "BF16_Optimizer"),
    ],
)
def test_auto_is_the_sources_value_and_what_is_missing_is_deepspeeds(
    name: str, config: dict[str, Any] | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    options = ReshardOptions(world_size=3, ds_config=path if config is not None else None)
    assert words in settle(open_checkpoint(FIXTURES / name / "ckpt"), options).note


def test_a_run_that_will_not_take_the_masters_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "load_from_fp32_weights": False, "elastic_checkpoint": True}
    path.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    checkpoint = open_checkpoint(FIXTURES / "z3_w2_bf16" / "ckpt")
    plan = plan_reshard(checkpoint, tmp_path / "out", ReshardOptions(world_size=1, ds_config=path))
    told = " ".join(plan.warnings)
    assert "load_from_fp32_weights is false" in told
    assert "elastic_checkpoint is on" in told
