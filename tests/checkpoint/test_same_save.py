"""Rank files of two attempts at one step: what each says of how the run trained gives them away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zexport
from tests.support.expert_checkpoints import rewrite
from tests.support.real_cases import copied, file_of
from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError
from zexport.findings import FindingKind
from zexport.options import ExportOptions, NameLayout

_RANK1 = "*zero_pp_rank_1_mp_rank_00_optim*"
_MODEL = "zero_pp_rank_1_mp_rank_00_model*"

Change = Callable[[dict[str, Any]], object]


def _group(state: dict[str, Any], **settings: object) -> None:
    root = state["optimizer_state_dict"]
    base = root.get("base_optimizer_state") or root["optimizer_state_dict"]
    base["param_groups"][0].update(settings)


def _config(section: str, **settings: object) -> Change:
    return lambda state: state["ds_config"].setdefault(section, {}).update(settings)


@pytest.mark.parametrize(
    ("name", "pattern", "change", "said"),
    [
        *(
            pytest.param(name, _RANK1, partial(_group, **settings), said, id=next(iter(settings)))
            for name, settings, said in (
                (
                    "z2_w2_fp16",
                    {"lr": 0.1},
                    "(found 0.lr 0.004375 on rank 0 but 0.1",
                ),
                (
                    "z3_w2_bf16",
                    {"betas": (0.9, 0.999)},
                    "0.betas (0.9, 0.95) on rank 0 but (0.9, ",
                ),
                ("z1_w2_bf16opt", {"weight_decay": 0.25}, "0.weight_decay 0.0 on rank 0 but 0.25"),
            )
        ),
        pytest.param(
            "z2_w2_fp16",
            _RANK1,
            lambda s: vars(s["optimizer_state_dict"]["loss_scaler"]).update(cur_scale=512),
            "differ in the loss scaler's state (found cur_scale 256 on rank 0 but 512 on rank 1",
            id="loss scale",
        ),
        pytest.param(
            "z1_w3_bf16_elastic",
            _RANK1,
            lambda s: s["ds_config"].pop("gradient_clipping"),
            "(found gradient_clipping 1.0 on ranks 0, 2 and in mp_rank_00_model_states.pt but",
            id="configuration",
        ),
        pytest.param(
            "z2_w2_fp16",
            "mp_rank_00_model*",
            _config("optimizer", type="Lion"),
            "optimizer.type Lion in mp_rank_00_model_states.pt but AdamW on ranks 0-1",
            id="configuration of the model file",
        ),
        pytest.param(
            "z3_w2_bf16",
            _MODEL,
            lambda s: s["lr_scheduler"].update(last_batch_iteration=7),
            "differ in the scheduler's state (found last_batch_iteration",
            id="scheduler",
        ),
        pytest.param(
            "pp2_z1_w4_bf16_tied",
            "*zero_pp_rank_0_mp_rank_01_optim*",
            lambda s: s["ds_config"].update(train_batch_size=9),
            "9 on model-parallel ranks 1",
            id="a stage's configuration",
        ),
    ],
)
def test_files_of_two_attempts_at_one_step_are_refused(
    name: str, pattern: str, change: Change, said: str, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    rewrite(file_of(root, pattern), change)
    with pytest.raises(DamagedCheckpointError) as caught:
        zexport.plan_export(zexport.open_checkpoint(root), tmp_path / "out")
    assert said in str(caught.value)
    assert all(
        problem.finding is FindingKind.MIXED_SETTINGS
        for problem in zexport.open_checkpoint(root).problems
    )


def test_other_steps_skipped_are_another_attempt(tmp_path: Path) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    rewrite(file_of(root, _MODEL), lambda s: s.update(skipped_steps=1))
    (problem,) = zexport.open_checkpoint(root).problems
    assert "differ in the number of skipped steps" in problem.problem
    assert problem.finding is FindingKind.MIXED_STEPS


def test_who_knows_better_goes_on(tmp_path: Path) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    rewrite(file_of(root, _RANK1), lambda s: _group(s, lr=0.1))
    options = ExportOptions(layout=NameLayout.MEMORY, allow=frozenset({FindingKind.MIXED_SETTINGS}))
    report = zexport.consolidate(root, tmp_path / "out", options)
    assert [(one.kind, one.accepted) for one in report.findings] == [
        (FindingKind.MIXED_SETTINGS, True)
    ]


@pytest.mark.parametrize(
    ("name", "pattern", "change"),
    [
        pytest.param("z2_w2_fp16", _RANK1, _config("wandb", enabled=False), id="who logs"),
        pytest.param(
            "z3_w2_bf16",
            _RANK1,
            _config("zero_optimization", offload_optimizer={"nvme_path": "/nvme1"}),
            id="where a rank offloads to",
        ),
        pytest.param(
            "z3_w2_bf16", _MODEL, lambda s: s["lr_scheduler"].update(best=0.3), id="a rank's loss"
        ),
        pytest.param(
            "z3_w2_bf16", _MODEL, lambda s: s.update(local_rank=1, seen=[3]), id="client state"
        ),
        pytest.param(
            "z2_w2_fp16",
            _RANK1,
            lambda s: s["optimizer_state_dict"]["base_optimizer_state"].pop("param_groups"),
            id="no settings",
        ),
    ],
)
def test_what_honestly_differs_between_ranks_is_no_problem(
    name: str, pattern: str, change: Change, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    rewrite(file_of(root, pattern), change)
    assert zexport.open_checkpoint(root).problems == ()


def test_a_value_that_contains_itself_is_left_at_that() -> None:
    endless: list[object] = [1, {"lr": 2}]
    endless.append(endless)
    found = Value(Path("file"), "", {"groups": endless, "many": [0] * 9999}).plain_values()
    assert found["groups.1.lr"] == 2
    assert "many" not in found
    assert len(found) < 20
