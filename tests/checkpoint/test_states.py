"""The two dictionaries of a checkpoint, read as typed records from what torch wrote."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Run, edit, save, small_model
from zexport.checkpoint.model_states import ModelStates, read_model_states
from zexport.checkpoint.optimizer_states import OptimizerStates, read_optimizer_states
from zexport.errors import DamagedCheckpointError, UnsafeError, ZexportError
from zexport.formats.torch_file import read_torch_file

_MODEL_FILE = "global_step2/mp_rank_00_model_states.pt"
_OPTIMIZER_FILE = "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"

Change = Callable[[dict[str, Any]], object]


def _model_states(root: Path, change: Change = bool) -> ModelStates:
    edit(root / _MODEL_FILE, change)
    return read_model_states(read_torch_file(root / _MODEL_FILE))


def _optimizer_states(root: Path, change: Change = bool) -> OptimizerStates:
    edit(root / _OPTIMIZER_FILE, change)
    return read_optimizer_states(read_torch_file(root / _OPTIMIZER_FILE))


def test_model_states_say_what_was_saved(zero2: Path) -> None:
    states = _model_states(zero2)
    assert states.param_shapes[0] == {"emb.weight": (13, 7), "lin.weight": (5, 7)}
    assert states.param_shapes[1] == {"lin.bias": (5,), "scale": ()}
    assert states.frozen_shapes == {"norm.weight": (7,), "norm.bias": (7,)}
    assert states.buffer_names == ("mask", "big", "table", "mean")
    assert states.shared_params == {"head.weight": "emb.weight"}
    assert (states.global_steps, states.ds_version) == (2, "0.19.8")
    assert not states.has_experts


def test_optimizer_states_say_what_was_saved(zero2: Path) -> None:
    states = _optimizer_states(zero2)
    assert (states.stage, states.partition_counts) == (2, (2, 2))
    assert [group.numel for group in states.flat_groups] == [62, 2]


def test_absent_keys_of_old_versions_are_empty(zero2: Path) -> None:
    def strip(state: dict[str, Any]) -> None:
        for key in ("shared_params", "frozen_param_shapes", "frozen_param_fragments", "ds_version"):
            del state[key]

    states = _model_states(zero2, strip)
    assert (states.shared_params, states.frozen_shapes, states.ds_version) == ({}, {}, None)


def test_a_clients_own_state_beside_deepspeeds_is_ignored(zero2: Path) -> None:
    client = {"epoch": 3, "args": io.BytesIO(b"anything"), "num_experts_seen": 2}
    assert _model_states(zero2, lambda state: state.update(client)).global_steps == 2


def test_extra_state_of_a_module_is_no_tensor(zero2: Path) -> None:
    extra = {"attn._extra_state": io.BytesIO(b"anything"), "mlp._extra_state": None}
    states = _model_states(zero2, lambda state: state["module"].update(extra))
    assert not extra.keys() & states.module.keys()


def test_the_step_is_found_where_fused_adam_keeps_it(zero2: Path) -> None:
    def move(state: dict[str, Any]) -> None:
        base = state["optimizer_state_dict"]["base_optimizer_state"]
        for entry in base["state"].values():
            del entry["step"]
        base["param_groups"][0]["step"] = 7

    assert _optimizer_states(zero2, move).step == 7


def test_the_step_is_found_where_an_elastic_checkpoint_keeps_it(zero2: Path) -> None:
    def move(state: dict[str, Any]) -> None:
        state["optimizer_state_dict"]["base_optimizer_state"] = [{"exp_avg": None}, {"step": 7}]

    assert _optimizer_states(zero2, move).step == 7


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda s: s.update(module=torch.Size([1])), DamagedCheckpointError, "not a dictionary"),
        (lambda s: s.update(param_shapes={}), DamagedCheckpointError, "is not a list"),
        (lambda s: s["param_shapes"][0].update(x=[-1]), DamagedCheckpointError, "is not a shape"),
        (lambda s: s["param_shapes"][0].update(x=[1] * 65), DamagedCheckpointError, "not a shape"),
        (
            lambda s: s["param_shapes"][0].update(x=[2**62, 2]),
            DamagedCheckpointError,
            "a tensor can",
        ),
        (lambda s: s["param_shapes"][0].update(x=[True]), DamagedCheckpointError, "whole number"),
        (lambda s: s["param_shapes"][0].update(x=[2.0]), DamagedCheckpointError, "whole number"),
        (lambda s: s["param_shapes"][0].update(x="12"), DamagedCheckpointError, "is not a shape"),
        (lambda s: s["param_shapes"][0].update(x=[1.5]), DamagedCheckpointError, "whole number"),
        (lambda s: s["param_shapes"][0].update({3: [1]}), DamagedCheckpointError, "no name"),
        (lambda s: s.update(buffer_names=[3]), DamagedCheckpointError, "is not text"),
        (lambda s: s["module"].update(w=io.BytesIO()), UnsafeError, "hides its value"),
        (lambda s: s.update(shared_params={"a": io.BytesIO()}), UnsafeError, "hides its value"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_place(
    change: Change, kind: type[ZexportError], words: str, zero2: Path
) -> None:
    with pytest.raises(kind, match=words) as caught:
        _model_states(zero2, change)
    assert caught.value.path == zero2 / _MODEL_FILE
    assert caught.value.hint


@pytest.mark.parametrize(
    "key", ["partition_count", "single_partition_of_fp32_groups", "optimizer_state_dict"]
)
def test_a_key_that_is_needed_and_not_there_is_named(key: str, zero2: Path) -> None:
    def strip(state: dict[str, Any]) -> None:
        state.pop(key, None)
        state.get("optimizer_state_dict", {}).pop(key, None)

    with pytest.raises(DamagedCheckpointError, match=key):
        _optimizer_states(zero2, strip)


def test_a_model_file_where_an_optimizer_file_should_be_is_refused(zero2: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="lacks the key 'optimizer_state_dict'"):
        read_optimizer_states(read_torch_file(zero2 / _MODEL_FILE))


def test_bf16_optimizer_is_known_by_having_no_stage(tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=1, bf16_optimizer=True), tmp_path / "ckpt")
    assert _optimizer_states(root).stage is None


def test_every_state_of_the_optimizer_is_known_by_its_group(zero2: Path) -> None:
    first, second = _optimizer_states(zero2).group_states
    assert first.tensors.keys() == second.tensors.keys() == {"exp_avg", "exp_avg_sq"}
    assert [state.tensors["exp_avg"].numel for state in (first, second)] == [62, 2]
    assert first.scalars.keys() == {"step"}


@pytest.mark.parametrize(
    ("base", "tensors", "scalars", "settings"),
    [
        ({"state": {}, "param_groups": [{"lr": 1.0, "params": [0]}]}, set(), set(), {"lr": 1.0}),
        (
            {"state": {0: {"sum": torch.zeros(3)}}, "param_groups": [{"step": 7, "params": [0]}]},
            {"sum"},
            set(),
            {"step": 7},
        ),
        (
            [{"exp_avg": torch.zeros(3), "step": torch.tensor(7.0), "RMS": 0.5}],
            {"exp_avg"},
            {"step", "RMS"},
            {},
        ),
        (
            {
                "state": {
                    0: {"quant": {"state1": torch.zeros(3, dtype=torch.uint8), "blocks": 256}}
                },
                "param_groups": [{"use_muon": True, "params": [0]}],
            },
            {"quant.state1"},
            set(),
            {"use_muon": True},
        ),
        (None, set(), set(), {}),
        ({"state": [], "param_groups": 3}, set(), set(), {}),
    ],
    ids=["no state", "a step per group", "elastic", "8-bit", "none", "something else"],
)
def test_the_states_of_any_optimizer_are_known(
    base: object, tensors: set[str], scalars: set[str], settings: object, zero2: Path
) -> None:
    def change(state: dict[str, Any]) -> None:
        state["optimizer_state_dict"]["base_optimizer_state"] = base

    first = _optimizer_states(zero2, change).group_states[0]
    assert (first.tensors.keys(), first.scalars.keys()) == (tensors, scalars)
    assert first.settings == settings
    assert [*first.within] == [name for name in tensors if "." in name]
