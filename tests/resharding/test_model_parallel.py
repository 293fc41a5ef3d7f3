"""Experts, tensor parallelism and pipelines on other numbers of ranks."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import edit
from tests.support.oracles import differences
from tests.support.raw_states import plain, universal_states
from tests.support.real_cases import FIXTURES, copied
from tests.support.sharded_runs import run_ranks
from zexport import (
    ReshardOptions,
    ResumeFormat,
    ZexportError,
    diff_states,
    open_checkpoint,
    reshard,
)

_NOT_COMPARED = {
    *("loss_scaler", "param_slice_mappings", "param_alignment_paddings", "ds_config"),
    *("zero_stage", "universal_checkpoint_info", "shared_params", "clip_grad"),
}
"""Keys that DeepSpeed does not read or does not need; only the first rank has ties."""

EXPERTS = [
    ("moe_z1_w4_ep2_bf16opt", 2),
    ("moe_z2_w2_ep1", 3),
    ("moe_z2_w4_ep2_blocks", 8),
    ("stages_moe_z1_w4_ep2", 4),
    ("autoep_z2_w4_ep2", 8),
    ("autoep_z3_w4_ep2_blocks", 2),
]


@pytest.mark.parametrize(("name", "world"), EXPERTS)
def test_experts_resharded_twice_equal_the_original_files(
    name: str, world: int, tmp_path: Path
) -> None:
    source, there, back = FIXTURES / name / "ckpt", tmp_path / "there", tmp_path / "back"
    before = open_checkpoint(source)
    assert before.world_size is not None
    reshard(source, there, ReshardOptions(world_size=world))
    opened = open_checkpoint(there)
    assert (opened.world_size, opened.problems) == (world, ())
    reshard(there, back, ReshardOptions(world_size=before.world_size))
    assert _differing(before.location.tag_dir, open_checkpoint(back).location.tag_dir) == []


def test_diff_compares_states_per_expert_rank(tmp_path: Path) -> None:
    source = FIXTURES / "moe_z2_w4_ep2" / "ckpt"
    reshard(source, tmp_path / "on-2", ReshardOptions(world_size=2))
    found = diff_states(source, tmp_path / "on-2")
    names = {one.name for one in found.tensors}
    assert {one.outcome.value for one in found.tensors} == {"equal"}
    expert = "moes.0.deepspeed_moe.experts.deepspeed_experts.1.up.weight (exp_avg)"
    assert {f"expert rank 0: {expert}", f"expert rank 1: {expert}"} <= names


def _one_group_for_all(value: Any) -> None:
    inner = value["optimizer_state_dict"]["optimizer_state_dict"]
    (first, *rest) = inner["param_groups"]
    params = [number for group in (first, *rest) for number in group["params"]]
    inner["param_groups"] = [{**first, "params": params}]


def test_experts_and_other_weights_in_one_group_are_rejected(tmp_path: Path) -> None:
    root = copied("autoep_z3_w4_ep2", tmp_path)
    for path in root.glob("*/*_optim_states.pt"):
        edit(path, _one_group_for_all)
    with pytest.raises(ZexportError, match="experts and other weights") as refused:
        reshard(root, tmp_path / "out", ReshardOptions(world_size=2))
    assert refused.value.exit_code == 4


def test_frozen_experts_are_not_in_the_frozen_table(
    tmp_path: Path,
) -> None:
    reshard(FIXTURES / "moe_z2_w2_ep2_frozen" / "ckpt", tmp_path, ReshardOptions(world_size=4))
    (path,) = tmp_path.glob("*/mp_rank_00_model_states.pt")
    model = torch.load(path)
    assert model["frozen_param_fragments"] is None
    assert len([*path.parent.glob("layer_*_expert_*")]) == 8
    assert "norm.weight" in model["module"]


SPLIT = [
    *(("pp2_tp2_z1_w8_bf16_tied", 3, 1), ("tp2_z1_w2_bf16_one_head", 3, 1)),
    *(("tp2_z3_w4_bf16", 3, 1), ("autoep_z0_w2_ep2", 2, 3)),
    *(("autoep_z1_w2_ep2_qwen2", 4, 3), ("autoep_z3_w4_ep2_blocks", 2, 1)),
]


@pytest.mark.parametrize(("name", "world", "stage"), SPLIT)
def test_universal_checkpoint_splits_into_model_parallel_ranks(
    name: str, world: int, stage: int, tmp_path: Path
) -> None:
    source, universal = FIXTURES / name / "ckpt", tmp_path / "universal"
    options = ReshardOptions(world_size=world, stage=stage)
    reshard(source, universal, ReshardOptions(format=ResumeFormat.UNIVERSAL))
    assert open_checkpoint(universal).problems == ()
    assert {one.outcome.value for one in diff_states(source, universal).tensors} == {"equal"}
    found = []
    for root, out in ((source, tmp_path / "one"), (universal, tmp_path / "other")):
        reshard(root, out, options)
        found.append(open_checkpoint(out).location.tag_dir)
    assert _differing(*found) == []


def test_universal_pipeline_without_layer_files_is_rejected(tmp_path: Path) -> None:
    universal = tmp_path / "universal"
    source = FIXTURES / "pp2_z1_w4_bf16_tied" / "ckpt"
    reshard(source, universal, ReshardOptions(format=ResumeFormat.UNIVERSAL))
    for path in universal.glob("*/layer_*"):
        path.unlink()
    with pytest.raises(ZexportError, match="layer files of the pipeline are missing") as refused:
        reshard(universal, tmp_path / "out", ReshardOptions(world_size=2, stage=1))
    assert refused.value.exit_code == 3


def test_universal_checkpoint_of_different_parameter_groups_is_rejected(tmp_path: Path) -> None:
    root = copied("pp2_z1_w4_bf16_tied", tmp_path)

    def change(value: Any) -> None:
        value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 3.0

    for path in root.glob("*/*mp_rank_01_optim_states.pt"):
        edit(path, change)
    with pytest.raises(ZexportError, match="different parameter groups") as refused:
        reshard(root, tmp_path / "out", ReshardOptions(format=ResumeFormat.UNIVERSAL))
    assert refused.value.exit_code == 4


@dataclass(frozen=True)
class Load:
    """A fixture loaded on other ranks by the engine that its script makes for ``case``."""

    name: str
    data_ranks: int
    ranks: int
    script: str
    engine: str
    case: dict[str, Any]
    besides: frozenset[str] = frozenset()
    is_universal: bool = False

    def __str__(self) -> str:
        way = "-universal" * self.is_universal
        return f"{self.name}-on-{self.data_ranks}-z{self.case['stage']}{way}"


_MOE = {"script": "make_experts", "engine": "expert_engine"}
_STAGES = {"script": "make_parallel", "engine": "pipeline_engine"}
_TENSOR = {"script": "make_parallel", "engine": "tensor_engine"}
_BLOCKS = {"use_data_before_expert_parallelism": True}

LOADS = [
    Load("moe_z2_w4_ep2_blocks", 4, 4, **_MOE,
         case={"stage": 2, "world": 4, "ep_size": 2, "config": _BLOCKS}),
    Load("pp2_z1_w4_bf16_tied", 1, 2, **_STAGES,
         case={"stage": 1, "world": 2, "stages": 2, "tied": True, "freeze": "2.fc"}),
    Load("tp2_z1_w2_bf16_tied", 2, 4, **_TENSOR,
         case={"stage": 1, "world": 4, "tensor": 2, "tied": True, "freeze": "layers.0."}),
    Load("moe_z0_w4_ep2_bf16_blocks", 2, 2, **_MOE,
         case={"stage": 2, "world": 2, "ep_size": 2, "config": _BLOCKS}),
    Load("moe_z2_w2_ep2_frozen", 2, 2, **_MOE,
         case={"stage": 1, "world": 2, "ep_size": 2, "frozen": ("up.bias", "norm")},
         besides=frozenset({"frozen_param_fragments", "frozen_param_shapes"})),
    Load("autoep_z3_w4_ep2_blocks", 2, 2, **_MOE,
         case={"stage": 2, "world": 2, "ep_size": 2, "autoep": True, "config": _BLOCKS}),
    Load("autoep_z2_w4_ep2", 4, 4, **_MOE,
         case={"stage": 3, "world": 4, "ep_size": 2, "autoep": True}),
    Load("tp2_z1_w2_bf16_fused", 1, 2, is_universal=True, **_TENSOR,
         case={"stage": 1, "world": 2, "tensor": 2, "model": "fused"}),
    Load("tp2_z3_w4_bf16", 1, 2, is_universal=True, **_TENSOR,
         case={"stage": 3, "world": 2, "tensor": 2}),
    Load("pp2_z1_w4_bf16_tied", 1, 2, is_universal=True, **_STAGES,
         case={"stage": 1, "world": 2, "stages": 2, "tied": True, "freeze": "2.fc"},
         besides=frozenset({"layer_02-model_states.pt"})),
]  # fmt: skip


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_deepspeed_loads_and_saves_the_same_on_other_ranks(load: Load, tmp_path: Path) -> None:
    """From rank files or from a universal checkpoint, whose frozen weights it does not load."""
    out, source = tmp_path / "out", FIXTURES / load.name / "ckpt"
    reshard(source, out, ReshardOptions(world_size=load.data_ranks, stage=load.case["stage"]))
    if load.is_universal:
        universal = ReshardOptions(format=ResumeFormat.UNIVERSAL)
        reshard(source, tmp_path / "universal", universal)
    run_ranks(load.ranks, partial(_load_and_save, load=load, root=tmp_path), tmp_path / "ranks")
    found = _differing(open_checkpoint(out).location.tag_dir, tmp_path / "again" / "tag")
    assert [one for one in found if not load.besides & {*one.split("/")}] == []


@pytest.mark.deepspeed
@pytest.mark.slow
def test_deepspeed_loads_autoep_experts_at_another_expert_parallel_size(tmp_path: Path) -> None:
    """Converting its next checkpoint gives the universal checkpoint that it loaded."""
    case = {"stage": 3, "world": 4, "ep_size": 4, "autoep": True, "config": _BLOCKS}
    load = Load("autoep_z3_w4_ep2_blocks", 4, 4, **_MOE, case=case, is_universal=True)
    universal = ReshardOptions(format=ResumeFormat.UNIVERSAL)
    reshard(FIXTURES / load.name / "ckpt", tmp_path / "universal", universal)
    run_ranks(load.ranks, partial(_load_and_save, load=load, root=tmp_path), tmp_path / "ranks")
    reshard(tmp_path / "again", tmp_path / "whole", universal)
    folders = [open_checkpoint(tmp_path / one).location.tag_dir for one in ("universal", "whole")]
    assert differences(*map(universal_states, folders)) == []


def _load_and_save(rank: int, load: Load, root: Path) -> None:
    sys.path.insert(0, str(FIXTURES))
    script = importlib.import_module(load.script)
    torch.manual_seed(11 + rank)
    case = script.Case(**load.case)
    if load.is_universal:
        _ask_for_universal(script)
    engine = getattr(script, load.engine)(case)
    path, _ = engine.load_checkpoint(str(root / ("universal" if load.is_universal else "out")))
    assert path is not None
    engine.save_checkpoint(str(root / "again"), tag="tag")
    torch.distributed.barrier()  # a rank that ends early breaks the others' connections


def _ask_for_universal(script: Any) -> None:
    """Have a fixture's script configure its runs so that they load universal checkpoints."""
    asked = {"checkpoint": {"load_universal": True}}
    if hasattr(script, "config"):
        own = script.config
        script.config = lambda case: own(case) | asked
    else:
        of_case = script.Case.ds_config
        script.Case.ds_config = lambda case: of_case(case) | asked


def _differing(one: Path, other: Path) -> list[str]:
    """Return where the rank files of two checkpoints differ."""
    names = {path.name for path in one.glob("*.pt")}, {path.name for path in other.glob("*.pt")}
    found = [f"{name} is only in one" for name in names[0] ^ names[1]]
    for name in sorted(names[0] & names[1]):
        pair = (torch.load(it / name, weights_only=False) for it in (one, other))
        found += [f"{name}{place}" for place in _places(*map(plain, pair))]
    return found


def _places(one: Any, other: Any, path: str = "") -> list[str]:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [path]
    return [
        place
        for key in sorted({*one, *other}, key=str)
        if key not in _NOT_COMPARED
        for place in _places(one.get(key), other.get(key), f"{path}/{key}")
    ]
