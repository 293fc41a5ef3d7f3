"""The frameworks resume resharded checkpoints as they resume their own."""

from __future__ import annotations

from pathlib import Path

import pytest

import zexport
from tests.support.oracles import differences
from tests.support.raw_states import States, raw_states
from tests.support.resuming_frameworks import SAVED_AT, Going
from tests.support.sharded_runs import run_ranks

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

SAVED = {"accelerate": "saved", "lightning": "x.ckpt"}
"""Folder of a framework's checkpoint; Trainer names it by the step."""


@pytest.mark.parametrize(
    ("framework", "stage", "to_stage", "to_world", "form"),
    [
        ("trainer", 3, 2, 3, "native"),
        ("lora", 3, 3, 1, "native"),
        ("accelerate", 3, 2, 3, "universal"),
        ("lightning", 3, 2, 3, "universal"),
    ],
)
def test_framework_resumes_on_other_ranks(
    framework: str, stage: int, to_stage: int, to_world: int, form: str, tmp_path: Path
) -> None:
    first = Going(framework, 2, stage, tmp_path / "first")
    _run(first)
    source = first.out / SAVED.get(framework, f"checkpoint-{SAVED_AT}")
    resharded = tmp_path / source.name
    is_universal = form == "universal"
    options = zexport.ReshardOptions(world_size=to_world, stage=to_stage, format=form)
    done = zexport.reshard(source, resharded, options)
    counting = [text.split()[0] for text in done.warnings if "counts ranks x updates" in text]
    assert counting == ["scheduler.bin", "scheduler_1.bin"] * (framework == "accelerate")
    then = Going(framework, to_world, to_stage, tmp_path / "then", resharded, is_universal)
    _run(then)
    assert differences(_states(then.out / "again"), _states(source)) == []
    if framework != "lightning":  # which restarts its data in the middle of an epoch
        assert then.losses[-2:] == pytest.approx(first.losses[SAVED_AT:], rel=2e-3)


def _run(going: Going) -> None:
    going.out.mkdir()
    run_ranks(going.world, going, going.out / "ranks")


def _states(root: Path) -> States:
    return raw_states(root / (root / "latest").read_text(encoding="utf-8").strip())
