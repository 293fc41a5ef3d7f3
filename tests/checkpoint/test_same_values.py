"""Checkpoints that record less, or differently, have the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zexport
from tests.checkpoint import test_refused as damages
from tests.checkpoint.test_refused import EXPP0, M1, MODEL, MOE0, O0, O1, T2, Z2, Z3, edit, lists
from tests.support.real_cases import copied, facts_of

State = Any
NVME = {"nvme_path": "/nvme1"}


def older_fused(record: State) -> None:
    del record["sub_param_shard_widths"]
    record["universal_checkpoint_version"] = 0.2


def projected(state: State) -> None:
    for one in state["optimizer"]["state"].values():
        one.update({key: torch.ones(3, 2) for key in ("exp_avg", "exp_avg_sq")}, projector=None)


def unmarked(state: State) -> None:
    damages.unnamed(state)
    state["optimizer"]["optimizer_state_dict"]["param_groups"][1].pop("moe")


def dealt_out(state: State) -> None:
    state["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
    for own in state.get("optimizer_state_dict", {}).get("param_slice_mappings", ()):
        own.popitem()


def without_frozen(state: State) -> None:
    for name in state["frozen_param_fragments"]:
        del state["module"][name]


def resaved(root: Path) -> None:
    """Write each file under another name and rename it, as some storage libraries do."""
    for path in root.glob("global_step*/*optim_states.pt"):
        edit(path.name, lambda _: None)(root)
        path.rename(path.with_name("aside"))
        path.with_name("aside").rename(path)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        *(
            (name, lists(lambda _: None))
            for name in (T2, "tp2_z1_w2_bf16_fused", "tp2_z1_w2_bf16_tied")
        ),
        ("tp2_z3_w4_bf16", lists(lambda _: None, MODEL)),
        ("tp2_z1_w2_bf16_fused", lists(older_fused)),
        (T2, damages.drop("mp_rank_01*", damages.INFO)),
        (damages.P0, edit("mp_rank_*", projected)),
        (MOE0, edit("expp_rank_*", unmarked)),
        ("moe_z0_w2_ep2_fp32", damages.gone(EXPP0)),
        ("moe_z0_w2_ep2_fp32", damages.gone("expp_rank_*")),
        ("z2_w2_bf16_tied", edit(MODEL, lambda state: state.pop("shared_params"))),
        (Z2, damages.drop(O0, damages.STATE, "param_slice_mappings")),
        (Z2, edit("*_states.pt", dealt_out)),
        ("z2_w2_bf16_lora", edit(MODEL, without_frozen)),
        ("z3_w2_bf16", resaved),
        (Z2, damages.update(O1, "ds_config", wandb={"enabled": False})),
        (Z3, damages.update(O1, "ds_config", "zero_optimization", offload_optimizer=NVME)),
        (Z3, damages.update(M1, "lr_scheduler", best=0.3)),
        (Z3, damages.update(M1, local_rank=1, seen=[3])),
        (Z2, edit(O1, lambda state: damages.of_parameters(state).pop("param_groups"))),
    ],
)
def test_weights_are_the_same(case: str, change: damages.Damage, tmp_path: Path) -> None:
    root = copied(case, tmp_path)
    before = facts_of(zexport.open_checkpoint(root))
    change(root)
    after = zexport.open_checkpoint(root)
    assert after.problems == ()
    assert facts_of(after) == before
