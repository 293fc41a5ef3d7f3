"""Checkpoints that record less, or in another way, and have the same weights as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zexport
from tests.checkpoint.test_refused import (
    EXPP0,
    EXPP1,
    INFO,
    MODEL,
    MOE0,
    P0,
    T2,
    Damage,
    both,
    drop,
    edit,
    gone,
    lists,
    unnamed,
)
from tests.support.expert_checkpoints import MoeRun, save_moe, truth
from tests.support.real_cases import copied, facts, facts_of

State = Any


def older_fused(record: State) -> None:
    del record["sub_param_shard_widths"]
    record["universal_checkpoint_version"] = 0.2


def projected(state: State) -> None:
    for one in state["optimizer"]["state"].values():
        one.update({key: torch.ones(3, 2) for key in ("exp_avg", "exp_avg_sq")}, projector=None)


def unmarked(state: State) -> None:
    unnamed(state)
    state["optimizer"]["optimizer_state_dict"]["param_groups"][1].pop("moe")


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
        (T2, drop("mp_rank_01*", INFO)),
        (P0, edit("mp_rank_*", projected)),
        (MOE0, edit("expp_rank_*", unmarked)),
        ("moe_z0_w2_ep2_fp32", gone(EXPP0)),
        ("moe_z0_w2_ep2_fp32", both(gone(EXPP0), gone(EXPP1))),
        ("z2_w2_bf16_tied", edit(MODEL, lambda state: state.pop("shared_params"))),
        ("z3_w2_bf16", resaved),
    ],
)
def test_a_checkpoint_that_records_less_has_the_same_weights(
    case: str, change: Damage, tmp_path: Path
) -> None:
    root = copied(case, tmp_path)
    before = facts_of(zexport.open_checkpoint(root))
    change(root)
    after = zexport.open_checkpoint(root)
    assert after.problems == ()
    assert facts_of(after) == before


@st.composite
def runs(draw: st.DrawFn) -> MoeRun:
    ep = draw(st.integers(1, 3))
    autoep = draw(st.booleans())
    experts = ep * draw(st.integers(1, 3))
    held = None
    if autoep and draw(st.booleans()):
        order = draw(st.permutations(range(experts)))
        held = [order[e * experts // ep : (e + 1) * experts // ep] for e in range(ep)]
    return MoeRun(
        stage=draw(st.sampled_from([1, 2, 3] if autoep else [1, 2])),
        world=ep * draw(st.integers(1, 3)),
        ep=ep,
        experts=experts,
        layers=draw(st.integers(1, 2)),
        blocks=draw(st.booleans()),
        recorded=draw(st.booleans()),
        autoep=autoep,
        held=held,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs())
def test_experts_of_any_ranks_and_shares_are_whole(
    run: MoeRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state = zexport.open_checkpoint(save_moe(run, tmp_path_factory.mktemp("moe")))
    found, expected = facts_of(state), facts(truth(run))
    assert {name: found[name] for name in found.keys() - state.aliases.keys()} == expected
    routers = [f"m.{layer}.router.gate.weight" for layer in range(run.layers * run.autoep)]
    assert state.aliases == {name.replace(".router.", ".gate."): name for name in routers}
