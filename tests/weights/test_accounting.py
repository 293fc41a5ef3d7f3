"""Every element of the flat partitions has its place in the account of an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import zexport
from tests.support.checkpoints import Model, Run, save
from zexport.checkpoint.state import FlatData, Role, StoredTensor
from zexport.errors import UnsupportedError
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Extent
from zexport.weights.proof import Accounting, account

FIXTURES = Path(__file__).parents[2] / "fixtures"


def _flat_numel(root: Path) -> int:
    """Elements of all flat groups in all optimizer files, as torch loads them."""
    return sum(
        group.numel()
        for path in root.rglob("*optim_states.pt")
        for group in _flats(torch.load(path, weights_only=False))
    )


def _flats(state: dict[str, Any]) -> list[torch.Tensor]:
    inner = state.get("optimizer_state_dict") or {}
    for key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
        if key in inner:
            return list(inner[key])
    return []


WITH_FLATS = sorted(
    path.name
    for path in FIXTURES.iterdir()
    if any((path / "ckpt").rglob("*zero_pp_rank_*_optim_states.pt"))
)


def test_a_trained_weight_behind_the_flat_data_of_its_file_is_counted_beside_it(
    tmp_path: Path,
) -> None:
    checkpoint = zexport.open_checkpoint(save(Model([{"w": torch.randn(2)}]), Run(), tmp_path))
    path = tmp_path / "rank.pt"
    flat, behind = Extent(path, 100, 8), Extent(path, 108, 12)
    tensors = tuple(
        StoredTensor(name, (source.nbytes // 4,), DType.F32, Role.TRAINABLE, source)
        for name, source in (("w", flat), ("v", behind))
    )
    whole = structs.replace(checkpoint.whole, flats=(FlatData(flat, DType.F32, 0),))
    held = replace(checkpoint, tensors=tensors, whole=whole, replicas=())
    assert account(held, tensors) == Accounting(5, used=5, padding=0, replica=0, left_out=0)


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", WITH_FLATS)
def test_the_whole_is_what_the_files_hold_and_the_parts_make_it_up(
    name: str,
) -> None:
    root = FIXTURES / name / "ckpt"
    checkpoint = zexport.open_checkpoint(root)
    found = account(checkpoint, checkpoint.tensors)
    assert found.total == _flat_numel(root) > 0
    assert found.is_exact
    trained = sum(t.numel for t in checkpoint.tensors if t.role is Role.TRAINABLE)
    assert (found.used, found.left_out) == (trained, 0)


def _checkpoint(name: str) -> zexport.TrainingState:
    return zexport.open_checkpoint(FIXTURES / name / "ckpt")


def test_what_is_not_exported_counts_as_left_out() -> None:
    checkpoint = _checkpoint("z2_w2_bf16_groups")
    first, *rest = checkpoint.tensors
    found = account(checkpoint, rest)
    assert found.left_out == first.numel
    assert found.used == sum(t.numel for t in rest if t.role is Role.TRAINABLE)


@pytest.mark.parametrize("name", ["z2_w2_bf16_groups", "z3_w4_bf16_odd", "tp2_z1_w2_bf16_fused"])
def test_a_tensor_that_is_lost_on_the_way_is_refused(name: str) -> None:
    checkpoint = _checkpoint(name)
    lacking = replace(checkpoint, tensors=checkpoint.tensors[1:])
    with pytest.raises(UnsupportedError, match="are not accounted for") as caught:
        account(lacking, lacking.tensors)
    total = account(checkpoint, checkpoint.tensors).total
    assert caught.value.found == f"{total} elements in the partitions"


def test_second_copies_that_are_not_compared_are_refused() -> None:
    checkpoint = _checkpoint("tp2_z1_w2_bf16_fused")
    assert account(checkpoint, checkpoint.tensors).replica > 0
    with pytest.raises(UnsupportedError, match="are not accounted for"):
        account(replace(checkpoint, replicas=()), checkpoint.tensors)


def test_padding_that_the_layout_does_not_know_is_refused() -> None:
    checkpoint = _checkpoint("z3_w4_bf16_odd")
    (flat,) = checkpoint.flats
    assert flat.padding == account(checkpoint, checkpoint.tensors).padding > 0
    whole = structs.replace(checkpoint.whole, flats=(structs.replace(flat, padding=0),))
    with pytest.raises(UnsupportedError, match="are not accounted for"):
        account(replace(checkpoint, whole=whole), checkpoint.tensors)


def test_the_manifest_and_the_report_have_the_account(tmp_path: Path) -> None:
    checkpoint = _checkpoint("z3_w4_bf16_odd")
    plan = zexport.plan_export(checkpoint, tmp_path / "out")
    assert plan.provenance["accounting"] == structs.asdict(account(checkpoint, checkpoint.tensors))


@pytest.mark.parametrize("run", [Run(stage=1), Run(stage=2), Run(stage=3, world_size=2)], ids=str)
def test_tensors_without_elements_count_nothing(run: Run, tmp_path: Path) -> None:
    model = Model([{"empty": torch.zeros(0), "full": torch.ones(3)}], {}, {}, {}, torch.float32)
    checkpoint = zexport.open_checkpoint(save(model, run, tmp_path / "ckpt"))
    assert account(checkpoint, checkpoint.tensors).used == 3
