"""Damage that fits in length, and remarkable values: found, reported, allowed by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zexport
from tests.support.checkpoints import Model, Run, edit, save, values
from tests.support.exports import manifest_of
from tests.support.oracles import cast, differences
from tests.support.real_cases import copied, file_of
from zexport import (
    CheckMode,
    CheckpointError,
    DamagedCheckpointError,
    ExportDType,
    ExportOptions,
    FindingKind,
    NameLayout,
)

_MEMORY = ExportOptions(layout=NameLayout.MEMORY)
_SMALL = Model([{"w": values((50,), 1)}], buffers={"b": torch.ones(2)})

_TORCH = dict(
    zip(list(ExportDType)[:3], (torch.float32, torch.bfloat16, torch.float16), strict=True)
)

State = dict[str, Any]
Edit = Callable[[State], object]


def _flats(state: State) -> list[torch.Tensor]:
    root = state["optimizer_state_dict"]
    key = "fp32_flat_groups" if "fp32_flat_groups" in root else "single_partition_of_fp32_groups"
    flats: list[torch.Tensor] = root[key]
    return flats


def _allowing(*kinds: FindingKind, check: CheckMode = CheckMode.SAMPLED) -> ExportOptions:
    return ExportOptions(layout=NameLayout.MEMORY, allow=frozenset(kinds), check=check)


def _refused(root: Path, out: Path, options: ExportOptions = _MEMORY) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        zexport.consolidate(root, out, options)
    assert not out.exists()
    assert caught.value.exit_code == 3
    return caught.value


# --- refused unless allowed ---


def _train(state: State) -> None:
    for flat in _flats(state):
        flat.data.mul_(1.5).add_(0.25)


def _scale(state: State) -> None:
    for tensor in state.get("module", state).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.mul_(1.25)


@pytest.mark.parametrize(
    ("name", "changed", "change", "named"),
    [
        ("z1_w2_bf16", "*rank_1_mp_rank_00_optim*", _train, "mp_rank_00_model_states.pt"),
        ("z1_w2_bf16opt", "*rank_0_mp_rank_00_optim*", _train, "mp_rank_00_model_states.pt"),
        ("moe_z2_w4_ep2", "*rank_3_mp_rank_00_optim*", _train, "layer_1_expert_3_mp_rank_00"),
        ("tp2_z1_w2_bf16_tied", "*rank_0_mp_rank_01_optim*", _train, "mp_rank_01_model_states.pt"),
        ("pp2_z1_w4_bf16_tied", "*rank_1_mp_rank_01_optim*", _train, "layer_04-model_states.pt"),
        ("uni_z2_w2_bf16_odd", "mp_rank_00_model_states.pt", _scale, "mp_rank_00_model_states.pt"),
    ],
)
def test_master_weights_of_another_step_are_refused(
    name: str, changed: str, change: Edit, named: str, tmp_path: Path
) -> None:
    root, out = copied(name, tmp_path), tmp_path / "out"
    edit(file_of(root, changed), change)
    assert "--allow cast-mismatch" in str(_refused(root, out))
    options = _allowing(FindingKind.CAST_MISMATCH, FindingKind.REPLICA_MISMATCH)
    report = zexport.consolidate(root, out, options)
    found = [one for one in report.findings if one.kind is FindingKind.CAST_MISMATCH]
    assert all(one.accepted and one.count for one in found)
    assert any(named in one.detail for one in found)
    recorded = {(one["kind"], one["accepted"]) for one in manifest_of(out)["findings"]}
    assert recorded == {(one.kind.value, one.accepted) for one in report.findings}
    assert zexport.verify_export(out, against=root).ok


def _of_another_step(root: Path, _: Path) -> None:
    edit(file_of(root, "*rank_1_*model*"), lambda state: state.update(global_steps=9))


def _with_a_rank_more(root: Path, scratch: Path) -> None:
    larger = save(Model([{"w": values((50,), 2)}]), Run(world_size=3, steps=1), scratch)
    shutil.copy(file_of(larger, "*rank_2_*optim*"), root / "global_step2")


@pytest.mark.parametrize(
    ("change", "kind"),
    [(_of_another_step, FindingKind.MIXED_STEPS), (_with_a_rank_more, FindingKind.STRAY_FILES)],
)
def test_mixed_rank_files_are_refused_unless_allowed(
    change: Callable[[Path, Path], None], kind: FindingKind, tmp_path: Path
) -> None:
    root, out = save(_SMALL, Run(), tmp_path / "ckpt"), tmp_path / "out"
    change(root, tmp_path / "other")
    error = _refused(root, out)
    assert error.finding is kind
    assert error.hint.endswith(f"--allow {kind.value}")
    (found,) = zexport.consolidate(root, out, _allowing(kind)).findings
    assert (found.kind, found.accepted) == (kind, True)
    assert differences(load_file(out / "model.safetensors"), _SMALL.tensors) == []


@pytest.mark.parametrize(("rank", "place"), [(0, 0), (1, -1), (2, -1)])
def test_samples_reach_every_partition_of_a_weight(rank: int, place: int, tmp_path: Path) -> None:
    model = Model([{"w": values((3, 10_000), 1)}], dtype=torch.float16)
    root = save(model, Run(stage=2, world_size=3), tmp_path / "ckpt")

    def change(state: State) -> None:
        _flats(state)[0][place] += 1

    edit(file_of(root, f"*rank_{rank}_mp*optim*"), change)
    error = _refused(root, tmp_path / "out")
    assert f"zero_pp_rank_{rank}_mp" in str(error.found)
    assert "w (1 of 2304 compared)" in str(error.found)


def test_full_check_compares_every_element(tmp_path: Path) -> None:
    root = save(Model([{"w": values((30_000,), 1)}]), Run(stage=2), tmp_path / "ckpt")

    def change(state: State) -> None:
        _flats(state)[0][4321] += 1

    edit(file_of(root, "*rank_0_mp*optim*"), change)
    zexport.consolidate(root, tmp_path / "sampled", _MEMORY)
    error = _refused(root, tmp_path / "full", _allowing(check=CheckMode.FULL))
    assert "w (1 of 30000 compared)" in str(error.found)
    with pytest.raises(DamagedCheckpointError, match="1 of 30000"):
        zexport.verify_export(tmp_path / "sampled", against=root, check=CheckMode.FULL)


# --- reported ---


def _exchange(root: Path) -> None:
    """Put the weights of each of two ranks into the other's file, which keeps its name."""
    paths = [file_of(root, f"*rank_{rank}_mp*optim*") for rank in (0, 1)]
    kept: list[list[torch.Tensor]] = []
    for path in paths:
        edit(path, lambda state: kept.append([*_flats(state)]))

    def put(state: State, flats: list[torch.Tensor]) -> None:
        _flats(state)[:] = flats

    for path, flats in zip(paths, reversed(kept), strict=True):
        edit(path, lambda state, flats=flats: put(state, flats))


