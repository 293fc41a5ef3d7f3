"""Damaged copies of real checkpoints are rejected with the kind and the word that matter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zexport
from tests.support.checkpoints import edit as rewrite
from tests.support.real_cases import copied
from zexport import (
    DamagedCheckpointError,
    ExportOptions,
    FindingKind,
    IncompleteCheckpointError,
    NameLayout,
    UnsupportedError,
    ZexportError,
)

Damage = Callable[[Path], object]
State = Any

D, I, U = DamagedCheckpointError, IncompleteCheckpointError, UnsupportedError  # noqa: E741
Z0, Z2, Z3, MOE0 = "z0_w2_bf16", "z2_w2_fp16", "z3_w2_bf16", "moe_z0_w2_ep2_bf16"
MOE2, EP2, T2, U2 = "moe_z2_w4_ep2", "autoep_z2_w4_ep2", "tp2_z2_w4_bf16", "uni_z2_w2_bf16_odd"
P1, P0, P0T = "pp2_z1_w4_bf16_tied", "pp2_z0_w4_fp32", "pp2_z0_w4_fp32_tied"
GRID, U3, MOES = "pp2_tp2_z1_w8_bf16_tied", "uni_z3_w2_bf16_frozen", "stages_moe_z1_w4_ep2"
Z2T, Z0M = "z2_w2_bf16_tied", "mp_rank_00_model_states.pt"
EXPP0, EXPP1 = "expp_rank_0_*", "expp_rank_1_*"
EXPERT0 = "layer_0_expert_{}_mp_rank_00_model_states.pt"
INNER, NORM = "zero/inner.weight/{}.pt", "zero/model.norm.weight"
ROW, COPIED = "parameter_with_row_parallelism_patterns", "tp_replicated_parameter_patterns"
INFO, DEGREES = "universal_checkpoint_info", "checkpoint_parallel_dimensions"
MODEL, OPTIM = "*model_states.pt", "*optim_states.pt"
O0, O1 = (f"*zero_pp_rank_{rank}_mp_rank_00_optim*" for rank in (0, 1))
M0, M1 = (f"zero_pp_rank_{rank}_mp_rank_00_model*" for rank in (0, 1))


def files(root: Path, pattern: str) -> list[Path]:
    found = sorted(path for path in root.glob(f"global_step*/{pattern}") if path.is_file())
    assert found, pattern
    return found


def gone(*patterns: str) -> Damage:
    return lambda root: [path.unlink() for one in patterns for path in files(root, one)]


def edit(pattern: str, change: Callable[[State], object]) -> Damage:
    return lambda root: [rewrite(path, change) for path in files(root, pattern)]


def update(pattern: str, *keys: object, **values: object) -> Damage:
    return edit(pattern, lambda state: at(state, *keys).update(values))


def drop(pattern: str, *keys: object) -> Damage:
    *above, last = keys
    return edit(pattern, lambda state: at(state, *above).pop(last))


def both(*damages: Damage) -> Damage:
    return lambda root: [damage(root) for damage in damages]


def at(state: State, *keys: object) -> Any:
    for key in keys:
        state = state[key]
    return state


def swap(one: str, other: str) -> Damage:
    """Exchange two files by renaming them."""

    def rename(root: Path) -> None:
        (first,), (second,) = files(root, one), files(root, other)
        first.rename(root / "aside")
        second.rename(first)
        (root / "aside").rename(second)

    return rename


def second(pattern: str, old: str, new: str) -> Damage:
    """Also write the same content under another name."""
    return lambda root: [
        rewrite(shutil.copy(path, path.with_name(path.name.replace(old, new))), lambda _: None)
        for path in files(root, pattern)
    ]


def moved(pattern: str, old: str, new: str) -> Damage:
    return lambda root: [
        one.rename(one.with_name(one.name.replace(old, new))) for one in files(root, pattern)
    ]


def exchange(one: str, other: str) -> Damage:
    """Exchange the contents of two files."""
    return both(swap(one, other), edit(one, lambda _: None), edit(other, lambda _: None))


def first(entries: dict[str, Any], ending: str) -> str:
    return next(name for name in entries if name.endswith(ending))


def of_parameters(state: State) -> Any:
    """The settings and states of the optimizer within ZeRO's own."""
    root = state["optimizer_state_dict"]
    return root.get("base_optimizer_state") or root["optimizer_state_dict"]


def in_16_bits(state: State) -> None:
    flats = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flats[:] = [one.half() for one in flats]


