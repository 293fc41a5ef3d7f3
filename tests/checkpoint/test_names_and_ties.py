"""Whole tensors out of rank files: every name once, with its role, its ties, what is nowhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Model, Run, edit, model_file, save, small_model
from tests.support.sharded_runs import Job, Spec, run_jobs, run_ranks
from zexport import DamagedCheckpointError, Role, TrainingState, open_checkpoint
from zexport.checkpoint.state import raise_problems
from zexport.ranges.dtypes import DType

_STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def _opened(model: Model, run: Run, root: Path) -> TrainingState:
    checkpoint = open_checkpoint(save(model, run, root))
    raise_problems(checkpoint)
    return checkpoint


def _changed(root: Path, run: Run, change: Callable[[dict[str, Any]], object]) -> TrainingState:
    save(small_model(), run, root)
    edit(model_file(root / "global_step2", run, 0), change)
    return open_checkpoint(root)


@_STAGES
def test_every_tensor_is_there_once_with_its_role(stage: int, tmp_path: Path) -> None:
    model = small_model()
    checkpoint = _opened(model, Run(stage=stage), tmp_path)
    named = {tensor.name: tensor for tensor in checkpoint.tensors}
    assert len(named) == len(checkpoint.tensors)
    for role, stored in (
        (Role.TRAINABLE, model.masters),
        (Role.FROZEN, model.frozen),
        (Role.BUFFER, model.buffers),
    ):
        assert {n: t.shape for n, t in named.items() if t.role is role} == {
            name: tuple(value.shape) for name, value in stored.items()
        }
    assert named["emb.weight"].dtype is DType.F32
    assert named["norm.weight"].dtype is DType.BF16
    assert checkpoint.aliases == {"head.weight": "emb.weight"}
    assert checkpoint.left_out == ()


@_STAGES
def test_a_tied_frozen_weight_is_stored_once(stage: int, tmp_path: Path) -> None:
    model = replace(small_model(), tied={"copy.weight": "norm.weight", "third": "copy.weight"})
    checkpoint = _opened(model, Run(stage=stage), tmp_path)
    assert checkpoint.aliases == {"copy.weight": "norm.weight", "third": "norm.weight"}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("lost", [None, {}], ids=["no such key", "an empty one"])
def test_ties_that_nothing_records_show_in_the_modules_views(
    stage: int, lost: object, tmp_path: Path
) -> None:
    """Old files lack ``shared_params``; a tied weight must not become its 16-bit copy."""
    tied = {"head.weight": "emb.weight", "copy.weight": "norm.weight"}
    model, run = replace(small_model(), tied=tied), Run(stage=stage)
    root = save(model, run, tmp_path)

    def forget(state: dict[str, Any]) -> None:
        del state["shared_params"]
        state |= {} if lost is None else {"shared_params": lost}

    edit(model_file(root / "global_step2", run, 0), forget)
    checkpoint = open_checkpoint(root)
    raise_problems(checkpoint)
    assert checkpoint.aliases == tied
    assert len(checkpoint.tensors) == len(model.tensors)


@_STAGES
@pytest.mark.parametrize("kind", ["groups", "frozen", "buffers"])
def test_weights_without_an_element_are_there_too(stage: int, kind: str, tmp_path: Path) -> None:
    model = small_model()
    empty = {"none": torch.empty(0), "wide": torch.empty(0, 4)}
    if kind == "groups":
        model = replace(model, groups=[*model.groups, empty])
    elif kind == "frozen":
        model = replace(model, frozen={**model.frozen, **empty})
    else:
        model = replace(model, buffers={**model.buffers, **empty})
    checkpoint = _opened(model, Run(stage=stage, world_size=3), tmp_path)
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    assert (shapes["none"], shapes["wide"]) == ((0,), (0, 4))
    assert checkpoint.left_out == ()


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_without_an_element_that_no_table_names_are_there_and_trained(
    stage: int, tmp_path: Path
) -> None:
    """DeepSpeed 0.19 holds them in no group, and says that they are tied to one another."""
    run = Run(stage=stage, client_state={"shared_params": {"wide": "none"}})
    root = save(small_model(), run, tmp_path)

    def add(state: dict[str, Any]) -> None:
        state["module"]["none"] = torch.empty(0, dtype=torch.bfloat16)
        state["module"]["wide"] = torch.empty(3, 0, dtype=torch.bfloat16)

    edit(model_file(root / "global_step2", run, 0), add)
    checkpoint = open_checkpoint(root)
    raise_problems(checkpoint)
    assert "wide" not in checkpoint.aliases
    named = {tensor.name: tensor for tensor in checkpoint.tensors}
    assert (named["none"].shape, named["wide"].shape) == ((0,), (3, 0))
    assert {(named[name].role, named[name].dtype) for name in ("none", "wide")} == {
        (Role.TRAINABLE, DType.F32)
    }


@pytest.mark.parametrize("owners", [1, 2])
def test_a_placeholder_of_one_parameters_storage_is_a_name_of_it(
    owners: int, tmp_path: Path
) -> None:
    """DeepSpeed does not record the second name of a module that has two within one parent."""
    run = Run(stage=3)
    root = save(small_model(), run, tmp_path)

    def name_again(state: dict[str, Any]) -> None:
        shared = torch.empty(0, dtype=torch.bfloat16)
        names = [*state["param_shapes"][0]][:owners]
        state["module"] |= dict.fromkeys([*names, "again.weight"], shared)

    edit(model_file(root / "global_step2", run, 0), name_again)
    checkpoint = open_checkpoint(root)
    first = next(iter(small_model().groups[0]))
    assert checkpoint.aliases.get("again.weight") == (first if owners == 1 else None)
    assert checkpoint.left_out == (() if owners == 1 else ("again.weight",))


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_that_a_save_excluded_are_noticed(stage: int, tmp_path: Path) -> None:
    checkpoint = _opened(small_model(), Run(stage=stage, exclude_frozen=True), tmp_path)
    assert checkpoint.frozen_left_out
    assert all(tensor.role is not Role.FROZEN for tensor in checkpoint.tensors)


def test_a_buffer_without_a_value_is_left_out(tmp_path: Path) -> None:
    checkpoint = _changed(tmp_path, Run(stage=2), lambda state: state["module"].pop("mask"))
    assert (checkpoint.left_out, checkpoint.problems) == (("mask",), ())


@pytest.mark.deepspeed
def test_a_base_weight_that_ranks_shared_out_is_left_out(tmp_path: Path) -> None:
    """DeepSpeed saves the first rank's part alone: no folder may have it as if it were all."""
    run_ranks(2, partial(_train_on_shared_bases, root=tmp_path), tmp_path / "logs")
    for stage in range(4):
        checkpoint = open_checkpoint(tmp_path / f"stage{stage}")
        assert checkpoint.left_out == ("shared.weight",)
        names = {tensor.name for tensor in checkpoint.tensors}
        assert {"shared.lora_weight_1.weight", "whole.weight", "head.weight"} <= names


