"""What cannot go on elsewhere: refused in one sentence with the exit code for its kind."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import zexport
from tests.support.real_cases import FIXTURES, copied
from zexport import (
    ReshardOptions,
    ResumeFormat,
    UnsafeError,
    UnsupportedError,
    UsageError,
    ZexportError,
    open_checkpoint,
)


def _plan(root: Path, **options: Any) -> Any:
    chosen = ReshardOptions(**{"world_size": 3, **options})
    return zexport.plan_reshard(open_checkpoint(root), root.parent / "out", chosen)


def _edit(root: Path, pattern: str, change: Callable[[Any], None]) -> None:
    for path in root.glob(f"*/{pattern}"):
        value = torch.load(path, weights_only=False)
        change(value)
        torch.save(value, path)


@pytest.mark.parametrize(
    ("name", "options", "code", "words"),
    [
        ("z2_w2_bf16_groups", {"world_size": 0}, 2, "not a number of ranks"),
        ("z2_w2_bf16_groups", {"world_size": None}, 2, "not a number of ranks"),
        ("z2_w2_bf16_groups", {"stage": 0}, 2, "cannot be resharded to ZeRO-0"),
        ("z0_w2_bf16", {}, 2, "cannot be resharded to ZeRO-0"),
        ("pp2_z1_w4_bf16_tied", {"stage": 2}, 2, "to ZeRO-2 .*expected 1"),
        ("z1_w3_bf16_elastic", {}, 3, "settings of the parameter groups"),
        ("pp2_z0_w4_fp16", {"stage": 1}, 4, "the order .* a pipeline without ZeRO"),
        ("moe_z2_w4_ep2", {}, 2, "expert-parallel size"),
        ("autoep_z2_w2_ep2_frozen", {"world_size": 4, "stage": 3}, 2, "frozen weights next to"),
        ("moe_z2_w4_ep2", {"world_size": 2, "stage": 3}, 2, "to ZeRO-3 .*expected 1 or 2"),
        ("stages_moe_z1_w4_ep2", {"world_size": 2, "stage": 2}, 2, "to ZeRO-2 .*expected 1"),
    ],
)
def test_impossible_target_is_rejected(
    name: str, options: dict[str, Any], code: int, words: str
) -> None:
    with pytest.raises(ZexportError, match=words) as refused:
        _plan(FIXTURES / name / "ckpt", **options)
    assert refused.value.exit_code == code


def _inner(value: Any) -> Any:
    states = value["optimizer_state_dict"]
    return states.get("base_optimizer_state") or states["optimizer_state_dict"]


def _put(*keys: object, **values: object) -> Callable[[Any], None]:
    """Change entries of the dictionary that the keys lead to in the optimizer's own state."""

    def change(value: Any) -> None:
        at = _inner(value)
        for key in keys:
            at = at[key]
        at.update(values)

    return change


def _narrowed(dtype: torch.dtype, slot: str, number: int) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        state = _inner(value)["state"][number]
        state[slot] = state["exp_avg"].to(dtype)

    return change


_FIRST = ("state", 0)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (_put(state={}), 3, "optimizer states are missing"),
        (
            _put(*_FIRST, __bnb_optimizer_quant_state__={"absmax1": torch.ones(3)}),
            4,
            "__bnb_optimizer_quant_state__.absmax1",
        ),
        (_put(*_FIRST, past=[torch.ones(3)]), 4, r"'past\.0' is inside another"),
        (_put("state", **{"global": {"count": 3}}), 4, "'global' is not per-parameter"),
        (_put(slow_state={0: torch.ones(3)}), 4, "'slow_state' is not per-parameter"),
        (_put(*_FIRST, memory=torch.ones(3)), 4, "'memory' .*do not add up"),
        (_narrowed(torch.uint8, "state1", 0), 4, "'state1' .*floating-point dtype: uint8"),
    ],
)
def test_state_that_is_not_per_element_is_rejected(
    change: Callable[[Any], None], code: int, words: str, tmp_path: Path
) -> None:
    root = copied("z2_w2_bf16_groups", tmp_path)
    _edit(root, "*_optim_states.pt", change)
    with pytest.raises(ZexportError, match=words) as refused:
        _plan(root)
    assert refused.value.exit_code == code


