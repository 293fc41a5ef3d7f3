"""Options and DeepSpeed config decide the layout; changes of the resumed run are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import edit
from tests.support.real_cases import FIXTURES, copied
from zexport import (
    ReshardOptions,
    UsageError,
    open_checkpoint,
    plan_reshard,
    reshard,
    verify_export,
)

_AUTO = {"stage": "auto", "round_robin_gradients": "auto", "sub_group_size": "auto"}
_BF16 = {"bf16": {"enabled": "auto"}}
_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
_DEFAULT = 1_000_000_000


def _plan(tmp_path: Path, name: str, config: dict[str, Any] | None, **options: Any) -> Any:
    """Plan a resharding with a DeepSpeed config; ``name`` is a fixture or a path."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    given = ReshardOptions(**{"world_size": 3, "ds_config": path if config else None, **options})
    return plan_reshard(open_checkpoint(FIXTURES / name / "ckpt"), tmp_path / "out", given)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("z3_w2_bf16_sub1000", None, (3, 1000, False, False)),
        ("z3_w2_bf16_sub1000", {"zero_optimization": _AUTO}, (3, 1000, False, False)),
        ("z3_w2_bf16_sub1000", {"zero_optimization": {"stage": 3, "sub_group_size": 5e8}},
         (3, 500_000_000, False, False)),
        ("z3_w2_bf16_sub1000", {"zero_optimization": {"stage": 3}}, (3, _DEFAULT, False, False)),
        ("z2_w2_bf16_groups", {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
         (1, _DEFAULT, True, False)),
        ("z2_w2_bf16_groups", {"zero_optimization": {"stage": 1}, **_IN_FP32},
         (1, _DEFAULT, False, True)),
        ("z2_w2_bf16_groups",
         {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, **_IN_FP32},
         (1, _DEFAULT, False, False)),
        ("z1_w2_bf16opt", None, (1, _DEFAULT, False, True)),
    ],
)  # fmt: skip
def test_auto_is_the_sources_value_and_a_missing_key_deepspeeds_default(
    name: str, config: dict[str, Any] | None, expected: tuple[object, ...], tmp_path: Path
) -> None:
    given = None if config is None else {**_BF16, **config}
    found = _plan(tmp_path, name, given).provenance["settings"]
    keys = ("stage", "sub_group_size", "is_dealt_out", "is_bf16_optimizer")
    assert tuple(found[key] for key in keys) == expected


@pytest.mark.parametrize(
    ("name", "config", "found", "advice"),
    [
        ("z2_w2_bf16_groups", {"zero_optimization": {"stage": 1}}, "found fp32, expected bf16",
         "bf16"),
        ("z2_w2_bf16_groups", {"fp16": {"enabled": True}}, "found fp16, expected bf16", "auto"),
        ("z3_w2_fp32", {"bfloat16": {"enabled": True}}, "found bf16, expected fp32",
         "Leave bf16 out"),
    ],
)  # fmt: skip
def test_config_with_another_dtype_is_rejected(
    name: str, config: dict[str, Any], found: str, advice: str, tmp_path: Path
) -> None:
    """DeepSpeed would not find the files, or load a loss scaler that fp16 cannot train with."""
    with pytest.raises(UsageError, match=found) as caught:
        _plan(tmp_path, name, config)
    assert advice in caught.value.hint


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({"zero_optimization": {"load_from_fp32_weights": False}}, "load_from_fp32_weights is fal"),
        ({"zero_optimization": {"elastic_checkpoint": True}}, "elastic_checkpoint is on"),
        ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1,
          "gradient_accumulation_steps": 2},
         "changes from 2 (2 ranks x micro-batch 1 x accumulation 1) to 6"),
    ],
)  # fmt: skip
def test_changed_run_is_warned_about(config: dict[str, Any], warning: str, tmp_path: Path) -> None:
    plan = _plan(tmp_path, "z3_w2_bf16", {**_BF16, **config})
    assert warning in "; ".join(plan.warnings)


def test_round_robin_is_warned_about_for_a_universal_checkpoint(tmp_path: Path) -> None:
    config = {**_BF16, "zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    plan = _plan(tmp_path, "z2_w2_bf16_groups", config, format="universal")
    assert "round_robin_gradients is on" in plan.warnings[0]


@pytest.mark.parametrize(
    ("ranks", "advice"),
    [
        (1, "keep it with 12 (1 rank x micro-batch 2 x accumulation 6)"),
        (5, "Closest: 10 (5 ranks x micro-batch 2 x accumulation 1)"),
    ],
)
def test_note_names_the_settings_that_keep_the_global_batch(
    ranks: int, advice: str, tmp_path: Path
) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    for path in root.glob("*/*_states.pt"):
        edit(path, lambda state: state["ds_config"].update(batch))
    plan = plan_reshard(open_checkpoint(root), tmp_path / "out", ReshardOptions(world_size=ranks))
    assert advice in " ".join(plan.notes)


@pytest.mark.parametrize("zero", [_AUTO, "auto"])
def test_options_of_zexport_train_get_the_layout_that_auto_means(
    zero: object, tmp_path: Path
) -> None:
    """It drops ``auto``, and DeepSpeed's defaults would read the flat data in another order."""
    root = copied("z2_w2_bf16_groups", tmp_path)
    given = {"zero_optimization": zero, "data_types": {"grad_accum_dtype": "auto"}, **_BF16}

    def deal_out(model: Any) -> None:
        own = {"round_robin_gradients": True, "offload_optimizer": {"device": "cpu"}}
        model["ds_config"]["zero_optimization"].update(own)
        model["ds_config"]["data_types"] = {"grad_accum_dtype": "fp32"}

    for file in root.glob("*/*_states.pt"):
        edit(file, deal_out)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    report = reshard(root, tmp_path / "out", ReshardOptions(world_size=2, ds_config=path))
    assert "zexport_train.json" in report.files
    config = json.loads((tmp_path / "out" / "zexport_train.json").read_text())["ds_config"]
    assert config["zero_optimization"]["round_robin_gradients"] is True
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    offloading = config["zero_optimization"].get("offload_optimizer")
    assert offloading == ({"device": "cpu"} if zero == "auto" else None)


def test_deleted_config_is_taken_from_the_manifest(tmp_path: Path) -> None:
    root, path = FIXTURES / "z2_w2_bf16_groups" / "ckpt", tmp_path / "ds.json"
    zero = {"stage": 3, "sub_group_size": 40}
    path.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": 6, **_BF16}))
    reshard(root, tmp_path / "out", ReshardOptions(world_size=3, ds_config=path))
    path.unlink()
    assert verify_export(tmp_path / "out", against=root).ok
