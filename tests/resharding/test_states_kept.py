"""Every master and moment of real checkpoints, cut anew: the same by name, as torch reads them."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Model, Run, edit, save, values
from tests.support.oracles import same
from tests.support.raw_states import plain, raw_states, universal_states
from tests.support.real_cases import FIXTURES
from tests.support.sparse_checkpoint import write_sparse_zero3
from zexport import (
    DamagedCheckpointError,
    ExportOptions,
    NameLayout,
    ReshardOptions,
    ResumeFormat,
    TrainingState,
    consolidate,
    open_checkpoint,
    run_export,
)

_MOVES = [
    ("z1_w2_bf16_frozen", 3, 3),  # frozen weights that no table names
    ("z1_w2_bf16opt", 3, 4),
    ("z2_w2_bf16_groups", 3, 3),
    ("z2_w2_bf16_late", 3, 3),  # frozen after some training
    ("z2_w2_bf16_tied", 1, 1),
    ("z2_w3_bf16_odd", 2, 5),
    ("z3_w2_bf16_frozen", 2, 3),
    ("z3_w2_bf16_sub1000", 3, 4),
    ("z3_w3_bf16_tied", 1, 2),
    ("z3_w4_bf16_odd", 3, 1),
    ("tp2_z1_w2_bf16_one_head", 3, 3),  # weights without an element on one tensor rank
    ("tp2_z2_w4_bf16", 2, 3),
    ("pp2_tp2_z1_w8_bf16_tied", 1, 3),
]


def _reshard(root: Path, out: Path, stage: int, world_size: int) -> TrainingState:
    plan = zexport.plan_reshard(
        open_checkpoint(root), out, ReshardOptions(world_size=world_size, stage=stage)
    )
    run_export(plan)
    return open_checkpoint(out)


@pytest.mark.parametrize("name", ["z2_w2_bf16_groups", "z3_w3_bf16_tied"])
def test_a_buffer_under_two_names_keeps_its_value_under_both(name: str, tmp_path: Path) -> None:
    """DeepSpeed's ``buffer_names`` have only the first, because torch lists each buffer once."""
    root = shutil.copytree(FIXTURES / name / "ckpt", tmp_path / "run")
    value = torch.tensor([7, 6e4]).to(torch.uint16)
    for path in root.glob("*/*model_states.pt"):
        states = torch.load(path, weights_only=False)
        states["buffer_names"].append("scale")
        states["module"] |= {"scale": value, "again": value}
        torch.save(states, path)
    assert open_checkpoint(root).aliases["again"] == "scale"
    _reshard(root, tmp_path / "out", 3, 3)
    for states in _files(tmp_path / "out", "*model_states.pt"):
        assert same(states["module"]["scale"], value)
        assert same(states["module"]["again"], value)
    consolidate(root, tmp_path / "model", ExportOptions(layout=NameLayout.MEMORY))
    assert same(load_file(tmp_path / "model" / "model.safetensors")["scale"], value)


