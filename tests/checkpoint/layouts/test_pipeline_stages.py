"""Checkpoints of several pipeline stages become the tensors that the engines held."""

from __future__ import annotations

import shutil
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import Tensors, edit
from tests.support.checkpoints import values as numbers
from tests.support.model_parallel import (
    cases,
    described,
    joined_stages,
    save_grid,
    tag_dir,
    truth,
    unequal,
    values,
)
from tests.support.oracles import differences
from zexport.checkpoint.contents import Role
from zexport.checkpoint.layouts.pipeline_masters import order_slices
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsupportedError,
)
from zexport.ranges.dtypes import DType
from zexport.ranges.replicas import CastReplica, Replica

_FIXTURES = {case.name: case for case in cases("pp2_")}
_Slices = list[dict[str, tuple[int, int]]]


@pytest.mark.parametrize("case", _FIXTURES.values(), ids=list(_FIXTURES))
def test_every_tensor_is_what_the_engines_held(case: Path) -> None:
    inventory = joined_stages(tag_dir(case))
    roles = {tensor.name: tensor.role for tensor in inventory.tensors}
    assert differences(values(inventory), truth(case)) == []
    assert {name for name, role in roles.items() if role is Role.FROZEN} == set(
        described(case)["frozen"]
    )
    assert all(roles[name] is Role.BUFFER for name in described(case)["buffers"])
    assert inventory.left_out == ()
    assert unequal(inventory.replicas) == []


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tag_dir(_FIXTURES[name]), tmp_path / "tag"))


def test_a_tied_layer_is_exported_once_and_compared_with_its_other_stage(tmp_path: Path) -> None:
    def drift(state: dict[str, Any]) -> None:
        state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0][-1] += 1

    folder = saved_grid(tmp_path / "tag", _MEGATRON)
    for rank in (2, 3):
        edit(folder / f"zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt", drift)
    inventory = joined_stages(folder)
    name = "tied_modules.embed.position_embeddings.weight"
    assert [tensor.name for tensor in inventory.tensors].count(name) == 1
    assert unequal(inventory.replicas) == [name]