def shorter(state: State) -> None:
    own = state["optimizer_state_dict"]
    flats = own.get("single_partition_of_fp32_groups") or own["fp32_flat_groups"]
    flats[0] = flats[0][:-1].clone()


def other_step(state: State) -> None:
    for one in of_parameters(state)["state"].values():
        one["step"] = torch.tensor(77.0)


RANKS = [
    ("z3_w4_bf16_odd", gone("*rank_1_*optim*", "*rank_3_*optim*"), I, "ranks 1, 3"),
    (Z3, gone(M0), I, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    (Z2, second(O1, "rank_1_", "rank_2_"), D, "rank 2"),
    (Z3, swap(O0, O1), D, "renamed"),
    (Z2, lambda root: files(root, O1)[0].write_bytes(b"not torch"), D, "rank_1_"),
    (Z2, update(O1, "optimizer_state_dict", partition_count=[3]), D, "partition"),
    (Z2, update(O1, "optimizer_state_dict", zero_stage=1), D, "stage"),
    (Z2, edit(O1, other_step), D, "optimizer step"),
    (Z2, edit(O1, in_16_bits), D, "do not have one floating-point dtype"),
    *((name, edit(one, shorter), D, "do not add up") for name, one in ((Z2, O0), (Z3, O1))),
    (Z3, update(M1, dp_world_size=3), D, "size"),
    (T2, gone("*mp_rank_01_optim*"), I, "mp_rank_01_optim"),
]


def swapped_names(state: State) -> None:
    shapes = state["param_shapes"][0]
    pairs = ((a, b) for a in shapes for b in shapes if a < b and shapes[a] == shapes[b])
    one, other = next(pairs)
    names = {one: other, other: one}
    state["param_shapes"][0] = type(shapes)((names.get(n, n), shapes[n]) for n in shapes)


def one_more(state: State) -> None:
    experts = state["param_shapes"][1]
    name = first(experts, "")
    experts[f"{name}_x"] = experts[name]


def module(change: Callable[[dict[str, Any]], object]) -> Damage:
    return edit(Z0M, lambda state: change(state["module"]))


def resized(state: State) -> None:
    shapes = state["param_shapes"][0]
    shapes[first(shapes, "")] = (13, 8)


PARTITIONS, WEIGHT = "single_partition_of_fp32_groups", "model.norm.weight"
STATE, CLIPPING = "optimizer_state_dict", "gradient_clipping"
GROUPS = [
    *(
        (name, update(O1, STATE, **{PARTITIONS: left}), D, "flat groups")
        for name in ("z2_w2_bf16_groups", "moe_z1_w4_ep2_bf16opt", GRID)
        for left in (None, [])
    ),
    (Z2T, exchange(O0, O1), D, "partition"),
    (MOE2, exchange(O0, O1), D, "partition"),
    (Z2, edit(MODEL, swapped_names), D, "q_proj.weight' at (6560, 8) in its param_slice_mappings"),
    (Z2, edit(MODEL, lambda s: s["buffer_names"].append(WEIGHT)), D, f"the name {WEIGHT!r}"),
    (Z3, edit(M0, swapped_names), D, "different"),
    ("z3_w2_bf16_sub1000", edit(OPTIM, lambda s: s[STATE]["fp32_flat_groups"].reverse()), D, ""),
    (Z2T, update(OPTIM, STATE, zero_stage=3), D, "ZeRO-3"),
    (MOE2, edit(Z0M, one_more), D, "param_alignment_paddings"),
    *(
        ("z1_w2_bf16", module(lambda m, d=d: m.update({WEIGHT: m[WEIGHT].to(d)})), D, WEIGHT)
        for d in (torch.bool, torch.int64)
    ),
    (Z2, module(lambda m: m.update({f"{WEIGHT}x": m.pop(WEIGHT)})), D, f"{WEIGHT}x"),
    *((name, edit(MODEL, resized), D, "") for name in (Z2, Z3)),
]


def frozen(change: Callable[[torch.Tensor], object]) -> Callable[[State], None]:
    def apply(state: State) -> None:
        fragments = state["frozen_param_fragments"]
        name = first(fragments, "")
        fragments[name] = change(fragments[name])

    return apply


Z3F = "z3_w2_bf16_frozen"
FROZEN = [
    (Z3F, edit(MODEL, frozen(torch.Tensor.char)), U, "quantized"),
    (Z3F, edit(MODEL, lambda s: s["frozen_param_shapes"].update(other=(8,))), D, "other"),
    (Z3F, edit(M1, frozen(lambda part: part[:-1].clone())), D, "wrong length"),
]


def settings(**values: object) -> Callable[[State], object]:
    return lambda state: of_parameters(state)["param_groups"][0].update(values)


MIXED = [
    (Z2, edit(O1, settings(lr=0.1)), "lr"),
    (Z3, edit(O1, settings(betas=(0.9, 0.999))), "betas"),
    (Z2, edit(MODEL, lambda s: s["ds_config"]["optimizer"].update(type="Lion")), "optimizer.type"),
    (Z3, update(M1, "lr_scheduler", last_batch_iteration=7), "LR scheduler step"),
    ("z1_w3_bf16_elastic", drop(O1, "ds_config", CLIPPING), CLIPPING),
    (P1, update("*_0_mp_rank_01_optim*", "ds_config", train_batch_size=9), "train_batch_size"),
]


def unnamed(state: State) -> None:
    for group in state["optimizer"]["optimizer_state_dict"]["param_groups"]:
        group.pop("name")


def matrix(state: State) -> str:
    return next(name for name, value in state.items() if value.dim() == 2)


def layers(**values: object) -> Callable[[State], object]:
    return lambda s: [layer.update(values) for layer in s.get("ds_autoep_layers", ())]


EXPERTS = [
    *(
        (name, edit(EXPERT0.format(1), change), D, "expert_1")
        for name in (MOE0, "moe_z1_w2_ep2_frozen")
        for change in (
            lambda s: s.pop(matrix(s)),
            lambda s: s.update({f"{first(s, '.bias')}x": s.pop(first(s, ".bias"))}),
            lambda s: s.update(more=torch.ones(2)),
            lambda s: s[matrix(s)].t_(),
            lambda s: s.update({matrix(s): s[matrix(s)].int()}),
        )
    ),
    (MOE2, gone(EXPERT0.format(2)), I, "layer_0_expert_2"),
    (MOE2, swap(EXPERT0.format(1), EXPERT0.format(2)), D, "renamed"),
    (MOES, update("mp_rank*", **{DEGREES: {"pp_degree": 1, "tp_degree": 2}}), U, "tensor"),
    *(
        (MOE2, update(Z0M, num_experts=counts), ZexportError, "expert")
        for counts in ([2**62, 4], [4, 3])
    ),
    (EP2, edit(Z0M, layers(checkpoint_format_version=2)), U, "2"),
    (EP2, edit(Z0M, layers(expert_placement=None)), U, "AutoEP"),
    (MOE0, gone(EXPP1), I, "expp_rank_1"),
    (MOE0, both(gone(EXPP1), edit(EXPP0, unnamed)), I, "experts"),
    (MOE0, edit(EXPP1, lambda s: s["optimizer"]["fp32_groups"][1].clear()), D, "group 1"),
]


def split(change: Callable[[Any], object], pattern: str = "mp_rank*model*") -> Damage:
    """Change the record of how tensors are split."""
    return edit(pattern, lambda state: change(state[INFO]))


def lists(change: Callable[[Any], object], pattern: str = "mp_rank*model*") -> Damage:
    return split(lambda r: (r.pop("affine_map"), change(r)), pattern)


def entry(record: Any) -> Any:
    return record["affine_map"]["params"][r"^model\.layers\.1\.self_attn\.q_proj\.weight$"]


def piece(**values: object) -> Damage:
    return split(lambda record: entry(record)["ranks"][0]["pieces"][0].update(values))


def exchanged(record: Any) -> None:
    ranks = entry(record)["ranks"]
    ranks[0], ranks[1] = ranks[1], ranks[0]


UNSUPPORTED, M_TP1 = "autotp_unsupported_parameter_patterns", "mp_rank_01_model*"
BIAS = r"^model\.layers\.1\.mlp\.up_proj\.bias$"
TENSOR = [
    (T2, gone("*mp_rank_01*"), I, "mp_rank_01"),
    (T2, drop("mp_rank*model*", INFO), U, "split"),
    (T2, piece(scale=0.5), U, "q_proj"),
    (T2, split(lambda r: r.update({UNSUPPORTED: {r"model\..": "odd"}})), U, "odd"),
    (T2, lists(lambda r: r[COPIED].clear()), U, "record"),
    (T2, split(lambda r: entry(r)["ranks"][1].update(shard_shape=[1, 16])), D, "q_proj"),
    (T2, split(lambda r: entry(r)["ranks"].pop(1)), D, "q_proj"),
    (T2, lists(lambda r: r[ROW].append(BIAS)), D, "dimension 1"),
    (T2, split(exchanged, "mp_rank_01*"), D, "mp_rank_0"),
    (T2, update(M_TP1, global_steps=3), D, "global step"),
]


def wider(state: State) -> None:
    for name, tensor in state.items():
        state[name] = torch.ones(*(size + 1 for size in tensor.shape))


PIPELINE = [
    (P1, gone("layer_02-*"), I, "layer_02-model_states.pt"),
    *((P0T, gone(f"layer_0{n}-*"), I, "lack") for n in (0, 5)),
    *((name, edit("layer_01-*", wider), I, "lack") for name in (P0, P0T)),
    (P1, moved("layer_01-*", "layer_01", "layer_04"), D, "renamed"),
    (P1, edit("layer_00-*", lambda s: s.update(bias=torch.ones(2))), U, "tied"),
    (GRID, gone("layer_02-model_01*"), I, "layer_02-model_01-model_states.pt"),
]


SAVED_MASTERS = (
    {"zero_optimization": {"stage": 1}},
    {"data_types": {"grad_accum_dtype": "fp32"}},
    {"bf16": {"enabled": False}},
)


def unmastered(config: dict[str, object]) -> Callable[[State], None]:
    """A run of DeepSpeed 0.17 that has its master weights in separate files."""

    def change(state: State) -> None:
        shapes = {name: tensor.shape for name, tensor in state["module"].items()}
        state.update(ds_version="0.17.6", optimizer=None, param_shapes=[shapes])
        state["ds_config"].pop("data_types", None)
        state["ds_config"].update(config)

    return change


ZERO0 = [
    (Z0, edit(MODEL, lambda s: s["optimizer"]["fp32_groups"][0].pop()), D, "group"),
    *((Z0, edit(MODEL, unmastered(one)), I, "optim") for one in SAVED_MASTERS),
]


def resave(pattern: str, change: Callable[[Any], object]) -> Damage:
    return lambda root: [torch.save(change(torch.load(p)), p) for p in files(root, pattern)]


def stray(root: Path) -> None:
    (folder,) = root.glob(f"global_step*/{NORM}")
    shutil.copytree(folder, folder.with_name("stray"))


def param(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return resave(INNER.format("fp32"), lambda state: {"param": change(state["param"])})


def round_robin(state: State) -> None:
    state["ds_config"]["zero_optimization"].update(round_robin_gradients=True)
    state.update(dp_world_size=2)


UNIVERSAL = [
    (U3, gone(f"{NORM}/fp32.pt"), D, "model.norm.weight"),
    (U3, stray, D, "stray"),
    (U3, resave(f"{NORM}/fp32.pt", lambda flat: flat[:-1].clone()), D, "model.norm.weight"),
    (U3, gone("zero_pp_rank_1*model*"), I, "1 of 2"),
    (U2, param(lambda t: t.T.contiguous()), D, "inner.weight"),
    (U2, param(torch.Tensor.half), D, "float16"),
    (U2, edit("mp_rank*", round_robin), U, "round_robin"),
    (U2, both(param(lambda t: t.bfloat16().float()), gone(INNER.format("exp_avg"))), U, "inner"),
]
MIXED_ROWS = [(case, damage, D, word) for case, damage, word in MIXED]
LISTS = (RANKS, GROUPS, FROZEN, MIXED_ROWS, EXPERTS, TENSOR, PIPELINE, ZERO0, UNIVERSAL)
CASES = [
    pytest.param(*row, id=f"{number}-{row[0]}") for rows in LISTS for number, row in enumerate(rows)
]


def plan(root: Path, *allowed: FindingKind) -> zexport.ExportPlan:
    options = ExportOptions(layout=NameLayout.MEMORY, allow=frozenset(allowed))
    return zexport.plan_export(zexport.open_checkpoint(root), root.parent / "out", options)


@pytest.mark.parametrize(("case", "damage", "kind", "word"), CASES)
def test_damaged_checkpoint_is_rejected(
    case: str, damage: Damage, kind: type[ZexportError], word: str, tmp_path: Path
) -> None:
    root = copied(case, tmp_path)
    damage(root)
    with pytest.raises(kind) as caught:
        plan(root)
    assert word in str(caught.value)
    assert str(root) in str(caught.value)


@pytest.mark.parametrize(("case", "damage", "word"), MIXED)
def test_files_of_two_runs_can_be_accepted(
    case: str, damage: Damage, word: str, tmp_path: Path
) -> None:
    root = copied(case, tmp_path)
    damage(root)
    kind = FindingKind.MIXED_SETTINGS
    found = plan(root, kind).findings
    assert {(one.kind, one.accepted) for one in found} == {(kind, True)}
    assert any(word in one.detail for one in found)