@pytest.mark.parametrize("is_sure", [True, False])
def test_gathered_weights_reveal_exchanged_ranks_of_zero3(is_sure: bool, tmp_path: Path) -> None:
    """They are compared only if there is one tag, because they do not record theirs."""
    model = Model([{"w": values((6, 5), 1), "v": values((4,), 2)}], tied={"t": "w"})
    root = save(model, Run(stage=3), tmp_path / "ckpt")
    weights = {name: value.bfloat16() for name, value in model.trained.items()}
    save_file(weights, root / "model.safetensors")
    assert zexport.consolidate(root, tmp_path / "out", _MEMORY).findings == ()
    _exchange(root)
    if not is_sure:
        save(model, Run(stage=3), root, tag="global_step1")
        (root / "latest").write_text("global_step2")
    findings = zexport.consolidate(root, tmp_path / "wrong", _MEMORY).findings
    found = {(one.kind, one.tensor, one.count, one.accepted) for one in findings}
    differing = {("w", 30), ("v", 4)} if is_sure else set()
    assert found == {(FindingKind.GATHERED_MISMATCH, *one, False) for one in differing}


@pytest.mark.parametrize("dtype", _TORCH)
def test_remarkable_values_are_counted_and_cast_as_torch_casts(
    dtype: ExportDType, tmp_path: Path
) -> None:
    """The tensor has several chunks; the module has its values rounded to fp16."""
    big = values((3, 412_345), 1)
    big[0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 7e4, -65520.0, 65519.0])
    tiny = torch.cat([torch.full((50,), -1e-9), torch.zeros(20), torch.ones(180)])
    model = Model(
        [{"big": big, "tiny": tiny}],
        frozen={"f": torch.zeros(3).half(), "g": torch.tensor([1.0, float("nan")]).half()},
        buffers={"b": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)},
        dtype=torch.float16,
    )
    root = save(model, Run(stage=2), tmp_path / "ckpt")
    options = _allowing(FindingKind.ALL_ZERO, check=CheckMode.FULL)
    report = zexport.consolidate(root, tmp_path / "out", options, dtype=dtype, jobs=3)
    wanted = cast(model.tensors, _TORCH[dtype], {*model.buffers})
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)
    counted = {(one.kind.value, one.tensor, one.count, one.accepted) for one in report.findings}
    of_fp16 = {("fp16-overflow", "big", 2, False), ("fp16-underflow", "tiny", 50, False)}
    assert counted == {
        *(("nan", "big", 1, False), ("inf", "big", 2, False), ("nan", "g", 1, False)),
        *(("all-zero", "f", 3, True), ("all-zero", "b", 2, True)),
        *(of_fp16 if dtype is ExportDType.FP16 else ()),
    }
