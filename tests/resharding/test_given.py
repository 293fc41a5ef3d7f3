"""What is said of a configuration that a resharded training is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_cases import FIXTURES
from zexport import open_checkpoint
from zexport.options import ReshardOptions
from zexport.resharding.changes import told_of_given
from zexport.resharding.plan import plan_reshard

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
        ({"optimizer": {"type": "SGD"}}, "sgd in --ds-config"),
        ({"scheduler": {"type": "OneCycle"}}, "onecycle in --ds-config"),
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
    for given, is_whole, count in (({}, True, 3), ({}, False, 0), (_source(), True, 0)):
        told = [*told_of_given(given, _source(), (), is_whole=is_whole)]
        assert sum("nothing in --ds-config" in text for warns, text in told if warns) == count


@pytest.mark.parametrize(
    ("trained", "given", "told"),
    [
        ({}, {"scheduler": {"type": "WarmupDecayLR"}},
         "nothing in the checkpoint but warmupdecaylr in --ds-config"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001}}},
         {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}},
         "warmup_max_lr 0.001 in the checkpoint but 0.5 in --ds-config"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
         {"scheduler": {"type": "WarmupLR", "params": {}}},
         "warmup_num_steps 9.0 in the checkpoint but nothing in --ds-config"),
        ({}, {"gradient_clipping": 0.001},
         "gradient_clipping nothing in the checkpoint but 0.001 in --ds-config"),
        ({}, {"progressive_layer_drop": {"enabled": True}},
         "progressive_layer_drop nothing in the checkpoint but on in --ds-config"),
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
    found = told_of_given(given, trained, (), is_whole=True)
    warned = "; ".join(text for warns, text in found if warns)
    assert told in warned if told else not warned


def test_a_scale_and_a_kind_of_update_that_loading_replaces_are_noted() -> None:
    trained = {
        "optimizer": {"type": "AdamW", "params": {"amsgrad": False}},
        "fp16": {"enabled": True},
    }
    changed = {"optimizer": {"type": "AdamW", "params": {"amsgrad": True}},
               "fp16": {"enabled": True, "loss_scale": 128}}  # fmt: skip
    ((warns, note),) = told_of_given(changed, trained, (), is_whole=True)
    assert not warns
    assert "amsgrad [0.0] in the checkpoint but 1.0 in --ds-config" in note
    assert "loss_scale dynamic in the checkpoint but 128.0 in --ds-config" in note
    assert not [*told_of_given(trained, trained, (), is_whole=True)]


def test_a_resharding_to_the_same_ranks_is_called_a_copy(tmp_path: Path) -> None:
    for ranks, count in ((2, 1), (3, 0)):
        notes = plan_reshard(_OWN, tmp_path / "out", ReshardOptions(world_size=ranks)).notes
        assert sum("ZeRO-3 on 2 ranks already" in one for one in notes) == count


def test_settings_that_loading_replaces_are_noted(tmp_path: Path) -> None:
    source = json.loads(json.dumps(_source()))
    warnings, notes = _told(tmp_path, **source)
    assert "--ds-config" not in warnings
    assert "goes on with" not in notes
    optimizer = {"type": source["optimizer"]["type"], "params": {"lr": 0.5, "weight_decay": "auto"}}
    notes = _told(tmp_path, optimizer=optimizer)[1]
    assert "0.5 in --ds-config" in notes
    assert "weight_decay" not in notes


def _source() -> dict[str, Any]:
    (model, *_) = (one.first_model for one in _OWN.cells.values())
    assert model is not None
    return {key: model.ds_config[key] for key in ("optimizer", "scheduler", "gradient_clipping")
            if key in model.ds_config}  # fmt: skip
