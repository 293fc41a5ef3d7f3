"""A resharded checkpoint has the model of its source, byte for byte, whatever its layout is.

The damaged and hostile checkpoints in ZEXPORT_CASES are among the sources.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.real_cases import FIXTURES, facts_of
from zexport import ReshardOptions, VerifyMode, ZexportError, open_checkpoint, reshard
from zexport.checkpoint.state import Structure, TrainingState
from zexport.resharding.settings import models_of

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
"""What has no state to go on from, and the exit code."""

QUICK = {
    *("autoep_z0_w2_ep2", "autoep_z2_w2_ep2_frozen", "autoep_z3_w4_ep2_blocks"),
    *("moe_z0_w2_ep2_fp32", "moe_z0_w2_ep2_bf16_fused", "moe_z2_w2_ep2_frozen"),
    *("stages_moe_z1_w4_ep2", "pp2_tp2_z1_w8_bf16_tied", "tp2_z0_w2_bf16", "tp2_z3_w4_bf16"),
    *("uni_z3_w2_bf16_frozen", "z0_w2_bf16_fused", "z1_w2_bf16opt", "z2_w2_bf16_lora"),
    *("z2_w3_bf16_odd", "z3_w2_bf16_sub1000", "z3_w3_bf16_tied", "dmg_z3_pickle_system"),
}
"""One of a kind; all others are looked at as well where slow tests are."""


def _target(source: TrainingState) -> ReshardOptions:
    """More ranks, and another stage where the layout can have one."""
    degree = max(source.parallelism.expert_ranks, default=1)
    stages = {Structure.PIPELINE: [1], Structure.EXPERTS: [1, 2]}.get(source.structure, [1, 3])
    grids = [model.grid for model in models_of(source)]
    stages = [1] if any(one is not None and one.stages > 1 for one in grids) else stages
    other = next((stage for stage in stages[::-1] if stage != source.stage), 1)
    ranks = (source.world_size or degree) + degree
    return ReshardOptions(world_size=ranks, stage=other, drop_client_state=True)


def _resharded(name: str, out: Path) -> tuple[TrainingState, TrainingState]:
    root = CASES[name] / "ckpt"
    source = open_checkpoint(root)
    options = _target(source)
    reshard(root, out, options, verify=VerifyMode.NONE)
    found = open_checkpoint(out)
    assert (found.problems, found.world_size, found.stage) == (
        (),
        options.world_size,
        options.stage,
    )
    return source, found


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_the_model_of_a_resharded_checkpoint_is_that_of_its_source(
    name: str, tmp_path: Path
) -> None:
    if name in REFUSED:
        with pytest.raises(ZexportError) as refused:
            _resharded(name, tmp_path / "out")
        assert refused.value.exit_code == REFUSED[name]
        return
    source, found = _resharded(name, tmp_path / "out")
    assert facts_of(found) == facts_of(source)
    _open_as_data(found.location.tag_dir)


def _open_as_data(tag_dir: Path) -> None:
    """Where only weights are let in; optimizer files name DeepSpeed's two loss scalers, too."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    for path in tag_dir.glob("*_model_states.pt"):
        assert isinstance(torch.load(path, weights_only=True), dict)
    with torch.serialization.safe_globals([DynamicLossScaler, LossScaler]):
        for path in tag_dir.glob("*_optim_states.pt"):
            assert torch.load(path, weights_only=True)["optimizer_state_dict"]
