"""What is said of a configuration that a resharded training is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import edit
from tests.support.real_cases import FIXTURES, copied
from zexport import ReshardOptions, open_checkpoint
from zexport.resharding.plan import plan_reshard
from zexport.resharding.settings import source_config

_OWN = open_checkpoint(FIXTURES / "z3_w2_bf16" / "ckpt")


def _told(tmp_path: Path, **given: Any) -> str:
    """Warnings of a plan for three ranks."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}} | given))
    plan = plan_reshard(_OWN, tmp_path / "out", ReshardOptions(world_size=3, ds_config=path))
    return "; ".join(plan.warnings)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"optimizer": {"type": "SGD"}}, "optimizer changes from adamw to sgd"),
        ({"scheduler": {"type": "OneCycle"}}, "to onecycle"),
        ({"gradient_cliping": 1.0}, "'gradient_cliping', which DeepSpeed does not know and passes "
                                    "over; did you mean gradient_clipping?"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1,
          "gradient_accumulation_steps": 2}, "changes from 2 (2 ranks x micro-batch 1 x "
                                             "accumulation 1) to 6"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_warned_of(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    assert told in _told(tmp_path, **given)


def test_the_sources_own_configuration_is_not_warned_of(tmp_path: Path) -> None:
    assert "--ds-config" not in _told(tmp_path, **json.loads(json.dumps(_source())))


def _source() -> dict[str, Any]:
    config = source_config(_OWN)
    keys = ("optimizer", "scheduler", "gradient_clipping")
    return {key: config[key] for key in keys if key in config}


@pytest.mark.parametrize(
    ("config", "ranks", "advice"),
    [
        ({}, 1, "keep it with 12 (1 rank x micro-batch 2 x accumulation 6)"),
        ({}, 3, "keep it with 12 (3 ranks x micro-batch 2 x accumulation 2)"),
        ({}, 5, "Closest: 10 (5 ranks x micro-batch 2 x accumulation 1)"),
        ({"sequence_parallel_size": 2}, 1, "keep it with 6 (1 rank x micro-batch 2"),
    ],
)
def test_other_ranks_are_told_how_to_keep_the_batch(
    config: dict[str, int], ranks: int, advice: str, tmp_path: Path
) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    batch = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}

    def change(state: Any) -> None:
        state["ds_config"] |= batch | {"gradient_accumulation_steps": 3} | config

    for path in root.glob("*/*_states.pt"):
        edit(path, change)
    options = ReshardOptions(world_size=ranks)
    assert advice in " ".join(plan_reshard(open_checkpoint(root), tmp_path / "out", options).notes)
