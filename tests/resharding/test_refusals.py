"""What cannot go on elsewhere: refused in one sentence with the exit code for its kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import zexport
from tests.support.real_cases import FIXTURES, copied
from zexport import open_checkpoint
from zexport.errors import UnsafeError, UnsupportedError, UsageError, ZexportError
from zexport.options import ReshardOptions, ResumeFormat
from zexport.resharding.plan import plan_reshard


def _plan(root: Path, **options: Any) -> Any:
    chosen = ReshardOptions(**{"world_size": 3, **options})
    return plan_reshard(open_checkpoint(root), root.parent / "out", chosen)


def _edit(root: Path, pattern: str, change: Callable[[Any], None]) -> None:
    for path in root.glob(f"*/{pattern}"):
        value = torch.load(path, weights_only=False)
        change(value)
        torch.save(value, path)


@pytest.mark.parametrize(
    ("name", "options", "code", "words"),
    [
        ("z2_w2_bf16_groups", {"world_size": 0}, 2, "no number of ranks"),
        ("z2_w2_bf16_groups", {"world_size": None}, 2, "no number of ranks"),
        ("z2_w2_bf16_groups", {"stage": 0}, 2, "cannot be resharded to ZeRO-0"),
        ("z0_w2_bf16", {}, 2, "cannot be resharded to ZeRO-0"),
        ("pp2_z1_w4_bf16_tied", {"stage": 2}, 2, "to ZeRO-2 .*expected 1"),
        ("z1_w3_bf16_elastic", {}, 3, "settings of the parameter groups"),
        ("pp2_z0_w4_fp16", {"stage": 1}, 4, "the order .* a pipeline without ZeRO"),
        ("pp2_z0_w4_bf16_tied", {"stage": 1}, 4, "the order of weights"),
    ],
)
def test_what_has_no_state_for_other_ranks_is_refused(
    name: str, options: dict[str, Any], code: int, words: str
) -> None:
    with pytest.raises(ZexportError, match=words) as refused:
        _plan(FIXTURES / name / "ckpt", **options)
    assert refused.value.exit_code == code


def _no_moments(value: Any) -> None:
    value["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}


def _no_optimizer(value: Any) -> None:
    value["optimizer_state_dict"]["base_optimizer_state"] = None


def _blocks(value: Any) -> None:
    states = value["optimizer_state_dict"]["base_optimizer_state"]["state"]
    states[0]["__bnb_optimizer_quant_state__"] = {"absmax1": torch.ones(3)}


def _history(value: Any) -> None:
    value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["past"] = [torch.ones(3)]


def _depths(value: Any) -> None:
    own = value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    own["a"] = {"b": {"c": torch.tensor(2.0)}}


def _by_number(value: Any) -> None:
    own = value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    own["momenta"] = {0.9: torch.clone(own["exp_avg"])}


def _global(value: Any) -> None:
    value["optimizer_state_dict"]["base_optimizer_state"]["state"]["global"] = {"count": 3}


def _wrapped(value: Any) -> None:
    value["optimizer_state_dict"]["base_optimizer_state"]["slow_state"] = {0: torch.ones(3)}


def _odd_length(value: Any) -> None:
    value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["memory"] = torch.ones(3)


def _quantized(value: Any) -> None:
    own = value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    own["state1"] = own["exp_avg"].to(torch.uint8)


def _odd_scaler(value: Any) -> None:
    value["optimizer_state_dict"]["loss_scaler"].hook = 1


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (_no_moments, 3, "optimizer states are missing"),
        (_no_optimizer, 3, "settings of the parameter groups"),
        (_blocks, 4, "__bnb_optimizer_quant_state__.absmax1"),
        (_history, 4, r"'past\.0' is inside another"),
        (_depths, 4, r"'a\.b\.c' is inside another"),
        (_by_number, 4, r"'momenta\.0\.9' is inside another"),
        (_global, 4, "'global' is not per-parameter"),
        (_wrapped, 4, "'slow_state' is not per-parameter"),
        (_odd_length, 4, "'memory' .*do not add up"),
        (_quantized, 4, "'state1' .*floating-point dtype: uint8"),
        (_odd_scaler, 5, "loss scaler"),
    ],
)
def test_an_optimizer_whose_states_cannot_be_cut_is_refused_by_the_state(
    change: Callable[[Any], None], code: int, words: str, tmp_path: Path
) -> None:
    root = copied("z2_w2_bf16_groups", tmp_path)
    _edit(root, "*_optim_states.pt", change)
    with pytest.raises(ZexportError, match=words) as refused:
        _plan(root)
    assert refused.value.exit_code == code


def test_numbers_within_a_state_and_a_step_in_a_list_stay_as_they_are(tmp_path: Path) -> None:
    root, odd = copied("z2_w2_fp16", tmp_path), {"count": 3, 0.5: [1, {"x": 2.5}], "none": {}}

    def change(value: Any) -> None:
        for own in _inner(value)["state"].values():
            own |= {"stats": odd, "step": torch.full((1,), 4.0)}

    _edit(root, "*_optim_states.pt", change)
    zexport.reshard(root, tmp_path / "out", world_size=3)
    for path in (tmp_path / "out").glob("*/*_optim_states.pt"):
        for own in _inner(torch.load(path, weights_only=False))["state"].values():
            assert own["stats"] == odd
            assert own["step"].tolist() == [4.0]


def test_adagrad_is_refused_under_zero_3_which_does_not_load_it(tmp_path: Path) -> None:
    root = copied("z2_w2_fp16", tmp_path)
    _edit(root, "*_optim_states.pt", _of_adagrad)
    with pytest.raises(UsageError, match=r"torch's Adagrad under ZeRO-3.* Pass --stage 2"):
        _plan(root, stage=3)
    assert _plan(root, stage=1).shards


def test_what_each_rank_works_out_by_itself_is_exported_and_refused_for_other_ranks(
    tmp_path: Path,
) -> None:
    """As Prodigy does: ``d`` of what one partition holds."""
    root = copied("z2_w2_fp16", tmp_path)
    for rank in (0, 1):
        estimate = {"d": 1e-6 * (rank + 1)}
        _edit(root, f"*rank_{rank}_*", lambda v, e=estimate: _inner(v)["param_groups"][0].update(e))
    assert zexport.consolidate(root, tmp_path / "model").findings == ()
    told = "setting 'd' of parameter group 0 differs between ranks .found 2e-06, expected 1e-06"
    with pytest.raises(UnsupportedError, match=told):
        _plan(root)


def _of_adagrad(value: Any) -> None:
    for group in _inner(value)["param_groups"]:
        group["initial_accumulator_value"] = 0


def _inner(value: Any) -> Any:
    states = value["optimizer_state_dict"]
    return states.get("base_optimizer_state") or states["optimizer_state_dict"]


def _less_in_one_sub_group(value: Any) -> None:
    del _inner(value)["state"][1]["exp_avg"]


def _rounded_in_one_sub_group(value: Any) -> None:
    state = _inner(value)["state"][1]
    state["exp_avg"] = state["exp_avg"].bfloat16()


def _momentum_of_others(value: Any) -> None:
    _inner(value)["param_groups"][0]["use_muon"] = True
    _inner(value)["state"][0] = {"momentum_buffer": torch.ones(3)}


def _cut_once_more(value: Any) -> None:
    states = value["optimizer_state_dict"]
    states["fp32_flat_groups"] = list(states["fp32_flat_groups"][0].detach().split(400))


def _ghost(value: Any) -> None:
    value["module"]["ghost"] = torch.empty(0)


def _deep(value: Any) -> None:
    nested: list[Any] = [torch.ones(1)]
    for _ in range(200):
        nested = [nested]
    value["seen"] = nested


def _no_groups(value: Any) -> None:
    del value["optimizer"]["optimizer_state_dict"]["param_groups"]


def _no_masters(value: Any) -> None:
    del value["optimizer"]["fp32_groups"]


def _short_state(value: Any) -> None:
    value["optimizer"]["optimizer_state_dict"]["state"][0]["exp_avg"] = torch.ones(3)


def _steps_apart(value: Any) -> None:
    for number, state in value["optimizer"]["optimizer_state_dict"]["state"].items():
        state["step"] = number


def _number_within(value: Any) -> None:
    value["optimizer"]["optimizer_state_dict"]["state"][0]["past"] = {"x": torch.tensor(2.0)}


def _later_in_one_sub_group(value: Any) -> None:
    _inner(value)["state"][1]["step"] += 1


def _decayed(value: Any) -> None:
    for state in _inner(value)["state"].values():
        state["mu_product"] = torch.tensor(0.5, dtype=torch.bfloat16)


def _decayed_less(value: Any) -> None:
    _inner(value)["state"][0]["mu_product"] = 0.25


def _nothing_kept(value: Any) -> None:
    value["optimizer"]["state"] = {}


_MODEL, _OPTIMIZER = "*_model_states.pt", "*_optim_states.pt"


@pytest.mark.parametrize(
    ("name", "pattern", "change", "code", "words"),
    [
        ("z3_w2_bf16_sub1000", _OPTIMIZER, _less_in_one_sub_group, 4, "'exp_avg' .* differs"),
        ("z3_w2_bf16_sub1000", _OPTIMIZER, _rounded_in_one_sub_group, 4, "from those of its"),
        (
            "z3_w2_bf16_sub1000",
            _OPTIMIZER,
            _later_in_one_sub_group,
            4,
            "'step' .*differs",
        ),
        ("z3_w2_bf16_sub1000", "*rank_1_*optim*", _later_in_one_sub_group, 4, "'step' .*differs"),
        (
            "z2_w2_bf16_groups",
            "*rank_1_*",
            _later_in_one_sub_group,
            4,
            "'step' .*differs",
        ),
        ("z2_w2_bf16_groups", "*rank_1_*", _decayed_less, 4, "'mu_product' .*differs"),
        ("z2_w2_bf16_groups", "*rank_1_*", _decayed, 4, "'mu_product' .*differs"),
        ("z2_w2_bf16_groups", _OPTIMIZER, _momentum_of_others, 3, "does not fit the parameters"),
        ("z2_w2_bf16_groups", "*rank_1_*", _no_moments, 4, "'exp_avg' .*differs"),
        ("moe_z2_w4_ep2", "*rank_3_*", _less_in_one_sub_group, 4, "'exp_avg' .*differs"),
        ("z3_w2_bf16", _OPTIMIZER, _cut_once_more, 3, "parameter groups of model states"),
        ("z3_w2_bf16", _MODEL, _ghost, 3, "no values of 'ghost'"),
        ("z3_w2_bf16", _MODEL, _deep, 5, "nested|made by code"),
        ("z0_w2_bf16_groups", _MODEL, _no_groups, 3, "no key 'param_groups'"),
        ("z0_w2_bf16_groups", _MODEL, _no_masters, 3, "fp32 master weights"),
        ("z0_w2_bf16_groups", _MODEL, _short_state, 4, "'exp_avg' is not per weight"),
        ("z0_w2_bf16_groups", _MODEL, _steps_apart, 4, "'step' is not per weight"),
        ("z0_w2_bf16_groups", _MODEL, _number_within, 4, r"'past\.x' is not per weight"),
        ("z0_w1_fp32_odd", _MODEL, _nothing_kept, 4, "match no weight"),
    ],
)
def test_files_that_do_not_hold_the_whole_state_are_refused(
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


def test_a_norm_that_every_step_measures_may_differ_between_ranks(tmp_path: Path) -> None:
    """Adafactor's."""
    root = copied("z2_w2_bf16_groups", tmp_path)
    for rank in range(2):

        def add(value: Any, own: int = rank) -> None:
            for state in _inner(value)["state"].values():
                state["RMS"] = torch.tensor(0.5 + own)

        _edit(root, f"*rank_{rank}_*", add)
    assert _plan(root).shards