def _train_on_shared_bases(rank: int, root: Path) -> None:
    import deepspeed
    from deepspeed.linear import LoRAConfig, OptimizedLinear

    assert rank in range(2)
    for stage in range(4):
        model = torch.nn.Sequential()
        for name, parts in (("shared", 2), ("whole", 1)):
            lora = LoRAConfig(lora_r=2, base_weight_sharding=parts)
            model.add_module(name, OptimizedLinear(4, 6, lora_config=lora, device="cpu"))
        model.add_module("head", torch.nn.Linear(4, 4))
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW([one for one in model.parameters() if one.requires_grad]),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage},
            },
        )
        engine.save_checkpoint(str(root / f"stage{stage}"))


@pytest.mark.deepspeed
def test_files_that_ranks_of_one_sequence_wrote_over_are_known_by_their_length(
    tmp_path: Path,
) -> None:
    """Where the configuration makes the groups; with an mpu, trainings go on in ``some_moves``."""
    mesh = {"data_parallel_size": 2, "sequence_parallel_size": 2}
    run_jobs(4, [Job(Spec(3, 4, ds_config=mesh), tmp_path / "run")], tmp_path / "logs")
    with pytest.raises(DamagedCheckpointError, match="do not add up"):
        raise_problems(open_checkpoint(tmp_path / "run" / "saved"))
