"""What a target's layout is decided by: its own configuration, or the source's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.expert_checkpoints import rewrite
from tests.support.real_cases import FIXTURES, copied
from zexport import ReshardOptions, UsageError, open_checkpoint, reshard, verify_export
from zexport.resharding.plan import plan_reshard
from zexport.resharding.settings import settle

_AUTO = {"stage": "auto", "round_robin_gradients": "auto", "sub_group_size": "auto"}
_BF16 = {"bf16": {"enabled": "auto"}}
_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("z3_w2_bf16_sub1000", None, (3, 1000, False, False)),
        ("z3_w2_bf16_sub1000", {"zero_optimization": _AUTO}, (3, 1000, False, False)),
        ("z3_w2_bf16_sub1000", {"zero_optimization": "auto"}, (3, 1000, False, False)),
        (
            "z3_w2_bf16_sub1000",
            {"zero_optimization": {"stage": 3, "sub_group_size": 5e8}},
            (3, 500_000_000, False, False),
        ),
        (
            "z3_w2_bf16_sub1000",
            {"zero_optimization": {"stage": 3}},
            (3, 1_000_000_000, False, False),
        ),
        (
            "z2_w2_bf16_groups",
            {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
            (1, 1_000_000_000, True, False),
        ),
        (
            "z2_w2_bf16_groups",
            {"zero_optimization": {"stage": 1}, **_IN_FP32},
            (1, 1_000_000_000, False, True),
        ),
        (
            "z2_w2_bf16_groups",
            {
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
                **_IN_FP32,
            },
            (1, 1_000_000_000, False, False),
        ),
        ("z1_w2_bf16opt", None, (1, 1_000_000_000, False, True)),
    ],
)
def test_auto_is_the_sources_value_and_what_is_missing_is_deepspeeds(
    name: str, config: dict[str, Any] | None, expected: tuple[object, ...], tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**_BF16, **(config or {})}), encoding="utf-8")
    options = ReshardOptions(world_size=3, ds_config=path if config is not None else None)
    found, _ = settle(open_checkpoint(FIXTURES / name / "ckpt"), options)
    assert expected == (
        found.stage,
        found.sub_group_size,
        found.is_dealt_out,
        found.is_bf16_optimizer,
    )


def test_a_run_that_will_not_take_the_masters_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "load_from_fp32_weights": False, "elastic_checkpoint": True}
    path.write_text(json.dumps({"zero_optimization": zero, **_BF16}), encoding="utf-8")
    checkpoint = open_checkpoint(FIXTURES / "z3_w2_bf16" / "ckpt")
    plan = plan_reshard(checkpoint, tmp_path / "out", ReshardOptions(world_size=1, ds_config=path))
    told = " ".join(plan.warnings)
    assert "load_from_fp32_weights is false" in told
    assert "elastic_checkpoint is on" in told


@pytest.mark.parametrize(
    ("name", "config", "found", "advice"),
    [
        (
            "z2_w2_bf16_groups",
            {"zero_optimization": {"stage": 1}},
            "found fp32, expected bf16",
            "bf16",
        ),
        ("z2_w2_bf16_groups", {"fp16": {"enabled": True}}, "found fp16, expected bf16", "auto"),
        (
            "z3_w2_fp32",
            {"bfloat16": {"enabled": True}},
            "found bf16, expected fp32",
            "Leave bf16 out",
        ),
    ],
)
def test_a_configuration_of_another_element_type_is_refused(
    name: str, config: dict[str, Any], found: str, advice: str, tmp_path: Path
) -> None:
    """DeepSpeed would not find the files, or load a loss scaler that fp16 cannot train with."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UsageError, match=found) as caught:
        settle(
            open_checkpoint(FIXTURES / name / "ckpt"),
            ReshardOptions(world_size=3, ds_config=path),
        )
    assert advice in caught.value.hint


@pytest.mark.parametrize("zero", [_AUTO, "auto"])
def test_zexport_train_is_told_of_the_layout_that_auto_meant(zero: object, tmp_path: Path) -> None:
    """It leaves ``auto`` out, by which DeepSpeed's own values would read the flat data."""
    root = copied("z2_w2_bf16_groups", tmp_path)
    path = tmp_path / "ds.json"
    given = {"zero_optimization": zero, "data_types": {"grad_accum_dtype": "auto"}, **_BF16}
    path.write_text(json.dumps(given), encoding="utf-8")
    for file in root.glob("*/*_states.pt"):
        rewrite(file, _dealt_out)
    options = ReshardOptions(world_size=2, ds_config=path)
    plan = plan_reshard(open_checkpoint(root), tmp_path / "out", options)
    (typed,) = (file.content for file in plan.side_files if file.filename == "zexport_train.json")
    says = json.loads(typed or b"")["ds_config"]
    settings = plan.provenance["settings"]
    assert isinstance(settings, dict)
    assert says["zero_optimization"]["round_robin_gradients"] is settings["is_dealt_out"] is True
    assert says["data_types"] == {"grad_accum_dtype": "fp32"}
    offloading = says["zero_optimization"].get("offload_optimizer")
    assert offloading == ({"device": "cpu"} if zero == "auto" else None)


def test_configuration_that_is_gone_is_in_the_manifest(tmp_path: Path) -> None:
    root, path = FIXTURES / "z2_w2_bf16_groups" / "ckpt", tmp_path / "ds.json"
    given = {
        "zero_optimization": {"stage": 3, "sub_group_size": 40},
        "train_batch_size": 6,
        **_BF16,
    }
    path.write_text(json.dumps(given), encoding="utf-8")
    reshard(root, tmp_path / "out", ReshardOptions(world_size=3, ds_config=path))
    path.unlink()
    assert verify_export(tmp_path / "out", against=root).ok


def _dealt_out(model: Any) -> None:
    zero = {"round_robin_gradients": True, "offload_optimizer": {"device": "cpu"}}
    model["ds_config"]["zero_optimization"].update(zero)
    model["ds_config"]["data_types"] = {"grad_accum_dtype": "fp32"}
