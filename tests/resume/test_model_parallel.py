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

from tests.support.real_cases import FIXTURES
from tests.support.sharded_runs import run_ranks
from zexport import ReshardOptions, ZexportError, diff_states, open_checkpoint, reshard

_NOT_COMPARED = {
    *("loss_scaler", "param_slice_mappings", "param_alignment_paddings", "ds_config"),
    *("zero_stage", "universal_checkpoint_info", "shared_params"),
}
"""What DeepSpeed does not read, and writes anew; ties it writes in the first rank's file alone."""

EXPERTS = [
    ("moe_z1_w2_ep2_residual", 8),
    ("moe_z1_w4_ep2_bf16opt", 2),
    ("moe_z2_w2_ep1", 3),
    ("moe_z2_w2_ep2_dense_frozen", 4),
    ("moe_z2_w4_ep2_blocks", 8),
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
        ("moe_z2_w4_ep2", {"world_size": 3}, 2, "experts that 2 ranks share among them stay so"),
        ("moe_z2_w4_ep2", {"world_size": 2, "stage": 3}, 2, "for ZeRO-1 and 2 alone"),
        ("moe_z0_w2_ep2_bf16", {"world_size": 2, "stage": 1}, 4, "has experts and no ZeRO"),
        ("moe_z2_w2_ep2_frozen", {"world_size": 2}, 4, "has experts that are not trained"),
        ("autoep_z2_w4_ep2", {"world_size": 2}, 4, "has experts of AutoEP"),
        ("stages_moe_z1_w4_ep2", {"world_size": 2}, 4, "within the stages of a pipeline"),
    ],
)
def test_experts_that_cannot_be_moved_so_are_refused_with_the_reason(
    name: str, options: dict[str, Any], code: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ZexportError, match=words) as refused:
        reshard(FIXTURES / name / "ckpt", tmp_path / "out", ReshardOptions(**options))
    assert refused.value.exit_code == code
    assert [*tmp_path.iterdir()] == []


@dataclass(frozen=True)
class Load:
    """A fixture that is loaded elsewhere, by the engine that its script makes of ``case``."""

    name: str
    data_ranks: int
    ranks: int
    script: str
    engine: str
    case: dict[str, Any]


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
]  # fmt: skip


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_deepspeed_loads_them_on_other_ranks_and_saves_the_same(load: Load, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard(FIXTURES / load.name / "ckpt", out, ReshardOptions(world_size=load.data_ranks))
    run_ranks(load.ranks, partial(_load_and_save, load=load, root=tmp_path), tmp_path / "ranks")
    assert _differing(open_checkpoint(out).location.tag_dir, tmp_path / "again" / "tag") == []


def _load_and_save(rank: int, load: Load, root: Path) -> None:
    sys.path.insert(0, str(FIXTURES))
    script = importlib.import_module(load.script)
    torch.manual_seed(11 + rank)
    engine = getattr(script, load.engine)(script.Case(**load.case))
    path, _ = engine.load_checkpoint(str(root / "out"))
    assert path is not None
    engine.save_checkpoint(str(root / "again"), tag="tag")
    torch.distributed.barrier()  # who is done ends, and would take the others' peer away


def _differing(one: Path, other: Path) -> list[str]:
    """Where the rank files of two saves differ."""
    names = {path.name for path in one.glob("*.pt")}, {path.name for path in other.glob("*.pt")}
    found = [f"{name} is in one alone" for name in names[0] ^ names[1]]
    for name in sorted(names[0] & names[1]):
        pair = (torch.load(it / name, weights_only=False) for it in (one, other))
        found += [f"{name}{place}" for place in _places(*map(_plain, pair))]
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


def _plain(value: Any) -> Any:
    """A value with tensors as what they hold, so that two can be compared."""
    if torch.is_tensor(value):
        return value.dtype, list(value.shape), value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
