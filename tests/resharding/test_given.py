"""What is said of a configuration that a resharded training is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_cases import FIXTURES
from zexport import open_checkpoint
from zexport.options import ReshardOptions
from zexport.resharding.changes import describe_config_changes
from zexport.resharding.plan import plan_reshard
from zexport.resharding.settings import source_config

_OWN = open_checkpoint(FIXTURES / "z3_w2_bf16" / "ckpt")


def _told(tmp_path: Path, **given: Any) -> tuple[str, str]:
    """Warnings and notes of a plan for three ranks."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}} | given))
    plan = plan_reshard(_OWN, tmp_path / "out", ReshardOptions(world_size=3, ds_config=path))
    return "; ".join(plan.warnings), "; ".join(plan.notes)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"optimizer": {"type": "SGD"}}, "optimizer changes from adamw to sgd"),
        ({"scheduler": {"type": "OneCycle"}}, "to onecycle"),
        ({"gradient_cliping": 1.0}, "'gradient_cliping', which DeepSpeed does not know and passes "
                                    "over; did you mean gradient_clipping?"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1,
          "gradient_accumulation_steps": 2}, "train_batch_size is 8, and 3 ranks x micro-batch 1 x "
                                             "accumulation 2 = 6 rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_warned_of(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    assert told in _told(tmp_path, **given)[0]


def test_what_a_configuration_leaves_out_is_told_where_nobody_adds_it() -> None:
    for given, is_complete, count in (({}, True, 3), ({}, False, 0), (_source(), True, 0)):
        told = [*describe_config_changes(given, _source(), (), is_complete=is_complete)]
        assert sum(text.count("to nothing") for warns, text in told if warns) == count


@pytest.mark.parametrize(
    ("trained", "given", "told"),
    [
        ({}, {"scheduler": {"type": "WarmupDecayLR"}},
         "scheduler changes from nothing to warmupdecaylr"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001}}},
         {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}},
         "scheduler.warmup_max_lr changes from 0.001 to 0.5"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
         {"scheduler": {"type": "WarmupLR", "params": {}}},
         "scheduler.warmup_num_steps changes from 9 to nothing"),
        ({}, {"gradient_clipping": 0.001},
         "gradient_clipping changes from nothing to 0.001"),
        ({}, {"progressive_layer_drop": {"enabled": True}},
         "progressive_layer_drop changes from nothing to on"),
        ({}, {"curriculum_learning": {"enabled": False}}, ""),
        ({}, {"gradient_clipping": 0, "prescale_gradients": False,
              "gradient_predivide_factor": 1.0}, ""),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001}}},
         {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}, ""),
    ],
)  # fmt: skip
def test_what_either_side_leaves_out_counts_as_what_it_says(
    trained: dict[str, Any], given: dict[str, Any], told: str
) -> None:
    found = describe_config_changes(given, trained, (), is_complete=True)
    warned = "; ".join(text for warns, text in found if warns)
    assert told in warned if told else not warned


def test_a_scale_and_a_kind_of_update_that_loading_replaces_are_noted() -> None:
    trained = {
        "optimizer": {"type": "AdamW", "params": {"amsgrad": False}},
        "fp16": {"enabled": True},
    }
    changed = {"optimizer": {"type": "AdamW", "params": {"amsgrad": True}},
               "fp16": {"enabled": True, "loss_scale": 128}}  # fmt: skip
    ((warns, note),) = describe_config_changes(changed, trained, (), is_complete=True)
    assert not warns
    assert "amsgrad True (checkpoint: False)" in note
    assert "loss_scale 128 (checkpoint: dynamic)" in note
    assert not [*describe_config_changes(trained, trained, (), is_complete=True)]


def test_a_resharding_to_the_same_ranks_is_called_a_copy(tmp_path: Path) -> None:
    for ranks, count in ((2, 1), (3, 0)):
        notes = plan_reshard(_OWN, tmp_path / "out", ReshardOptions(world_size=ranks)).notes
        assert sum("ZeRO-3 on 2 ranks already" in one for one in notes) == count


def test_settings_that_loading_replaces_are_noted(tmp_path: Path) -> None:
    source = json.loads(json.dumps(_source()))
    warnings, notes = _told(tmp_path, **source)
    assert "--ds-config" not in warnings
    assert "has no effect" not in notes
    optimizer = {"type": source["optimizer"]["type"], "params": {"lr": 0.5, "weight_decay": "auto"}}
    notes = _told(tmp_path, optimizer=optimizer)[1]
    assert "lr 0.5 (checkpoint: " in notes
    assert "weight_decay" not in notes


def _source() -> dict[str, Any]:
    config = source_config(_OWN)
    keys = ("optimizer", "scheduler", "gradient_clipping")
    return {key: config[key] for key in keys if key in config}
