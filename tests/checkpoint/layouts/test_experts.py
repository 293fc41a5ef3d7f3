"""Checkpoints with experts, made up and real, read byte for byte against the whole model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.expert_checkpoints import MoeRun, expert_file, prefix, rewrite, save_moe, truth
from tests.support.model_parallel import assembled, unequal
from zexport.checkpoint.contents import Inventory, Role, StoredTensor
from zexport.checkpoint.find import locate
from zexport.checkpoint.layouts.structure import Structure
from zexport.checkpoint.opening import open_checkpoint
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, UnsupportedError
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource
from zexport.ranges.replicas import CastReplica, compare_casts
from zexport.weights.autoep_experts import fuse_experts, with_original_names
from zexport.weights.named import Weights

_FIXTURES = Path(__file__).parents[3] / "fixtures"
_FOLDERS = [_FIXTURES, *(Path(own) for own in [os.environ.get("ZEXPORT_CASES")] if own)]
_CASES = [
    pytest.param(file.parent, id=f"{file.parent.parent.name}-{file.parent.name}")
    for folder in _FOLDERS
    for file in sorted(folder.glob("*/case.json"))
    if file.parent.name.startswith(("moe_", "autoep_"))
]


def inventory_of(tag_dir: Path) -> Inventory:
    return assembled(tag_dir, Structure.EXPERTS)


def read(source: ByteSource | None) -> bytes:
    assert source is not None
    parts = []
    for extent in source.extents(0, source.nbytes):
        descriptor = os.open(extent.path, os.O_RDONLY)
        parts.append(os.pread(descriptor, extent.nbytes, extent.offset))
        os.close(descriptor)
    return b"".join(parts)


def read_into(source: ByteSource, start: int, buffer: memoryview) -> None:
    """Read a source without looking at checksums."""
    buffer[:] = read(source)[start : start + len(buffer)]


def facts(inventory: Inventory | Weights) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = inventory.tensors
    tensors = found if isinstance(found, tuple) else found.values()
    return {t.name: (t.dtype.torch_name, t.shape, read(t.source)) for t in tensors}


def weights_of(inventory: Inventory) -> Weights:
    tensors = {tensor.name: tensor for tensor in inventory.tensors}
    return Weights(tensors, inventory.aliases, inventory.left_out)


def facts_of(
    tensors: dict[str, torch.Tensor], *, without: object = ()
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    assert hasattr(without, "__contains__")
    return {
        name: (
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, value in tensors.items()
        if name not in without
    }


# --- real ones ---


@pytest.mark.parametrize("case", _CASES)
def test_a_real_checkpoint_gives_the_live_weights_bit_for_bit(case: Path) -> None:
    described = json.loads((case / "case.json").read_text())
    inventory = inventory_of(locate(case / "ckpt", None).tag_dir)
    assert facts(inventory) == facts_of(
        load_file(case / "truth.safetensors"), without=inventory.aliases
    )
    assert inventory.aliases == described["tied"]
    assert inventory.left_out == ()
    roles = {tensor.name: tensor.role for tensor in inventory.tensors}
    assert {n for n, r in roles.items() if r is Role.FROZEN} == set(described["frozen"])
    assert {n for n, r in roles.items() if r is Role.BUFFER} == set(described["buffers"])
    assert unequal(inventory.replicas) == []


@pytest.mark.parametrize(
    "case",
    [case for case in _CASES if (Path(str(case.values[0])) / "truth.hf.safetensors").exists()],
)
def test_fused_experts_are_those_of_the_hugging_face_model(case: Path) -> None:
    truth = load_file(case / "truth.hf.safetensors")
    fused = fuse_experts(weights_of(inventory_of(locate(case / "ckpt", None).tag_dir)))
    named = with_original_names(fused, {name: tuple(one.shape) for name, one in truth.items()})
    assert facts(named) == facts_of(truth)
    assert named.aliases == {}


def layer_of(shapes: dict[str, tuple[int, ...]]) -> Inventory:
    tensors = {"m.experts.gate_up_proj": (2, 4, 3), "m.experts.down_proj": (2, 3, 2), **shapes}
    return Inventory(
        tuple(StoredTensor(n, s, DType.F32, Role.TRAINABLE, None) for n, s in tensors.items()),
        {},
        (),
    )


_EXPERTS_OF_LAYER = {"m.experts.gate_up_proj": (2, 4, 3), "m.experts.down_proj": (2, 3, 2)}


@pytest.mark.parametrize(
    ("stored", "original"),
    [
        pytest.param(
            {"m.shared_experts.up": (3, 3), "m.shared_experts_gate.weight": (1, 3)},
            {"m.shared_expert.up": (3, 3), "m.shared_expert_gate.weight": (1, 3)},
            id="two children at once",
        ),
        pytest.param(
            {"m.gate.weight": (2, 3), "m.gate.bias_of_scores": (2,)},
            {"m.gate.weight": (2, 3), "m.bias_of_scores": (2,)},
            id="a tensor that lay in the layer itself",
        ),
        pytest.param(
            {"m.gate.weight": (2, 3)}, {"m.chooser.weight": (2, 3)}, id="a router of another name"
        ),
    ],
)
def test_children_that_autoep_renamed_get_the_models_names_back(
    stored: dict[str, tuple[int, ...]], original: dict[str, tuple[int, ...]]
) -> None:
    named = with_original_names(weights_of(layer_of(stored)), {**_EXPERTS_OF_LAYER, **original})
    assert list(named.tensors) == [*_EXPERTS_OF_LAYER, *original]


def test_a_child_that_may_be_either_of_two_keeps_its_name() -> None:
    stored = {"m.shared_experts.up": (3, 3)}
    original = {"m.one.up": (3, 3), "m.other.up": (3, 3), **_EXPERTS_OF_LAYER}
    named = with_original_names(weights_of(layer_of(stored)), original)
    assert "m.shared_experts.up" in named.tensors


# --- ZeRO-0: masters without names, in a file for each expert-parallel rank ---


def unsharded(tmp_path: Path, name: str = "moe_z0_w2_ep2_bf16") -> Path:
    shutil.copytree(locate(_FIXTURES / name / "ckpt", None).tag_dir, tmp_path / "tag")
    return tmp_path / "tag"


def optimizer_file(folder: Path, ep_rank: int) -> Path:
    return folder / f"expp_rank_{ep_rank}_mp_rank_00_optim_states.pt"


def unnamed(state: dict[str, Any]) -> None:
    for group in state["optimizer"]["optimizer_state_dict"]["param_groups"]:
        group.pop("name")


def with_second_experts_w2_zero(tmp_path: Path) -> Path:
    """AutoEP's experts of rank 1 look alike in both layers, as if they had never been routed to."""
    folder = unsharded(tmp_path, "autoep_z0_w2_ep2")

    def zero(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".w2." in name:
                tensor.zero_()

    def zero_masters(state: dict[str, Any]) -> None:
        experts = [m for g in state["optimizer"]["fp32_groups"] for m in g if m.dim() == 3]
        (shape,) = {m.shape for m in experts if [n.shape for n in experts].count(m.shape) == 2}
        for master in experts:
            if master.shape == shape:
                master.zero_()

    for file in folder.glob("layer_*_expert_[23]_*"):
        rewrite(file, zero)
    rewrite(optimizer_file(folder, 1), zero_masters)
    return folder


def test_experts_that_one_rank_cannot_tell_apart_keep_the_modules_values_on_all(
    tmp_path: Path,
) -> None:
    folder = with_second_experts_w2_zero(tmp_path)
    taken = inventory_of(folder)
    low = {tensor.name for tensor in taken.tensors if tensor.dtype is DType.BF16}
    assert low == {f"model.layers.{layer}.mlp.experts.w2" for layer in (0, 1)}
    assert {tensor.role for tensor in taken.tensors} == {Role.TRAINABLE}
    assert taken.problems == ()
    assert taken.warnings == (
        "ZeRO-0: 2 weights have the module's values, rounded to bfloat16, because several weights "
        "look like one fp32 master ('model.layers.0.mlp.experts.w2' and "
        "'model.layers.1.mlp.experts.w2' alike): model.layers.0.mlp.experts.w2, "
        "model.layers.1.mlp.experts.w2",
    )
    casts = [one for one in taken.replicas if isinstance(one, CastReplica)]
    assert compare_casts(casts, read_into, full=True) == ()


def test_experts_that_look_alike_hide_no_expert_of_another_save(tmp_path: Path) -> None:
    folder = with_second_experts_w2_zero(tmp_path)
    (file,) = folder.glob("layer_0_expert_2_*")
    rewrite(file, lambda tensors: [tensor.mul_(1.25) for tensor in tensors.values()])
    (problem,) = inventory_of(folder).problems
    assert problem.path == optimizer_file(folder, 1)
    assert "model.layers.0.mlp.experts.w1, model.layers.0.mlp.experts.w3" in str(problem.found)


@pytest.mark.parametrize("lacking", [[0], [1], [0, 1]])
def test_weights_that_are_no_rounded_copies_need_no_file_of_masters(
    lacking: list[int], tmp_path: Path
) -> None:
    folder = unsharded(tmp_path, "moe_z0_w2_ep2_fp32")
    expected = facts(inventory_of(folder))
    for ep_rank in lacking:
        optimizer_file(folder, ep_rank).unlink()
    assert facts(inventory_of(folder)) == expected


@pytest.mark.parametrize("ep_rank", [0, 1])
def test_a_missing_file_of_masters_is_missed_by_the_number_of_ranks(
    ep_rank: int, tmp_path: Path
) -> None:
    folder = unsharded(tmp_path)
    optimizer_file(folder, ep_rank).unlink()
    with pytest.raises(IncompleteCheckpointError, match=f"expp_rank_{ep_rank}_"):
        inventory_of(folder)


def test_a_missing_file_of_masters_is_missed_where_no_group_has_a_name(tmp_path: Path) -> None:
    folder = unsharded(tmp_path)
    optimizer_file(folder, 1).unlink()
    rewrite(optimizer_file(folder, 0), unnamed)
    with pytest.raises(IncompleteCheckpointError, match=r"only one of .*experts\.0.*experts\.2"):
        inventory_of(folder)


@pytest.mark.parametrize("case", ["moe_z0_w2_ep2_bf16", "moe_z0_w2_ep2_bf16_fused"])
@pytest.mark.parametrize("ep_rank", [0, 1])
def test_a_file_of_masters_of_a_run_without_any_is_refused(
    case: str, ep_rank: int, tmp_path: Path
) -> None:
    folder = unsharded(tmp_path, case)
    other = locate(_FIXTURES / "moe_z0_w2_ep2_fp32" / "ckpt", None).tag_dir
    shutil.copy(optimizer_file(other, ep_rank), optimizer_file(folder, ep_rank))
    problem = f"expp_rank_{ep_rank}_.*otherwise than the other .*found no masters"
    with pytest.raises(DamagedCheckpointError, match=problem):
        inventory_of(folder)


def test_a_file_of_masters_that_lost_its_optimizer_is_refused(tmp_path: Path) -> None:
    folder = unsharded(tmp_path, "autoep_z0_w2_ep2")
    rewrite(optimizer_file(folder, 1), lambda state: state.pop("optimizer"))
    with pytest.raises(DamagedCheckpointError, match="otherwise than the other expert-parallel"):
        inventory_of(folder)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("ep_rank", [0, 1])
def test_a_group_that_lost_its_masters_is_refused(group: int, ep_rank: int, tmp_path: Path) -> None:
    folder = unsharded(tmp_path)
    rewrite(optimizer_file(folder, ep_rank), lambda s: s["optimizer"]["fp32_groups"][group].clear())
    problem = f"every parameter of group {group} .found 0, expected"
    with pytest.raises(DamagedCheckpointError, match=problem):
        inventory_of(folder)


@pytest.mark.parametrize("key", ["fp32_groups", "fp32_groups_flat"])
def test_masters_without_any_group_are_refused(key: str, tmp_path: Path) -> None:
    name = "moe_z0_w2_ep2_bf16" + ("_fused" if key == "fp32_groups_flat" else "")
    folder = unsharded(tmp_path, name)
    for ep_rank in (0, 1):
        rewrite(optimizer_file(folder, ep_rank), lambda s: s["optimizer"][key].clear())
    with pytest.raises(DamagedCheckpointError, match="every parameter of group 0"):
        inventory_of(folder)


@pytest.mark.parametrize("ep_rank", [0, 1])
def test_a_dense_master_that_one_rank_alone_lacks_is_missed(ep_rank: int, tmp_path: Path) -> None:
    def without_last(state: dict[str, Any]) -> None:
        state["optimizer"]["fp32_groups"][0].pop()
        state["optimizer"]["optimizer_state_dict"]["param_groups"][0]["params"].pop()

    folder = unsharded(tmp_path)
    rewrite(optimizer_file(folder, ep_rank), without_last)
    problem = f"expp_rank_{ep_rank}_.*lacks the fp32 master of '.*', which another rank has"
    with pytest.raises(DamagedCheckpointError, match=problem):
        inventory_of(folder)


@pytest.mark.parametrize("case", ["moe_z0_w2_ep2_bf16", "moe_z0_w2_ep2_bf16_fused"])
def test_a_model_file_that_lost_its_weights_is_refused(case: str, tmp_path: Path) -> None:
    folder = unsharded(tmp_path, case)
    rewrite(folder / "mp_rank_00_model_states.pt", lambda state: state["module"].clear())
    with pytest.raises(DamagedCheckpointError, match="has no weights beside the experts'"):
        inventory_of(folder)


def test_experts_alone_may_have_masters_and_all_else_be_left_out_of_the_save(
    tmp_path: Path,
) -> None:
    """As with ``exclude_frozen_parameters`` where experts alone are trained."""
    expected = facts(inventory_of(unsharded(tmp_path)))

    def experts_alone(state: dict[str, Any]) -> None:
        state["optimizer"]["fp32_groups"].pop(0)
        state["optimizer"]["optimizer_state_dict"]["param_groups"].pop(0)

    folder = tmp_path / "tag"
    rewrite(folder / "mp_rank_00_model_states.pt", lambda state: state["module"].clear())
    for ep_rank in (0, 1):
        rewrite(optimizer_file(folder, ep_rank), experts_alone)
    kept = {name: one for name, one in expected.items() if ".deepspeed_experts." in name}
    assert facts(inventory_of(folder)) == kept


def test_groups_that_are_not_marked_as_experts_are_told_apart_all_the_same(tmp_path: Path) -> None:
    folder = unsharded(tmp_path)
    expected = facts(inventory_of(folder))
    for ep_rank in (0, 1):
        rewrite(optimizer_file(folder, ep_rank), unnamed)
        rewrite(
            optimizer_file(folder, ep_rank),
            lambda s: s["optimizer"]["optimizer_state_dict"]["param_groups"][1].pop("moe"),
        )
    assert facts(inventory_of(folder)) == expected


def test_masters_of_experts_of_another_step_are_found_out(tmp_path: Path) -> None:
    folder = unsharded(tmp_path)

    def other_step(state: dict[str, Any]) -> None:
        for master in state["optimizer"]["fp32_groups"][1]:
            master.mul_(1.5)

    rewrite(optimizer_file(folder, 1), other_step)
    casts = [one for one in inventory_of(folder).replicas if isinstance(one, CastReplica)]
    found = compare_casts(casts, read_into, full=False)
    assert f"{prefix(0)}.2.up.weight" in {one.replica.name for one in found}


def test_a_matrix_that_is_another_in_all_samples_is_compared_whole(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(100, 100, generator=generator)
    other = table.bfloat16()
    other.view(-1)[5000 - 600] += 1
    trained = {"emb.weight": table, "norm.bias": torch.ones(3)}
    folder = save_unsharded(tmp_path, trained, {"head.weight": other})
    (tie,) = [one for one in inventory_of(folder).replicas if one.name == "head.weight"]
    assert isinstance(tie, CastReplica)
    assert tie.names_it
    (found,) = compare_casts([tie], read_into, full=False)
    assert (found.first, found.count) == (4400, 1)


def test_a_frozen_copy_of_a_trained_module_is_not_tied_to_it(tmp_path: Path) -> None:
    """As in preference training: the policy has moved by less than 16 bits show."""
    policy = {"policy.a.weight": torch.ones(3, 2) + 1e-5, "policy.b.weight": torch.ones(2, 5) * 3}
    kept = {name.replace("policy", "ref"): one.bfloat16() for name, one in policy.items()}
    trained = policy | {"head.weight": torch.ones(4, 4)}
    taken = inventory_of(save_unsharded(tmp_path, trained, kept))
    assert taken.aliases == {}
    assert facts(taken) == facts_of(trained | kept | dict(_ONE_EXPERT))
    assert (
        "a frozen copy of another or tied to it (ref.a.weight, ref.b.weight)" in taken.warnings[0]
    )


_ONE_EXPERT = {f"{prefix(0)}.0.up.weight": torch.full((2, 7), 0.3)}


def save_unsharded(
    folder: Path, trained: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]
) -> Path:
    """One rank's ZeRO-0 run of one expert: ``trained`` with masters, ``kept`` without."""
    masters = trained | _ONE_EXPERT
    model = {
        "module": {name: one.bfloat16() for name, one in trained.items()} | kept,
        "buffer_names": [],
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "num_experts": [1],
        "dp_world_size": 1,
    }
    low = {name: one.bfloat16() for name, one in _ONE_EXPERT.items()}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    torch.save(low, expert_file(folder, 0, 0))
    optimizer = {"optimizer": {"fp32_groups": [list(masters.values())]}}
    torch.save(optimizer, optimizer_file(folder, 0))
    return folder


def test_experts_that_are_dealt_out_in_two_ways_are_refused_without_their_names(
    tmp_path: Path,
) -> None:
    folder = unsharded(tmp_path)
    rewrite(
        optimizer_file(folder, 0),
        lambda s: s["optimizer"]["optimizer_state_dict"]["param_groups"][0].update(
            name="ep_size_1"
        ),
    )
    with pytest.raises(UnsupportedError, match="several ways"):
        inventory_of(folder)


# --- any number of ranks, experts and shares ---


@st.composite
def runs(draw: st.DrawFn) -> MoeRun:
    ep = draw(st.integers(1, 3))
    autoep = draw(st.booleans())
    experts = ep * draw(st.integers(1, 3))
    held = None
    if autoep and draw(st.booleans()):
        order = draw(st.permutations(range(experts)))
        held = [order[e * experts // ep : (e + 1) * experts // ep] for e in range(ep)]
    return MoeRun(
        stage=draw(st.sampled_from([1, 2, 3] if autoep else [1, 2])),
        world=ep * draw(st.integers(1, 3)),
        ep=ep,
        experts=experts,
        layers=draw(st.integers(1, 2)),
        blocks=draw(st.booleans()),
        recorded=draw(st.booleans()),
        autoep=autoep,
        held=held,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs())
def test_experts_come_out_whole_and_numbered_globally(
    run: MoeRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = save_moe(run, tmp_path_factory.mktemp("moe"))
    inventory = inventory_of(folder)
    assert facts(inventory) == facts_of(truth(run))
    routers = [f"m.{layer}.router.gate.weight" for layer in range(run.layers * run.autoep)]
    aliases = [(name.replace(".router.", ".gate."), name) for name in routers]
    assert [*inventory.aliases.items()] == aliases  # in the order of layers, in every process
    assert {tensor.role for tensor in inventory.tensors} == {Role.TRAINABLE}


# --- which ranks share an expert ---


@pytest.mark.parametrize("blocks", [False, True])
def test_what_the_partitions_hold_outweighs_the_configuration(tmp_path: Path, blocks: bool) -> None:
    run = MoeRun(blocks=blocks)
    folder = save_moe(run, tmp_path)
    rewrite(
        folder / "mp_rank_00_model_states.pt",
        lambda state: state["ds_config"].update(use_data_before_expert_parallelism=not blocks),
    )
    inventory = inventory_of(folder)
    assert facts(inventory) == facts_of(truth(run))
    assert any("order" in note for note in inventory.warnings)


@pytest.mark.parametrize("blocks", [False, True])
def test_under_round_robin_ranks_of_one_partition_are_known_by_recording_the_same(
    tmp_path: Path, blocks: bool
) -> None:
    run = MoeRun(blocks=blocks, configured=False)
    folder = save_moe(run, tmp_path)

    def turn_round_robin(state: dict[str, object]) -> None:
        state["ds_config"] = {"zero_optimization": {"round_robin_gradients": True}}

    rewrite(folder / "mp_rank_00_model_states.pt", turn_round_robin)
    for rank in range(run.world):
        rewrite(
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            lambda state: [
                mapping.update(zip(mapping, [*mapping.values()][::-1], strict=True))
                for mapping in state["optimizer_state_dict"]["param_slice_mappings"]
            ],
        )
    assert facts(inventory_of(folder)) == facts_of(truth(run))


def test_without_record_and_configuration_it_is_refused(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(recorded=False, configured=False), tmp_path)
    with pytest.raises(UnsupportedError, match="does not say which ranks share an expert"):
        inventory_of(folder)


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (3, 1)])
def test_nothing_needs_to_be_said_where_both_placements_are_the_same(
    tmp_path: Path, world: int, ep: int
) -> None:
    run = MoeRun(world=world, ep=ep, recorded=False, configured=False)
    assert facts(inventory_of(save_moe(run, tmp_path))) == facts_of(truth(run))


def test_partitions_that_record_other_parameters_are_refused(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(), tmp_path)

    def rename(state: dict[str, dict[str, list[dict[str, object]]]]) -> None:
        mapping = state["optimizer_state_dict"]["param_slice_mappings"][1]
        first = next(iter(mapping))
        mapping[first.replace("up.", "down.")] = mapping.pop(first)

    rewrite(folder / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", rename)
    with pytest.raises(DamagedCheckpointError, match="not those that the ranks should hold"):
        inventory_of(folder)


def test_under_zero3_the_model_files_must_agree_on_who_holds_what(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(stage=3, autoep=True), tmp_path)
    rewrite(
        folder / "zero_pp_rank_1_mp_rank_00_model_states.pt",
        lambda state: [layer.update(ep_rank=0) for layer in state["ds_autoep_layers"]],
    )
    with pytest.raises(DamagedCheckpointError, match="another expert-parallel rank"):
        inventory_of(folder)


def test_under_zero3_ranks_must_agree_on_who_shares_a_group(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(stage=3, autoep=True), tmp_path)
    rewrite(
        folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        lambda state: state["optimizer_state_dict"]["ds_zero_partition_groups"][1].update(
            partition_ranks=[1, 2]
        ),
    )
    with pytest.raises(DamagedCheckpointError, match="do not agree on who shares"):
        inventory_of(folder)


@pytest.mark.parametrize(("one", "other"), [(0, 2), (0, 1), (1, 2)])
def test_exchanged_files_of_autoep_under_zero3_are_known_by_what_they_record(
    one: int, other: int, tmp_path: Path
) -> None:
    folder = shutil.copytree(
        _FIXTURES / "autoep_z3_w4_ep2" / "ckpt" / "global_step2", tmp_path / "t"
    )
    paths = [folder / f"bf16_zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (one, other)]
    states: list[dict[str, Any]] = []
    for path in paths:
        rewrite(path, lambda state: states.append(dict(state)))
    for path, state in zip(paths, reversed(states), strict=True):
        rewrite(path, lambda own, state=state: own.update(state))
    with pytest.raises(DamagedCheckpointError, match="another rank than its name says"):
        inventory_of(folder)


# --- expert files ---


def test_a_missing_expert_file_is_named(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(), tmp_path)
    expert_file(folder, 1, 2).unlink()
    with pytest.raises(IncompleteCheckpointError, match="layer_1_expert_2"):
        inventory_of(folder)


def test_an_expert_file_under_another_experts_name_is_refused(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(), tmp_path)
    expert_file(folder, 0, 1).rename(tmp_path / "aside")
    expert_file(folder, 0, 2).rename(expert_file(folder, 0, 1))
    (tmp_path / "aside").rename(expert_file(folder, 0, 2))
    with pytest.raises(DamagedCheckpointError, match="was written under another name"):
        inventory_of(folder)


def test_experts_of_another_shape_in_their_files_are_refused(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(), tmp_path)
    for expert in range(MoeRun().experts):
        name = f"{prefix(0)}.{expert}.up.weight"
        rewrite(expert_file(folder, 0, expert), lambda state, name=name: state[name].t_())
    with pytest.raises(DamagedCheckpointError, match="does not hold what the flat groups hold"):
        inventory_of(folder)


def _first_bias(state: dict[str, Any]) -> str:
    return next(name for name in state if name.endswith(".bias"))


def _first_matrix(state: dict[str, Any]) -> str:
    return next(name for name, value in state.items() if value.dim() == 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop(_first_matrix(state)),
        lambda state: state.clear(),
        lambda state: state.update({f"{_first_bias(state)}x": state.pop(_first_bias(state))}),
        lambda state: state.update({f"{_first_bias(state)}x": torch.ones(2)}),
        lambda state: state[_first_matrix(state)].t_(),
        lambda state: state.update({(name := _first_matrix(state)): state[name].int()}),
        lambda state: state.update({(name := _first_bias(state)): state[name][:-1].clone()}),
    ],
    ids=["lacking", "empty", "renamed", "more", "transposed", "integers", "short"],
)
@pytest.mark.parametrize("expert", [0, 1])
@pytest.mark.parametrize("case", ["moe_z0_w2_ep2_bf16", "moe_z1_w2_ep2_frozen", "moe_z2_w2_ep1"])
def test_an_expert_file_unlike_those_of_its_layer_is_refused(
    case: str, expert: int, change: object, tmp_path: Path
) -> None:
    folder = shutil.copytree(_FIXTURES / case / "ckpt" / "global_step2", tmp_path / "tag")
    rewrite(expert_file(folder, 0, expert), change)
    with pytest.raises(DamagedCheckpointError, match=rf"expert_{expert}.*other experts of its"):
        inventory_of(folder)


def test_names_tied_within_an_expert_are_aliases_in_every_expert(tmp_path: Path) -> None:
    run = MoeRun()
    folder = save_moe(run, tmp_path)
    for layer in range(run.layers):
        for expert in range(run.experts):
            stored, tied = (f"{prefix(layer)}.{expert}.{n}" for n in ("up.bias", "down.bias"))
            path = expert_file(folder, layer, expert)
            rewrite(path, lambda state, a=tied, b=stored: state.update({a: state[b].clone()}))

    def tie(state: dict[str, object]) -> None:
        state["shared_params"] = {
            f"{prefix(layer)}.{e}.down.bias": f"{prefix(layer)}.{e}.up.bias"
            for layer in range(run.layers)
            for e in range(2)
        }

    rewrite(folder / "mp_rank_00_model_states.pt", tie)
    inventory = inventory_of(folder)
    assert facts(inventory) == facts_of(truth(run))
    assert inventory.aliases == {
        f"{prefix(layer)}.{e}.down.bias": f"{prefix(layer)}.{e}.up.bias"
        for layer in range(run.layers)
        for e in range(run.experts)
    }


def test_a_tie_across_experts_is_refused(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(), tmp_path)
    tie = {f"{prefix(0)}.1.up.bias": f"{prefix(0)}.0.up.bias"}
    rewrite(folder / "mp_rank_00_model_states.pt", lambda s: s.update(shared_params=tie))
    with pytest.raises(UnsupportedError, match="across experts"):
        inventory_of(folder)


def test_without_a_rank_file_names_and_shapes_are_still_known(tmp_path: Path) -> None:
    for stage in (2, 3):
        run = MoeRun(stage=stage, autoep=stage == 3)
        folder = save_moe(run, tmp_path / str(stage))
        (folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
        inventory = inventory_of(folder)
        shapes = {name: tuple(value.shape) for name, value in truth(run).items()}
        assert {tensor.name: tensor.shape for tensor in inventory.tensors} == shapes
        assert all(tensor.source is None for tensor in inventory.tensors)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_missed_where_experts_alone_are_trained(
    rank: int, tmp_path: Path
) -> None:
    """No group has a part on every rank, and the experts' files have their 16-bit values."""
    root = Path(shutil.copytree(_FIXTURES / "moe_z2_w2_ep2_dense_frozen" / "ckpt", tmp_path / "x"))
    assert open_checkpoint(root).problems == ()
    next(root.glob(f"*/*zero_pp_rank_{rank}_*_optim_states.pt")).unlink()
    (problem,) = open_checkpoint(root).problems
    assert isinstance(problem, IncompleteCheckpointError)
    assert f"zero_pp_rank_{rank}_" in str(problem.expected)


# --- what is refused ---


def test_experts_folded_with_tensor_ranks_are_refused(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(autoep=True), tmp_path)
    rewrite(folder / "mp_rank_00_model_states.pt", lambda s: s.update(folding={"version": 1}))
    with pytest.raises(UnsupportedError, match="split over tensor ranks"):
        inventory_of(folder)


@pytest.mark.parametrize("key", ["checkpoint_format_version", "expert_placement"])
def test_a_later_form_of_autoep_is_refused(tmp_path: Path, key: str) -> None:
    folder = save_moe(MoeRun(autoep=True), tmp_path)
    later: object = {"version": 2} if key == "expert_placement" else 2
    rewrite(
        folder / "mp_rank_00_model_states.pt",
        lambda state: [layer.update({key: later}) for layer in state["ds_autoep_layers"]],
    )
    with pytest.raises(UnsupportedError, match="does not know"):
        inventory_of(folder)


def test_fusing_leaves_other_models_as_they_are(tmp_path: Path) -> None:
    weights = weights_of(inventory_of(save_moe(MoeRun(), tmp_path)))
    assert fuse_experts(weights) == weights
    assert {tensor.dtype for tensor in weights.tensors.values()} == {DType.F32}


def test_fused_experts_hold_gate_above_up_in_every_expert(tmp_path: Path) -> None:
    run = MoeRun(autoep=True)
    whole = truth(run)
    expected = {name: whole[name] for name in ("emb.weight", "head.bias")}
    for layer in range(run.layers):
        w1, w2, w3 = (whole[f"m.{layer}.experts.{w}"] for w in ("w1", "w2", "w3"))
        expected[f"m.{layer}.gate.weight"] = whole[f"m.{layer}.router.gate.weight"]
        expected[f"m.{layer}.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        expected[f"m.{layer}.experts.down_proj"] = w2
    fused = fuse_experts(weights_of(inventory_of(save_moe(run, tmp_path))))
    assert facts(fused) == facts_of(expected)
    assert fused.aliases == {}


def test_a_weight_that_no_expert_of_autoep_has_is_refused(tmp_path: Path) -> None:
    folder = save_moe(MoeRun(autoep=True), tmp_path)
    bias = {"m.0.experts.b1.2": torch.zeros(3)}
    rewrite(expert_file(folder, 0, 2), lambda state: state.update(bias))
    with pytest.raises(DamagedCheckpointError, match="something else than its expert"):
        inventory_of(folder)


@pytest.mark.parametrize("counts", [[2**62, 4], [4, 3], [4], [4, -4]])
def test_a_false_number_of_experts_is_refused_at_once(tmp_path: Path, counts: list[int]) -> None:
    folder = save_moe(MoeRun(), tmp_path)
    rewrite(folder / "mp_rank_00_model_states.pt", lambda s: s.update(num_experts=counts))
    with pytest.raises((DamagedCheckpointError, IncompleteCheckpointError)):
        inventory_of(folder)


def test_experts_alone_may_be_trained(tmp_path: Path) -> None:
    run = MoeRun()
    folder = save_moe(run, tmp_path)

    def freeze(state: dict[str, list[object]]) -> None:
        del state["param_shapes"][0]

    def leave_out(state: dict[str, dict[str, list[object]]]) -> None:
        for key in ("single_partition_of_fp32_groups", "partition_count", "param_slice_mappings"):
            del state["optimizer_state_dict"][key][0]

    rewrite(folder / "mp_rank_00_model_states.pt", freeze)
    for rank in range(run.world):
        rewrite(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", leave_out)
    inventory = inventory_of(folder)
    whole = truth(run)
    low = {name: whole[name].bfloat16() for name in ("emb.weight", "head.bias")}
    assert facts(inventory) == facts_of({**whole, **low})


@pytest.mark.parametrize("blocks", [False, True])
def test_stripes_of_experts_are_joined_within_the_ranks_that_share_them(
    tmp_path: Path, blocks: bool
) -> None:
    run = MoeRun(stage=3, world=6, ep=2, autoep=True, blocks=blocks)
    folder = save_moe(run, tmp_path)
    assert facts(inventory_of(folder)) == facts_of(truth(run))
    for rank in range(1, run.world):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
    assert facts(inventory_of(folder)) == facts_of(truth(run))


def test_experts_that_no_file_holds_are_left_out_by_name(tmp_path: Path) -> None:
    run = MoeRun(stage=3, autoep=True, layers=1)
    folder = save_moe(run, tmp_path)
    rewrite(
        folder / "zero_pp_rank_0_mp_rank_00_model_states.pt",
        lambda state: state["param_shapes"].pop(),
    )
    for rank in range(run.world):
        rewrite(
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            lambda state: state["optimizer_state_dict"]["fp32_flat_groups"].pop(),
        )
    assert inventory_of(folder).left_out == tuple(f"m.0.experts.w{i}" for i in (1, 2, 3))