def test_a_universal_checkpoint_of_other_groups_or_shapes_is_refused(tmp_path: Path) -> None:
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


def test_states_in_swap_files_are_not_read(tmp_path: Path) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    next(root.glob("global_step*")).joinpath("offloaded_tensors").mkdir()
    with pytest.raises(ZexportError, match="NVMe swap files") as refused:
        _plan(root)
    assert refused.value.exit_code == 4


class _Foreign:
    """What a client may have put into its state."""

    def __init__(self) -> None:
        self.place = 3


def test_client_state_that_code_makes_is_refused_by_name_or_left_out(tmp_path: Path) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    _edit(root, "*_model_states.pt", lambda value: value.update(sampler=_Foreign(), seen=[1]))
    with pytest.raises(UnsafeError, match=r"'sampler'.*--drop-client-state"):
        _plan(root)
    negated = torch.tensor([1 + 2j]).conj().imag
    _edit(root, "*_model_states.pt", lambda value: value.update(sampler=negated, none=b""))
    with pytest.raises(UnsafeError, match=r"'sampler'.*of negated values"):
        _plan(root)
    plan = _plan(root, drop_client_state=True)
    assert "client state sampler" in " ".join(plan.warnings)
    assert plan.provenance["dropped"] == ["sampler"]
    _edit(root, "*_optim_states.pt", lambda value: value.update(note=_Foreign()))
    with pytest.raises(UnsafeError, match=r"'sampler'|'note'"):
        _plan(root)
    assert _plan(root, drop_client_state=True).provenance["dropped"] == ["sampler", "note"]


def test_two_stages_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}}), encoding="utf-8")
    with pytest.raises(UsageError, match="different stages"):
        _plan(FIXTURES / "z2_w2_bf16_groups" / "ckpt", stage=2, ds_config=config)
    config.write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="was given with --ds-config"):
        _plan(FIXTURES / "z2_w2_bf16_groups" / "ckpt", ds_config=config)


@pytest.mark.parametrize("form", ResumeFormat)
@pytest.mark.parametrize("key", ["module", "lr_scheduler"])
def test_what_code_makes_elsewhere_is_refused_by_its_file_and_key(
    key: str, form: ResumeFormat, tmp_path: Path
) -> None:
    """As older TransformerEngine's extra state of a module is; there is nothing to leave out."""
    root = copied("z3_w2_bf16", tmp_path)

    def change(value: Any) -> None:
        value[key] = {**(value[key] or {}), "head._extra_state": {"x": BytesIO(b"abc")}}
        value["sampler"] = _Foreign()

    _edit(root, "*_model_states.pt", change)
    with pytest.raises(UnsafeError, match=f"model_states.pt: .* in '{key}' .*BytesIO"):
        _plan(root, drop_client_state=True, format=form)