@pytest.mark.parametrize(
    ("name", "lost", "problem"),
    [
        ("pp2_z1_w4_bf16_tied", "layer_02-*", "lacks 1 layer files.*layer_02-model_states.pt"),
        ("pp2_z1_w4_bf16_tied", "layer_*", "lacks the layer files"),
        ("pp2_z1_w4_bf16_tied", "mp_rank_01_*", "pipeline stages 1 "),
        ("pp2_z1_w4_bf16_tied", "*mp_rank_01_*", "pipeline stages 1 "),
        ("pp2_z0_w4_bf16_tied", "*zero_pp_rank_1_mp_rank_01_*", "optimizer files, of rank 1"),
        ("pp2_z0_w4_bf16_tied", "*zero_pp_rank_*", "one data-parallel rank alone"),
    ],
)
def test_what_is_missing_is_named(name: str, lost: str, problem: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    for path in folder.glob(lost):
        path.unlink()
    with pytest.raises(IncompleteCheckpointError, match=problem):
        joined_stages(folder)


def test_a_missing_layer_of_weights_that_nothing_names_is_noticed(tmp_path: Path) -> None:
    folder = copied("pp2_z0_w4_fp32", tmp_path)
    (folder / "layer_06-model_states.pt").unlink()
    with pytest.raises(UnsupportedError, match="fewer weights than its optimizers step"):
        joined_stages(folder)


@pytest.mark.parametrize("case", ["pp2_z0_w4_fp32", "pp2_z0_w4_fp32_tied"])
@pytest.mark.parametrize("layer", [0, 1, 5])
def test_a_layer_file_of_another_run_is_known_by_its_shapes(
    case: str, layer: int, tmp_path: Path
) -> None:
    folder = copied(case, tmp_path)
    assert joined_stages(folder).tensors

    def wider(state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            state[name] = torch.ones(*(size + 1 for size in tensor.shape))

    edit(folder / f"layer_{layer:02d}-model_states.pt", wider)
    with pytest.raises(DamagedCheckpointError, match="has layer files of another run"):
        joined_stages(folder)


def test_projected_moments_tell_nothing_of_the_shapes_of_weights(tmp_path: Path) -> None:
    def project(state: dict[str, Any]) -> None:
        for one in state["optimizer"]["state"].values():
            one.update({key: torch.ones(3, 2) for key in ("exp_avg", "exp_avg_sq")}, projector=None)

    folder = copied("pp2_z0_w4_fp32", tmp_path)
    expected = values(joined_stages(folder))
    for path in folder.glob("mp_rank_*"):
        edit(path, project)
    assert differences(values(joined_stages(folder)), expected) == []


def test_a_tied_layer_with_one_file_may_stand_beside_frozen_weights(tmp_path: Path) -> None:
    folder = copied("pp2_z0_w4_fp32_tied", tmp_path)
    count = len(joined_stages(folder).tensors)
    frozen = {f"frozen.{number}": torch.ones(5, 3) for number in range(4)}
    edit(folder / "layer_01-model_states.pt", lambda state: state.update(frozen))
    assert len(joined_stages(folder).tensors) == count + len(frozen)


@pytest.mark.parametrize("layer", [0, 1, 2, 4, 5])
def test_a_missing_layer_is_not_taken_for_a_tied_one(layer: int, tmp_path: Path) -> None:
    folder = copied("pp2_z0_w4_fp32_tied", tmp_path)
    assert joined_stages(folder).tensors
    (folder / f"layer_{layer:02d}-model_states.pt").unlink()
    problem = r"fewer weights than its optimizers step|lacks 1 layer files"
    with pytest.raises((UnsupportedError, IncompleteCheckpointError), match=problem):
        joined_stages(folder)


def _without_moments(state: dict[str, Any]) -> None:
    state["optimizer"]["state"] = {}


def _keep(state: dict[str, Any], count: int, value: float) -> None:
    """Leave moments to so many parameters alike, every moment with this value."""
    of_all = state["optimizer"]["state"]
    alike = [n for n, one in of_all.items() if one["exp_avg"].shape == (6,)][:count]
    state["optimizer"]["state"] = {n: of_all[n] for n in alike}
    for number in alike:
        for key in ("exp_avg", "exp_avg_sq"):
            of_all[number][key].fill_(value)


def _untouched(state: dict[str, Any]) -> None:
    _keep(state, 1, 0)


def _all_alike(state: dict[str, Any]) -> None:
    _keep(state, 2, 1)


@pytest.mark.parametrize("change", [_without_moments, _untouched, _all_alike])
def test_a_tied_layer_that_no_moments_tell_is_refused(change: object, tmp_path: Path) -> None:
    folder = copied("pp2_z0_w4_fp32_tied", tmp_path)
    for path in folder.glob("mp_rank_*"):
        edit(path, change)
    with pytest.raises(UnsupportedError, match="fewer weights than its optimizers step"):
        joined_stages(folder)


def test_a_tied_layer_with_two_files_hides_no_missing_one(tmp_path: Path) -> None:
    folder = copied("pp2_z0_w4_fp32_tied", tmp_path)
    for path in folder.glob("layer_*"):
        edit(path, lambda state: state.pop("seen", None))
    for path in folder.glob("mp_rank_*"):
        edit(path, lambda state: state.update(buffer_names=[]))
    assert joined_stages(folder).tensors
    tied = torch.load(folder / "layer_00-model_states.pt", weights_only=False)
    block = torch.load(folder / "layer_05-model_states.pt", weights_only=False)
    surplus = {f"more.{n}": torch.ones(n + 2) for n in range(len(block) - 1)}
    torch.save(tied | surplus, folder / "layer_06-model_states.pt")
    (folder / "layer_05-model_states.pt").unlink()
    with pytest.raises(UnsupportedError, match="fewer weights than its optimizers step"):
        joined_stages(folder)


def test_masters_that_are_of_no_layer_are_refused(tmp_path: Path) -> None:
    def unfused(state: dict[str, Any]) -> None:
        state["optimizer"] = {"optimizer_state_dict": {}, "fp32_groups": [[torch.ones(3)]]}

    folder = copied("pp2_z0_w4_fp32", tmp_path)
    for path in folder.glob("mp_rank_*"):
        edit(path, unfused)
    with pytest.raises(UnsupportedError, match="cannot be told apart"):
        joined_stages(folder)


@pytest.mark.parametrize("layer", [0, 1, 6])
def test_a_missing_layer_of_masters_without_names_is_noticed(layer: int, tmp_path: Path) -> None:
    folder = copied("pp2_z0_w4_fp16", tmp_path)
    (folder / f"layer_{layer:02d}-model_states.pt").unlink()
    with pytest.raises((IncompleteCheckpointError, UnsupportedError)):
        joined_stages(folder)


def test_the_masters_of_another_stage_are_not_taken_for_tied_ones(tmp_path: Path) -> None:
    folder = copied("pp2_z0_w4_fp16", tmp_path)
    first = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["optimizer"]
    edit(folder / "mp_rank_01_model_states.pt", lambda state: state.update(optimizer=first))
    with pytest.raises(UnsupportedError, match="although an earlier stage does"):
        joined_stages(folder)


def test_unnamed_masters_of_a_tied_layer_are_compared_among_the_stages(tmp_path: Path) -> None:
    folder = copied("pp2_z0_w4_fp16_tied", tmp_path)

    def diverge(state: dict[str, Any]) -> None:
        master = state["optimizer"]["fp32_groups"][0][0].data
        master.copy_(torch.nextafter(master, torch.zeros(())))

    edit(folder / "mp_rank_01_model_states.pt", diverge)
    joined = joined_stages(folder)
    assert unequal(joined.replicas) == ["0.weight"]
    assert any("of a tied layer" in note for note in joined.notes)


def test_all_of_an_unnamed_master_is_compared_with_the_weight_that_it_is_taken_for(
    tmp_path: Path,
) -> None:
    joined = joined_stages(copied("pp2_z0_w4_fp16", tmp_path))
    casts = [one for one in joined.replicas if isinstance(one, CastReplica)]
    assert len(casts) == 17
    assert all(one.names_it for one in casts)


def test_weights_of_a_stage_that_are_alike_have_rounded_values_and_are_named(
    tmp_path: Path,
) -> None:
    folder = copied("pp2_z0_w4_fp16", tmp_path)
    edit(
        folder / "layer_02-model_states.pt",
        lambda state: state.update({"fc.bias": state["norm.bias"].clone()}),
    )
    joined = joined_stages(folder)
    halves = {t.name for t in joined.tensors if t.dtype is DType.F16 and t.role is not Role.BUFFER}
    assert halves == {"2.norm.bias", "2.fc.bias", "2.fc.weight"}
    (note,) = (note for note in joined.warnings if "rounded to float16" in note)
    assert note.endswith(": 2.norm.bias, 2.fc.weight, 2.fc.bias")


def test_a_layer_file_under_another_name_is_refused(tmp_path: Path) -> None:
    folder = copied("pp2_z1_w4_bf16_tied", tmp_path)
    (folder / "layer_01-model_states.pt").rename(folder / "layer_04-model_states.pt")
    with pytest.raises(DamagedCheckpointError, match="another name"):
        joined_stages(folder)


@pytest.mark.parametrize("layer", ["01", "04"])
def test_a_layer_file_with_others_in_the_place_of_its_weights_is_refused(
    layer: str, tmp_path: Path
) -> None:
    folder = copied("pp2_z1_w4_bf16_tied", tmp_path)
    foreign = torch.load(tag_dir(_FIXTURES["pp2_z0_w4_fp16"]) / "layer_06-model_states.pt")
    edit(
        folder / f"layer_{layer}-model_states.pt",
        lambda state: (state.clear(), state.update(foreign)),
    )
    with pytest.raises(DamagedCheckpointError, match=rf"layer_{layer}.*lacks weights that layer"):
        joined_stages(folder)


def test_a_layer_may_call_its_weights_otherwise_in_its_file(tmp_path: Path) -> None:
    folder = copied("pp2_z1_w4_bf16_tied", tmp_path)
    edit(
        folder / "layer_01-model_states.pt",
        lambda state: [state.update({f"inner.{key}": state.pop(key)}) for key in list(state)],
    )
    known, expected = values(joined_stages(folder)), truth(_FIXTURES["pp2_z1_w4_bf16_tied"])
    assert torch.equal(known["1.fc.weight"], expected["1.fc.weight"])


def test_a_layer_taken_for_a_tied_one_is_compared_with_it(tmp_path: Path) -> None:
    folder = copied("pp2_z1_w4_bf16_tied", tmp_path)
    edit(folder / "layer_00-model_states.pt", lambda state: state["weight"].neg_())
    assert unequal(joined_stages(folder).replicas) == ["tied_modules.embed.weight"]


def test_a_layer_that_may_be_tied_or_frozen_is_refused(tmp_path: Path) -> None:
    folder = copied("pp2_z1_w4_bf16_tied", tmp_path)
    edit(folder / "layer_00-model_states.pt", lambda state: state.update(bias=torch.ones(2)))
    with pytest.raises(UnsupportedError, match="tied layer, or a frozen layer"):
        joined_stages(folder)


# --- a grid of stages and tensor ranks, with the records that Megatron-DeepSpeed writes ---

_MEGATRON = {
    "universal_checkpoint_version": 0.2,
    "vocabulary_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
    "tp_replicated_parameter_patterns": [
        r"\d+.norm.weight",
        r"tied_modules.embed.position_embeddings.weight",
    ],
    "parameter_with_row_parallelism_patterns": [r"\d+.mlp.dense_4h_to_h.weight"],
}
_DIMS = {"dense_4h_to_h.weight": 1, "dense_h_to_4h.weight": 0, "word_embeddings.weight": 0}


def whole_grid() -> list[Tensors]:
    """Two stages; both have the tied embedding."""
    tied = {
        "tied_modules.embed.word_embeddings.weight": numbers((10, 4), 1),
        "tied_modules.embed.position_embeddings.weight": numbers((3, 4), 2),
    }
    layers = [
        {
            f"{n}.norm.weight": numbers((4,), 10 + n),
            f"{n}.mlp.dense_h_to_4h.weight": numbers((8, 4), 20 + n),
            f"{n}.mlp.dense_4h_to_h.weight": numbers((4, 8), 30 + n),
        }
        for n in (1, 2)
    ]
    return [{**tied, **layers[0]}, {**layers[1], **tied}]


def shard(name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
    dim = _DIMS.get(".".join(name.split(".")[-2:]))
    return value if dim is None else value.chunk(2, dim)[rank].contiguous()


def saved_grid(folder: Path, info: dict[str, Any] | None) -> Path:
    stages = whole_grid()
    places = [(stage, rank) for stage in range(2) for rank in range(2)]
    shards = {
        (s, t): {name: shard(name, value, t) for name, value in stages[s].items()}
        for s, t in places
    }
    buffers = {(s, t): {f"{s + 1}.seen": torch.tensor([2**40 + s])} for s, t in places}
    return save_grid(folder, shards, buffers, info, 2)


def test_a_grid_of_stages_and_tensor_ranks_is_joined_both_ways(tmp_path: Path) -> None:
    inventory = joined_stages(saved_grid(tmp_path / "tag", _MEGATRON))
    expected = whole_grid()[0] | whole_grid()[1]
    expected |= {f"{s + 1}.seen": torch.tensor([2**40 + s]) for s in range(2)}
    assert differences(values(inventory), expected) == []
    assert unequal(inventory.replicas) == []
    equal = {one.name for one in inventory.replicas if isinstance(one, Replica)}
    assert len(equal) == 6  # tied, norms, buffers


def test_a_grid_without_a_record_of_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not record how"):
        joined_stages(saved_grid(tmp_path / "tag", None))


@pytest.mark.parametrize("index", range(4))
def test_a_stages_tensor_ranks_must_record_the_same_splits(index: int, tmp_path: Path) -> None:
    folder = saved_grid(tmp_path / "tag", _MEGATRON)
    key = "parameter_with_row_parallelism_patterns"
    edit(
        folder / f"mp_rank_{index:02d}_model_states.pt",
        lambda state: state["universal_checkpoint_info"][key].clear(),
    )
    with pytest.raises(DamagedCheckpointError, match=r"mlp.dense_4h_to_h.weight' is split over"):
        joined_stages(folder)


def test_a_layer_file_of_one_tensor_rank_is_missed(tmp_path: Path) -> None:
    folder = saved_grid(tmp_path / "tag", _MEGATRON)
    (folder / "layer_02-model_01-model_states.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"layer_02-model_01-model_states\.pt"):
        joined_stages(folder)


# --- slices ---


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_slices_in_rank_order_give_names_and_sizes_back(numels: list[int], world: int) -> None:
    size = -(-sum(numels) // world)
    starts = [0, *accumulate(numels)]
    slices: _Slices = [{} for _ in range(world)]
    for number, numel in enumerate(numels):
        for rank in range(world):
            first = max(starts[number], rank * size)
            last = min(starts[number] + numel, (rank + 1) * size)
            if first < last:
                slices[rank][f"p{number}"] = (first - rank * size, last - first)
    assert list(order_slices(slices, size).items()) == [(f"p{i}", n) for i, n in enumerate(numels)]


@pytest.mark.parametrize(
    "slices",
    [
        [{"a": (1, 3)}, {}],
        [{"a": (0, 2), "b": (3, 1)}, {}],
        [{"a": (0, 3), "b": (2, 2)}, {}],
        [{"a": (0, 5)}, {}],
        [{"a": (0, 2), "b": (2, 2)}, {"a": (0, 1)}],
        [{"a": (0, 4)}, {"b": (1, 3)}],
        [{"a": (0, -1)}, {}],
    ],
)
def test_slices_that_do_not_follow_one_another_are_refused(slices: _Slices) -> None:
    with pytest.raises(LayoutError, match="does not follow"):
        order_slices(slices, 4)
