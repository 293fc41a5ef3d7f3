"""Names, roles and ties of the tensors in rank files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Model, Run, edit, model_file, save, small_model, values
from tests.support.real_cases import facts_of
from zexport import DamagedCheckpointError, Role, TrainingState, consolidate, open_checkpoint

_STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def _opened(model: Model, run: Run, root: Path) -> TrainingState:
    return _changed(root, run, lambda _: None, model)


def _changed(
    root: Path, run: Run, change: Callable[[dict[str, Any]], object], model: Model | None = None
) -> TrainingState:
    """A checkpoint whose model states of rank 0 were changed."""
    save(model or small_model(), run, root)
    edit(model_file(root / "global_step2", run, 0), change)
    checkpoint = open_checkpoint(root)
    assert checkpoint.problems == ()
    return checkpoint


@_STAGES
def test_every_tensor_has_its_role(stage: int, tmp_path: Path) -> None:
    model = small_model()
    checkpoint = _opened(model, Run(stage=stage, world_size=5), tmp_path)
    named = {tensor.name: tensor for tensor in checkpoint.tensors}
    assert len(named) == len(checkpoint.tensors)
    for role, stored in (
        (Role.TRAINABLE, model.trained),
        (Role.FROZEN, model.frozen),
        (Role.BUFFER, model.buffers),
    ):
        assert {n: t.shape for n, t in named.items() if t.role is role} == {
            name: tuple(value.shape) for name, value in stored.items()
        }
    dtypes = [named[name].dtype.torch_name for name in ("emb.weight", "norm.weight")]
    assert dtypes == ["float32", "bfloat16"]
    assert checkpoint.aliases == {"head.weight": "emb.weight"}
    assert checkpoint.left_out == ()


@_STAGES
def test_tied_frozen_weight_is_stored_once(stage: int, tmp_path: Path) -> None:
    model = replace(small_model(), tied={"copy.weight": "norm.weight", "third": "copy.weight"})
    checkpoint = _opened(model, Run(stage=stage), tmp_path)
    assert checkpoint.aliases == {"copy.weight": "norm.weight", "third": "norm.weight"}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("lost", [None, {}], ids=["no such key", "an empty one"])
def test_unrecorded_ties_are_found_by_shared_storage(
    stage: int, lost: object, tmp_path: Path
) -> None:
    """Old files lack ``shared_params``; a tied weight must not become its 16-bit copy."""
    tied = {"head.weight": "emb.weight", "copy.weight": "norm.weight"}
    model = replace(small_model(), tied=tied)

    def forget(state: dict[str, Any]) -> None:
        del state["shared_params"]
        state |= {} if lost is None else {"shared_params": lost}

    checkpoint = _changed(tmp_path, Run(stage=stage), forget, model)
    assert checkpoint.aliases == tied
    assert len(checkpoint.tensors) == len(model.tensors)


@pytest.mark.parametrize("stage", [1, 2])
def test_tied_weight_is_compared_if_it_is_stored_twice(stage: int, tmp_path: Path) -> None:
    root, name = tmp_path / "run", "head.weight"
    checkpoint = _changed(root, Run(stage=stage), lambda state: state["module"].pop(name))
    assert checkpoint.aliases == {name: "emb.weight"}
    weight = values((13, 7), 2, torch.bfloat16)
    for other, words in ((weight, name), (weight.long(), "not a rounded copy")):
        (path,) = root.glob("*/*model_states.pt")
        edit(path, lambda state, other=other: state["module"].update({name: other}))  # type: ignore[misc]
        with pytest.raises(DamagedCheckpointError, match=words):
            consolidate(root, tmp_path / "out")


@_STAGES
def test_empty_weights_are_kept(stage: int, tmp_path: Path) -> None:
    def empty(name: str) -> dict[str, torch.Tensor]:
        return {name: torch.empty(0), f"{name}.wide": torch.empty(0, 4)}

    model = small_model()
    frozen, buffers = {**model.frozen, **empty("f")}, {**model.buffers, **empty("b")}
    groups = [*model.groups, empty("t")]
    model = replace(model, groups=groups, frozen=frozen, buffers=buffers)
    checkpoint = _opened(model, Run(stage=stage, world_size=3), tmp_path)
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    assert all((shapes[name], shapes[f"{name}.wide"]) == ((0,), (0, 4)) for name in "tfb")
    assert checkpoint.left_out == ()


@pytest.mark.parametrize("stage", [1, 2])
def test_unlisted_empty_weights_are_trainable(stage: int, tmp_path: Path) -> None:
    """DeepSpeed 0.19 has them in no group, and records that they are tied to each other."""

    def add(state: dict[str, Any]) -> None:
        state["module"]["none"] = torch.empty(0, dtype=torch.bfloat16)
        state["module"]["wide"] = torch.empty(3, 0, dtype=torch.bfloat16)

    run = Run(stage=stage, client_state={"shared_params": {"wide": "none"}})
    checkpoint = _changed(tmp_path, run, add)
    assert "wide" not in checkpoint.aliases
    roles = {tensor.name: tensor.role for tensor in checkpoint.tensors}
    for name, shape in (("none", (0,)), ("wide", (3, 0))):
        assert roles[name] is Role.TRAINABLE
        assert facts_of(checkpoint)[name] == (torch.float32, shape, b"")


@pytest.mark.parametrize("owners", [1, 2])
def test_placeholder_with_the_storage_of_one_parameter_is_tied_to_it(
    owners: int, tmp_path: Path
) -> None:
    """DeepSpeed does not record the second name of a module that has two within one parent."""

    def name_again(state: dict[str, Any]) -> None:
        shared = torch.empty(0, dtype=torch.bfloat16)
        names = [*state["param_shapes"][0]][:owners]
        state["module"] |= dict.fromkeys([*names, "again.weight"], shared)

    checkpoint = _changed(tmp_path, Run(stage=3), name_again)
    first = next(iter(small_model().groups[0]))
    assert checkpoint.aliases.get("again.weight") == (first if owners == 1 else None)
    assert checkpoint.left_out == (() if owners == 1 else ("again.weight",))


def test_missing_buffer_is_left_out(tmp_path: Path) -> None:
    checkpoint = _changed(tmp_path, Run(stage=2), lambda state: state["module"].pop("mask"))
    assert checkpoint.left_out == ("mask",)


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_base_weight_is_left_out(stage: int, tmp_path: Path) -> None:
    """``base_weight_sharding``: DeepSpeed saves only rank 0's shard, which is no whole weight."""
    factors = {"lora_weight_1.weight": (2, 4), "lora_weight_2.weight": (6, 2)}
    names = [(module, name) for module in ("shard", "whole") for name in factors]
    group = {f"{module}.{name}": values(factors[name], 1) for module, name in names}
    frozen = {"shard.weight": values((12,), 2), "whole.weight": values((6, 4), 3)}
    checkpoint = _opened(Model([group], frozen, dtype=torch.float32), Run(stage=stage), tmp_path)
    assert checkpoint.left_out == ("shard.weight",)
    assert {tensor.name for tensor in checkpoint.tensors} == {*group, "whole.weight"}