def test_adagrad_is_rejected_under_zero_3(tmp_path: Path) -> None:
    root = copied("z2_w2_fp16", tmp_path)
    adagrad = {"initial_accumulator_value": 0}
    _edit(root, "*_optim_states.pt", _put("param_groups", 0, **adagrad))
    with pytest.raises(UsageError, match=r"torch's Adagrad under ZeRO-3.* Pass --stage 2"):
        _plan(root, stage=3)
    assert _plan(root, stage=1).shards


def test_setting_that_differs_between_ranks_is_rejected(
    tmp_path: Path,
) -> None:
    """As Prodigy does: ``d`` of what one partition holds."""
    root = copied("z2_w2_fp16", tmp_path)
    for rank in (0, 1):
        _edit(root, f"*rank_{rank}_*", _put("param_groups", 0, d=1e-6 * (rank + 1)))
    assert zexport.consolidate(root, tmp_path / "model").findings == ()
    told = "setting 'd' of parameter group 0 differs between ranks .found 2e-06, expected 1e-06"
    with pytest.raises(UnsupportedError, match=told):
        _plan(root)


_MODEL, _OPTIMIZER = "*_model_states.pt", "*_optim_states.pt"


def _less(value: Any) -> None:
    del _inner(value)["state"][1]["exp_avg"]


def _later(value: Any) -> None:
    _inner(value)["state"][1]["step"] += 1


def _cut_once_more(value: Any) -> None:
    states = value["optimizer_state_dict"]
    states["fp32_flat_groups"] = list(states["fp32_flat_groups"][0].detach().split(400))


def _zero0(**values: object) -> Callable[[Any], None]:
    """Change the first weight's optimizer state of a checkpoint without ZeRO."""

    def change(value: Any) -> None:
        value["optimizer"]["optimizer_state_dict"]["state"][0].update(values)

    return change


_MODEL, _OPTIMIZER, _RANK_1 = "*_model_states.pt", "*_optim_states.pt", "*rank_1_*optim*"
_SUB, _GROUPS, _ZERO0 = "z3_w2_bf16_sub1000", "z2_w2_bf16_groups", "z0_w2_bf16_groups"


@pytest.mark.parametrize(
    ("name", "pattern", "change", "code", "words"),
    [
        (_SUB, _OPTIMIZER, _less, 4, "'exp_avg' .* differs"),
        (_SUB, _OPTIMIZER, _narrowed(torch.bfloat16, "exp_avg", 1), 4, "from those of its"),
        (_SUB, _OPTIMIZER, _later, 4, "'step' .*differs"),
        (_SUB, _RANK_1, _later, 4, "'step' .*differs"),
        (_GROUPS, _RANK_1, _later, 4, "'step' .*differs"),
        (_GROUPS, _RANK_1, _put(*_FIRST, mu_product=0.25), 4, "'mu_product' .*differs"),
        (_GROUPS, _RANK_1, _put(state={}), 4, "'exp_avg' .*differs"),
        ("moe_z2_w4_ep2", "*rank_3_*", _less, 4, "'exp_avg' .*differs"),
        ("z3_w2_bf16", _OPTIMIZER, _cut_once_more, 3, "parameter groups of model states"),
        (
            "z3_w2_bf16",
            _MODEL,
            lambda v: v["module"].update(ghost=torch.empty(0)),
            3,
            "no values of 'ghost'",
        ),
        (_ZERO0, _MODEL, lambda v: v["optimizer"].pop("fp32_groups"), 3, "fp32 master weights"),
        (_ZERO0, _MODEL, _zero0(exp_avg=torch.ones(3)), 4, "'exp_avg' is not per weight"),
        (_ZERO0, _MODEL, _zero0(step=7), 4, "'step' is not per weight"),
        (_ZERO0, _MODEL, _zero0(past={"x": torch.tensor(2.0)}), 4, r"'past\.x' is not per weight"),
        ("z0_w1_fp32_odd", _MODEL, lambda v: v["optimizer"].update(state={}), 4, "match no weight"),
    ],
)
def test_incomplete_or_different_states_are_rejected(
    name: str,
    pattern: str,
    change: Callable[[Any], None],
    code: int,
    words: str,
    tmp_path: Path,
) -> None:
    root = copied(name, tmp_path)
    _edit(root, pattern, change)
    with pytest.raises(ZexportError, match=words) as refused:
        _plan(root, stage=2, world_size=2)
    assert refused.value.exit_code == code