def _states_of_cells(tag_dir: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The states of every model-parallel index, each in a folder of its own."""
    found: dict[str, torch.Tensor] = {}
    for index in {path.name.split("mp_rank_")[1][:2] for path in tag_dir.glob("*_optim_states.pt")}:
        folder = tmp_path / tag_dir.parent.name / index
        folder.mkdir(parents=True)
        for path in tag_dir.glob(f"*mp_rank_{index}_*"):
            (folder / path.name).symlink_to(path)
        states = raw_states(folder)
        found |= {f"{index} {name}": state for name, state in states.items()}
    return found


def _files(root: Path, pattern: str) -> list[Any]:
    return [torch.load(path, weights_only=False) for path in sorted(root.glob(f"*/{pattern}"))]


@pytest.mark.parametrize(("name", "stage", "world_size"), _MOVES)
def test_every_state_is_equal_at_another_world_size_or_stage(
    name: str, stage: int, world_size: int, tmp_path: Path
) -> None:
    source = open_checkpoint(FIXTURES / name / "ckpt")
    found = _reshard(FIXTURES / name / "ckpt", tmp_path / "out", stage, world_size)
    assert (found.stage, found.world_size, found.problems) == (stage, world_size, ())
    assert {t.name: (t.shape, t.role) for t in found.tensors} == {
        t.name: (t.shape, t.role) for t in source.tensors
    }
    assert found.aliases == source.aliases
    before = _states_of_cells(source.location.tag_dir, tmp_path / "before")
    after = _states_of_cells(found.location.tag_dir, tmp_path / "after")
    assert before.keys() == after.keys()
    assert not [state for state in before if not same(before[state], after[state])]


@pytest.mark.parametrize(
    "name", ["z0_w1_fp32_odd", "z0_w2_bf16_fused", "z0_w2_bf16_groups", "z0_w2_fp16"]
)
def test_run_without_zero_reshards_to_zero(name: str, tmp_path: Path) -> None:
    root = FIXTURES / name / "ckpt"
    found = _reshard(root, tmp_path / "out", 2, 3)
    (model,) = _files(tmp_path / "out", "mp_rank_00_model_states.pt")
    order = [list(shapes) for shapes in model["param_shapes"]]
    before = raw_states(open_checkpoint(root).location.tag_dir, order)
    after = raw_states(found.location.tag_dir)
    assert before.keys() == after.keys()
    assert not [state for state in before if not same(before[state], after[state])]


@pytest.mark.parametrize(
    ("name", "stage"), [("uni_z2_w2_bf16_odd", 3), ("uni_z3_w2_bf16_frozen", 2)]
)
def test_a_universal_checkpoint_becomes_rank_files_again(
    name: str, stage: int, tmp_path: Path
) -> None:
    source = open_checkpoint(FIXTURES / name / "ckpt")
    found = _reshard(FIXTURES / name / "ckpt", tmp_path / "out", stage, 3)
    assert {t.name: (t.shape, t.role) for t in found.tensors} == {
        t.name: (t.shape, t.role) for t in source.tensors
    }
    states = raw_states(found.location.tag_dir)
    assert {state.split("|")[1] for state in states} == {"fp32", "step", "exp_avg", "exp_avg_sq"}
    for state, saved in universal_states(source.location.tag_dir).items():
        if state in states:  # not buffers and frozen weights
            value = states[state]
            assert torch.equal(
                saved.reshape(-1)[: value.numel()].to(value.dtype), value.reshape(-1)
            ), state


def test_resharding_twice_equals_the_source(tmp_path: Path) -> None:
    root = FIXTURES / "z3_w2_bf16_frozen" / "ckpt"
    _reshard(root, tmp_path / "there", 2, 3)
    _reshard(tmp_path / "there", tmp_path / "back", 3, 2)
    for pattern in ("*_model_states.pt", "*_optim_states.pt"):
        pairs = zip(_files(root, pattern), _files(tmp_path / "back", pattern), strict=True)
        for one, other in pairs:
            for file in (one, other):
                file["ds_config"]["zero_optimization"] = {}
                file.get("optimizer_state_dict", {}).pop("loss_scaler", None)
            assert plain(one) == plain(other)


def _edit(root: Path, rank: int, change: Callable[[Any], object]) -> None:
    """Change what the wrapped optimizer of a rank recorded."""
    (path,) = root.glob(f"*/*rank_{rank}_*_optim_states.pt")
    edit(path, lambda state: change(state["optimizer_state_dict"]["base_optimizer_state"]))


def _muon_run(root: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Write a ZeRO-2 run; return the momentum of matrices, whole on ranks with a part of them."""
    shapes = {"wide": (3, 7), "none": (0, 4), "tall": (9, 2), "last": (2, 3)}
    matrices = {name: values(shape, at) for at, (name, shape) in enumerate(shapes.items())}
    momentum = {name: one.neg().bfloat16().reshape(-1) for name, one in matrices.items()}
    run = Run(stage=2, world_size=world_size, optimizer_step=None)
    save(Model([{"bias": values((5,), 9)}, matrices]), run, root)
    full = -(-sum(map(len, momentum.values())) // (2 * world_size)) * 2
    for rank in range(world_size):
        own, end = [torch.empty(0, dtype=torch.bfloat16)], 0
        for one in momentum.values():
            begin, end = end, end + len(one)
            own += [one] if begin < (rank + 1) * full and end > rank * full else []

        def change(inner: Any, own: list[torch.Tensor] = own) -> None:
            every = enumerate((inner["state"][0]["exp_avg"], torch.cat(own)))
            inner["state"] = {number: {"momentum_buffer": one} for number, one in every}
            inner["param_groups"] = [{"use_muon": bool(n), "params": [n]} for n in (0, 1)]

        _edit(root, rank, change)
    return {f"{name}|momentum_buffer": one for name, one in momentum.items()}


@pytest.mark.parametrize("world_size", [1, 9])
def test_momentum_of_muon_is_kept_in_every_form(world_size: int, tmp_path: Path) -> None:
    momentum = _muon_run(tmp_path / "0", world_size)
    before = raw_states(tmp_path / "0" / "global_step2") | momentum
    for number, (stage, ranks) in enumerate([(1, 2), (3, 3), (2, 4)]):
        found = _reshard(tmp_path / f"{number}", tmp_path / f"{number + 1}", stage, ranks)
        after = raw_states(found.location.tag_dir)
        assert before.keys() == after.keys()
        assert not [state for state in before if not same(before[state], after[state])]
    universal = ReshardOptions(format=ResumeFormat.UNIVERSAL)
    run_export(zexport.plan_reshard(found, tmp_path / "universal", universal))
    after = universal_states(tmp_path / "universal" / "global_step2")
    assert not [state for state in momentum if not same(momentum[state], after[state])]


def test_momentum_of_muon_fits_the_matrices_and_is_equal_on_all_ranks(tmp_path: Path) -> None:
    root = tmp_path / "run"
    _muon_run(root, 2)
    _edit(root, 1, lambda inner: inner["state"][1]["momentum_buffer"][0].add_(1))
    with pytest.raises(DamagedCheckpointError, match=r"tall \(momentum_buffer\) differ"):
        _reshard(root, tmp_path / "out", 2, 3)
    _edit(root, 1, lambda inner: inner["state"][1].update(momentum_buffer=torch.ones(7)))
    with pytest.raises(DamagedCheckpointError, match=r"does not fit .* 28 bytes"):
        _reshard(root, tmp_path / "out", 2, 3)
    for rank in (0, 1):  # before the first step
        _edit(root, rank, lambda inner: inner["state"].clear())
    assert _reshard(root, tmp_path / "out", 2, 3).problems == ()


@pytest.mark.parametrize(
    ("name", "run", "table"),
    [
        ("base_model.model.lora_A", Run(stage=1), None),
        ("lora_A", Run(stage=1), {}),
        ("lora_A", Run(stage=2, exclude_frozen=True), None),
    ],
)
def test_loss_scale_clipping_and_possible_exclusion_of_frozen_weights_are_kept(
    name: str, run: Run, table: object, tmp_path: Path
) -> None:
    """The Trainer excludes the base model of PEFT; ZeRO-1 does not record that."""
    save(Model([{name: values((3,), 1)}]), run, tmp_path / "run")
    _reshard(tmp_path / "run", tmp_path / "out", 2, 1)
    (states,) = _files(tmp_path / "out", "*model_states.pt")
    assert states["frozen_param_shapes"] == table
    (states,) = _files(tmp_path / "out", "*optim_states.pt")
    own = states["optimizer_state_dict"]
    assert (own["loss_scaler"].cur_scale, own["clip_grad"]) == (128, 1)


_ANYWHERE = st.tuples(st.integers(1, 3), st.integers(1, 9))


@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from(
        ["z1_w2_bf16opt", "z2_w3_bf16_odd", "z3_w2_bf16_sub1000", "z3_w3_bf16_tied"]
    ),
    there=_ANYWHERE,
    on=_ANYWHERE,
)
def test_every_state_is_equal_after_any_two_reshardings(
    name: str, there: tuple[int, int], on: tuple[int, int]
) -> None:
    with TemporaryDirectory() as folder:
        root = FIXTURES / name / "ckpt"
        _reshard(root, Path(folder, "there"), *there)
        found = _reshard(Path(folder, "there"), Path(folder, "on"), *on)
        before = raw_states(open_checkpoint(root).location.tag_dir)
        after = raw_states(found.location.tag_dir)
        assert before.keys() == after.keys()
        assert not [state for state in before if not same(before[state], after[state])]


def test_memory_does_not_grow_with_the_world_size(tmp_path: Path) -> None:
    """Nothing of a written rank file stays in memory."""
    write_sparse_zero3(tmp_path / "run", {f"layers.{i}.weight": (40,) for i in range(40)}, 12)
    checkpoint = open_checkpoint(tmp_path / "run")
    peaks = []
    for ranks in (8, 32):
        plan = zexport.plan_reshard(
            checkpoint, tmp_path / f"on-{ranks}", ReshardOptions(world_size=ranks)
        )
        tracemalloc.start()
        run_export(plan)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
