"""``zexport diff`` of two checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.real_cases import FIXTURES
from zexport import Outcome, ReshardOptions, diff_states, reshard


@pytest.mark.parametrize("name", ["z2_w2_bf16_groups", "z3_w2_bf16"])
def test_resharded_checkpoint_is_equal_until_a_state_or_setting_changes(
    name: str, tmp_path: Path
) -> None:
    source, out, other = FIXTURES / name / "ckpt", tmp_path / "out", tmp_path / "other"
    reshard(source, out, ReshardOptions(world_size=3))
    report = diff_states(source, out)
    assert report.is_equal
    assert any(tensor.name.endswith(" (exp_avg_sq)") for tensor in report.tensors)

    shutil.copytree(source, other)
    for path in other.rglob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)
        saved = state["optimizer_state_dict"]
        inner = saved.get("base_optimizer_state") or saved["optimizer_state_dict"]
        inner["param_groups"][0]["lr"] = 0.5
        for values in inner["state"].values():
            values["exp_avg"] += 1
        torch.save(state, path)
    report = diff_states(source, other)
    assert [(one.about, one.b) for one in report.settings] == [("lr of group 0", "0.5")]
    changed = [tensor for tensor in report.tensors if tensor.outcome is Outcome.DIFFERENT]
    assert changed
    assert all(tensor.name.endswith(" (exp_avg)") for tensor in changed)
    assert not report.is_cast_equal