def test_universal_checkpoint_with_other_groups_or_shapes_is_rejected(tmp_path: Path) -> None:
    root = copied("uni_z2_w2_bf16_odd", tmp_path)
    (folder,) = root.glob("*/zero")
    path = folder / "optimizer_state.pt"
    saved = torch.load(path, weights_only=False)
    torch.save(saved | {"param_groups": [{**saved["param_groups"][0], "params": [5]}]}, path)
    with pytest.raises(ZexportError, match="differ from param_shapes"):
        _plan(root)
    torch.save(saved, path)
    state = next(folder.glob("*/exp_avg.pt"))
    torch.save({"param": torch.ones(2, 3, 4)}, state)
    with pytest.raises(ZexportError, match=r"exp_avg.* has another shape"):
        _plan(root)


def test_nvme_swap_files_are_rejected(tmp_path: Path) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    next(root.glob("global_step*")).joinpath("offloaded_tensors").mkdir()
    with pytest.raises(ZexportError, match="NVMe swap files") as refused:
        _plan(root)
    assert refused.value.exit_code == 4


class _Foreign:
    """What a client may have put into its state."""

    def __init__(self) -> None:
        self.place = 3


def test_unsafe_client_state_is_rejected_or_dropped(tmp_path: Path) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    _edit(root, "*_model_states.pt", lambda value: value.update(sampler=_Foreign(), seen=[1]))
    with pytest.raises(UnsafeError, match=r"'sampler'.*--drop-client-state"):
        _plan(root)
    negated = torch.tensor([1 + 2j]).conj().imag
    _edit(root, "*_model_states.pt", lambda value: value.update(sampler=negated, none=b""))
    with pytest.raises(UnsafeError, match=r"'sampler'.*negative view"):
        _plan(root)
    plan = _plan(root, drop_client_state=True)
    assert "client state sampler" in " ".join(plan.warnings)
    assert plan.provenance["dropped"] == ["sampler"]
    _edit(root, "*_optim_states.pt", lambda value: value.update(note=_Foreign()))
    with pytest.raises(UnsafeError, match=r"'sampler'|'note'"):
        _plan(root)
    assert _plan(root, drop_client_state=True).provenance["dropped"] == ["sampler", "note"]


@pytest.mark.parametrize("form", ResumeFormat)
@pytest.mark.parametrize("key", ["module", "lr_scheduler"])
def test_unsafe_value_outside_client_state_is_rejected(
    key: str, form: ResumeFormat, tmp_path: Path
) -> None:
    """As older TransformerEngine's extra state of a module is; there is nothing to leave out."""
    root = copied("z3_w2_bf16", tmp_path)

    def change(value: Any) -> None:
        value[key] = {**(value[key] or {}), "head._extra_state": {"x": BytesIO(b"abc")}}
        value["sampler"] = _Foreign()

    _edit(root, "*_model_states.pt", change)
    with pytest.raises(UnsafeError, match=r"global_step.*BytesIO"):
        _plan(root, drop_client_state=True, format=form)
