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
from tests.support.oracles import same
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
"""What DeepSpeed does not read, or not need, and writes anew; ties in the first rank's alone."""

EXPERTS = [
    ("moe_z1_w2_ep2_residual", 8),
    ("moe_z1_w4_ep2_bf16opt", 2),
    ("moe_z2_w2_ep1", 3),
    ("moe_z2_w2_ep2_dense_frozen", 4),
    ("moe_z2_w4_ep2_blocks", 8),
    ("moe_z1_w2_ep2_frozen", 4),
    ("stages_moe_z1_w4_ep2", 4),
    ("autoep_z2_w4_ep2", 8),
    ("autoep_z3_w4_ep2", 8),
    ("autoep_z3_w4_ep2_blocks", 2),
]


@pytest.mark.parametrize(("name", "world"), EXPERTS)
def test_experts_there_and_back_again_are_the_files_that_deepspeed_wrote(
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


def test_states_of_experts_are_compared_by_whose_they_are(tmp_path: Path) -> None:
    source = FIXTURES / "moe_z2_w4_ep2" / "ckpt"
    reshard(source, tmp_path / "on-2", ReshardOptions(world_size=2))
    found = diff_states(source, tmp_path / "on-2")
    names = {one.name for one in found.tensors}
    assert {one.outcome.value for one in found.tensors} == {"equal"}
    expert = "moes.0.deepspeed_moe.experts.deepspeed_experts.1.up.weight (exp_avg)"
    assert {f"expert rank 0: {expert}", f"expert rank 1: {expert}"} <= names


@pytest.mark.parametrize(
    ("name", "options", "code", "words"),
    [
        ("moe_z2_w4_ep2", {"world_size": 3}, 2, "expert-parallel size"),
        ("moe_z2_w4_ep2", {"world_size": 2, "stage": 3}, 2, "to ZeRO-3 .*expected 1 or 2"),
        ("stages_moe_z1_w4_ep2", {"world_size": 2, "stage": 2}, 2, "to ZeRO-2 .*expected 1"),
    ],
)
def test_experts_that_cannot_be_moved_so_are_refused_with_the_reason(
    name: str, options: dict[str, Any], code: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ZexportError, match=words) as refused:
        reshard(FIXTURES / name / "ckpt", tmp_path / "out", ReshardOptions(**options))
    assert refused.value.exit_code == code
    assert [*tmp_path.iterdir()] == []


def _one_group_for_all(value: Any) -> None:
    inner = value["optimizer_state_dict"]["optimizer_state_dict"]
    (first, *rest) = inner["param_groups"]
    params = [number for group in (first, *rest) for number in group["params"]]
    inner["param_groups"] = [{**first, "params": params}]


def test_experts_beside_other_weights_in_one_group_are_refused(tmp_path: Path) -> None:
    root = copied("autoep_z3_w4_ep2", tmp_path)
    for path in root.glob("*/*_optim_states.pt"):
        edit(path, _one_group_for_all)
    with pytest.raises(ZexportError, match="experts and other weights") as refused:
        reshard(root, tmp_path / "out", ReshardOptions(world_size=2))
    assert refused.value.exit_code == 4


def test_frozen_experts_get_no_table_by_which_every_rank_would_take_the_first_ones(
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
    *(("tp2_z1_w2_bf16_fused", 3, 1), ("tp2_z3_w4_bf16", 3, 1)),
    *(("autoep_z0_w2_ep2", 2, 3), ("autoep_z1_w2_ep2_qwen2", 4, 3)),
    *(("autoep_z2_w4_ep2", 8, 2), ("autoep_z3_w4_ep2_blocks", 2, 1)),
]


@pytest.mark.parametrize(("name", "world", "stage"), SPLIT)
def test_model_parallel_ranks_are_cut_again_out_of_a_universal_checkpoint(
    name: str, world: int, stage: int, tmp_path: Path
) -> None:
    source, universal = FIXTURES / name / "ckpt", tmp_path / "universal"
    options = ReshardOptions(world_size=world, stage=stage)
    reshard(source, universal, ReshardOptions(format=ResumeFormat.UNIVERSAL))
    assert open_checkpoint(universal).problems == ()
    assert {one.outcome.value for one in diff_states(source, universal).tensors} == {"equal"}
    reshard(universal, tmp_path / "again", ReshardOptions(format=ResumeFormat.UNIVERSAL))
    assert {one.outcome.value for one in diff_states(source, tmp_path / "again").tensors} == {
        "equal"
    }
    found = []
    for root, out in ((source, tmp_path / "one"), (universal, tmp_path / "other")):
        reshard(root, out, options)
        found.append(open_checkpoint(out).location.tag_dir)
    assert _differing(*found) == []


def test_a_converted_pipeline_without_the_files_of_its_layers_is_refused(tmp_path: Path) -> None:
    universal = tmp_path / "universal"
    source = FIXTURES / "pp2_z1_w4_bf16_tied" / "ckpt"
    reshard(source, universal, ReshardOptions(format=ResumeFormat.UNIVERSAL))
    for path in universal.glob("*/layer_*"):
        path.unlink()
    with pytest.raises(ZexportError, match="layer files of the pipeline are missing") as refused:
        reshard(universal, tmp_path / "out", ReshardOptions(world_size=2, stage=1))
    assert refused.value.exit_code == 3


def _other_rate(value: Any) -> None:
    value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 3.0


def _as_of_megatron(value: Any) -> None:
    del value["universal_checkpoint_info"]["autotp_unsupported_parameter_patterns"]


@pytest.mark.parametrize(
    ("name", "pattern", "change", "words"),
    [
        (
            "pp2_z1_w4_bf16_tied",
            "*mp_rank_01_optim_states.pt",
            _other_rate,
            "different parameter groups",
        ),
        ("tp2_z1_w2_bf16_fused", "*_model_states.pt", _as_of_megatron, "fused parts"),
    ],
)
def test_what_no_universal_checkpoint_can_tell_is_refused(
    name: str, pattern: str, change: Any, words: str, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    for path in root.glob(f"*/{pattern}"):
        edit(path, change)
    with pytest.raises(ZexportError, match=words) as refused:
        reshard(root, tmp_path / "out", ReshardOptions(format=ResumeFormat.UNIVERSAL))
    assert refused.value.exit_code == 4


@dataclass(frozen=True)
class Load:
    """A fixture that is loaded elsewhere, by the engine that its script makes of ``case``."""

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
    Load("moe_z2_w4_ep2", 2, 2, case={"stage": 2, "world": 2, "ep_size": 2}, **_MOE),
    Load("moe_z1_w2_ep2_residual", 4, 4, **_MOE,
         case={"stage": 1, "world": 4, "ep_size": 2, "residual": True}),
    Load("moe_z2_w4_ep2_blocks", 4, 4, **_MOE,
         case={"stage": 2, "world": 4, "ep_size": 2, "config": _BLOCKS}),
    Load("pp2_z1_w4_bf16_tied", 1, 2, **_STAGES,
         case={"stage": 1, "world": 2, "stages": 2, "tied": True, "freeze": "2.fc"}),
    Load("tp2_z2_w4_bf16", 1, 2, **_TENSOR,
         case={"stage": 2, "world": 2, "tensor": 2, "freeze": "layers.0."}),
    Load("tp2_z1_w2_bf16_tied", 2, 4, **_TENSOR,
         case={"stage": 1, "world": 4, "tensor": 2, "tied": True, "freeze": "layers.0."}),
    Load("moe_z0_w4_ep2_bf16_blocks", 2, 2, **_MOE,
         case={"stage": 2, "world": 2, "ep_size": 2, "config": _BLOCKS}),
    Load("moe_z2_w2_ep2_frozen", 4, 4, **_MOE,
         case={"stage": 2, "world": 4, "ep_size": 2, "frozen": ("up.bias", "norm")},
         besides=frozenset({"frozen_param_fragments", "frozen_param_shapes"})),
    Load("autoep_z2_w4_ep2", 2, 2, **_MOE,
         case={"stage": 2, "world": 2, "ep_size": 2, "autoep": True}),
    Load("autoep_z3_w4_ep2", 2, 2, **_MOE,
         case={"stage": 3, "world": 2, "ep_size": 2, "autoep": True}),
    Load("autoep_z3_w4_ep2_blocks", 2, 2, **_MOE,
         case={"stage": 2, "world": 2, "ep_size": 2, "autoep": True, "config": _BLOCKS}),
    Load("autoep_z2_w4_ep2", 4, 4, **_MOE,
         case={"stage": 3, "world": 4, "ep_size": 2, "autoep": True}),
    Load("tp2_z1_w2_bf16_fused", 2, 4, is_universal=True, **_TENSOR,
         case={"stage": 1, "world": 4, "tensor": 2, "model": "fused"}),
    Load("tp2_z3_w4_bf16", 1, 2, is_universal=True, **_TENSOR,
         case={"stage": 3, "world": 2, "tensor": 2}),
    Load("tp2_z3_w4_bf16", 1, 2, is_universal=True, **_TENSOR,
         case={"stage": 2, "world": 2, "tensor": 2}),
    Load("pp2_z1_w4_bf16_tied", 1, 2, is_universal=True, **_STAGES,
         case={"stage": 1, "world": 2, "stages": 2, "tied": True, "freeze": "2.fc"},
         besides=frozenset({"layer_02-model_states.pt"})),
]  # fmt: skip


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_deepspeed_loads_them_on_other_ranks_and_saves_the_same(load: Load, tmp_path: Path) -> None:
    """Plainly, or as a universal checkpoint, of which it takes no frozen weights."""
    out, source = tmp_path / "out", FIXTURES / load.name / "ckpt"
    reshard(source, out, ReshardOptions(world_size=load.data_ranks, stage=load.case["stage"]))
    if load.is_universal:
        universal = ReshardOptions(format=ResumeFormat.UNIVERSAL)
        reshard(source, tmp_path / "universal", universal)
    run_ranks(load.ranks, partial(_load_and_save, load=load, root=tmp_path), tmp_path / "ranks")
    found = _differing(open_checkpoint(out).location.tag_dir, tmp_path / "again" / "tag")
    assert [one for one in found if not load.besides & {*one.split("/")}] == []


_TO_OTHER_SIZES = [
    Load("autoep_z2_w4_ep2", 4, 4, is_universal=True, **_MOE,
         case={"stage": 2, "world": 4, "ep_size": 4, "autoep": True}),
    Load("autoep_z2_w4_ep2", 2, 2, is_universal=True, **_MOE,
         case={"stage": 3, "world": 2, "ep_size": 1, "autoep": True}),
    Load("autoep_z3_w4_ep2", 2, 2, is_universal=True, **_MOE,
         case={"stage": 1, "world": 2, "ep_size": 2, "autoep": True}),
    Load("autoep_z3_w4_ep2_blocks", 4, 4, is_universal=True, **_MOE,
         case={"stage": 3, "world": 4, "ep_size": 4, "autoep": True, "config": _BLOCKS}),
]  # fmt: skip


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("load", _TO_OTHER_SIZES, ids=str)
def test_deepspeed_loads_autoeps_experts_at_any_expert_parallel_size(
    load: Load, tmp_path: Path
) -> None:
    """What it saves again, made whole, is the universal checkpoint that it had loaded."""
    universal = ReshardOptions(format=ResumeFormat.UNIVERSAL)
    reshard(FIXTURES / load.name / "ckpt", tmp_path / "universal", universal)
    run_ranks(load.ranks, partial(_load_and_save, load=load, root=tmp_path), tmp_path / "ranks")
    reshard(tmp_path / "again", tmp_path / "whole", universal)
    folders = [open_checkpoint(tmp_path / one).location.tag_dir for one in ("universal", "whole")]
    before, after = map(universal_states, folders)
    assert before.keys() == after.keys()
    assert [name for name in before if not same(before[name], after[name])] == []


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
    torch.distributed.barrier()  # who is done ends, and would take the others' peer away


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
    """Where the rank files of two saves differ."""
    names = {path.name for path in one.glob("*.pt")}, {path.name for path in other.glob("*.pt")}
    found = [f"{name} is in one alone" for name in names[0] ^ names[1]]
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
