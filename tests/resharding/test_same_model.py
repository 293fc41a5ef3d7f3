"""A resharded checkpoint has the model of its source, byte for byte, in every layout.

The damaged and hostile checkpoints in ZEXPORT_CASES are among the sources.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.real_cases import FIXTURES, facts_of
from zexport import (
    ReshardOptions,
    TrainingState,
    VerifyMode,
    ZexportError,
    open_checkpoint,
    reshard,
)

_FOLDERS = [FIXTURES, *(Path(one) for one in [os.environ.get("ZEXPORT_CASES")] if one)]
CASES = {file.parent.name: file.parent for one in _FOLDERS for file in one.glob("*/case.json")}

REFUSED = {
    **dict.fromkeys(("dmg_latest_missing_two", "hf_trainer_z3_outdir"), 2),
    "dmg_latest_traversal": 5,
    "dmg_z3_deflated": 4,
    **dict.fromkeys(
        (
            *("dmg_z2_missing_model0", "dmg_z2_mixed_steps_optim", "dmg_z2_other_world"),
            *("dmg_z3_flip_weight", "dmg_z3_missing_optim", "dmg_z3_param_shapes_huge"),
            *("dmg_z3_swapped_ranks", "dmg_z3_tensor_oob", "dmg_z3_trunc_optim"),
            *("uni_pp2_z1_w4_bf16opt", "z1_w3_bf16_elastic"),
        ),
        3,
    ),
    **dict.fromkeys((name for name in CASES if name.startswith(("pp2_z0", "pp2_tp2_z0"))), 4),
}
"""Exit code of checkpoints without a state to resume."""

QUICK = {
    *("autoep_z0_w2_ep2", "autoep_z2_w2_ep2_frozen", "autoep_z3_w4_ep2_blocks"),
    *("moe_z0_w2_ep2_fp32", "moe_z0_w2_ep2_bf16_fused", "moe_z2_w2_ep2_frozen"),
    *("stages_moe_z1_w4_ep2", "pp2_tp2_z1_w8_bf16_tied", "tp2_z0_w2_bf16", "tp2_z3_w4_bf16"),
    *("uni_z3_w2_bf16_frozen", "z0_w2_bf16_fused", "z1_w2_bf16opt", "z2_w2_bf16_lora"),
    *("z2_w3_bf16_odd", "z3_w2_bf16_sub1000", "z3_w3_bf16_tied", "dmg_z3_pickle_system"),
}
"""One of each kind; slow tests reshard all others too."""


def _resharded(name: str, out: Path) -> tuple[TrainingState, TrainingState]:
    """Reshard to more ranks, and to another stage if the layout allows it."""
    source = open_checkpoint(CASES[name] / "ckpt")
    degree = max(source.parallelism.expert_ranks, default=1)
    ranks = (source.world_size or degree) + degree
    is_pipeline, is_experts = "pp2" in name or "stages" in name, "_ep" in name
    possible = (1,) if is_pipeline else (2, 1) if is_experts else (3, 1)
    stage = next((one for one in possible if one != source.stage), 1)
    options = ReshardOptions(world_size=ranks, stage=stage, drop_client_state=True)
    reshard(CASES[name] / "ckpt", out, options, verify=VerifyMode.NONE)
    found = open_checkpoint(out)
    assert (found.problems, found.world_size, found.stage) == ((), ranks, stage)
    return source, found


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_resharded_model_equals_its_source(name: str, tmp_path: Path) -> None:
    if name in REFUSED:
        with pytest.raises(ZexportError) as refused:
            _resharded(name, tmp_path / "out")
        assert refused.value.exit_code == REFUSED[name]
        return
    source, found = _resharded(name, tmp_path / "out")
    assert facts_of(found) == facts_of(source)
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    tag_dir = found.location.tag_dir
    for path in tag_dir.glob("*_model_states.pt"):
        assert isinstance(torch.load(path, weights_only=True), dict)
    with torch.serialization.safe_globals([DynamicLossScaler, LossScaler]):
        for path in tag_dir.glob("*_optim_states.pt"):
            assert torch.load(path, weights_only=True)["optimizer_state_dict"]
