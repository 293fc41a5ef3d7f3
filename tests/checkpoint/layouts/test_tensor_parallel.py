"""Checkpoints of several tensor ranks become the tensors that the engine held."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import edit
from tests.support.model_parallel import (
    Edit,
    cases,
    joined_ranks,
    tag_dir,
    truth,
    unequal,
    values,
)
from tests.support.oracles import differences
from zexport.checkpoint.opening import open_checkpoint
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, UnsupportedError
from zexport.findings import FindingKind
from zexport.ranges.dtypes import DType

_FIXTURES = {case.name: case for case in cases("tp2_")}
_every_case = pytest.mark.parametrize("case", _FIXTURES.values(), ids=list(_FIXTURES))


def edited(case: Path, tmp_path: Path, change: Edit, pattern: str = "*_model_states.pt") -> Path:
    """A copy of a case's tag folder, with some of its files changed."""
    folder = tmp_path / "tag"
    shutil.copytree(tag_dir(case), folder)
    for path in folder.glob(pattern):
        edit(path, change)
    return folder


def info(change: Edit) -> Edit:
    """A change of the record of splits."""
    return lambda state: change(state["universal_checkpoint_info"])


def _first_map(record: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = record["affine_map"]["params"][
        r"^model\.layers\.1\.self_attn\.q_proj\.weight$"
    ]
    return entry


def _first_piece(record: dict[str, Any]) -> dict[str, Any]:
    piece: dict[str, Any] = _first_map(record)["ranks"][0]["pieces"][0]
    return piece


def _lists_without_norms(record: dict[str, Any]) -> None:
    """As early records were: what AutoTP does not touch is in no list."""
    del record["affine_map"]
    key = "tp_replicated_parameter_patterns"
    record[key] = [text for text in record[key] if "norm" not in text]


def _row_bias(record: dict[str, Any]) -> None:
    """A tensor of one dimension among those that are split along the second."""
    del record["affine_map"]
    key = "parameter_with_row_parallelism_patterns"
    record[key] = [*record[key], r"^model\.layers\.1\.mlp\.up_proj\.bias$"]


@_every_case
def test_every_tensor_is_what_the_engine_held(case: Path) -> None:
    inventory = joined_ranks(tag_dir(case))
    assert differences(values(inventory), truth(case)) == []
    assert inventory.left_out == ()
    assert inventory.replicas
    assert unequal(inventory.replicas) == []


@_every_case
def test_the_pattern_lists_alone_say_the_same_as_the_map(case: Path, tmp_path: Path) -> None:
    folder = edited(case, tmp_path, info(lambda record: record.pop("affine_map")))
    inventory = joined_ranks(folder)
    assert differences(values(inventory), truth(case)) == []
    assert unequal(inventory.replicas) == []


def test_older_records_count_fused_parts_of_equal_size(tmp_path: Path) -> None:
    def older(record: dict[str, Any]) -> None:
        del record["affine_map"], record["sub_param_shard_widths"]
        record["universal_checkpoint_version"] = 0.2

    case = _FIXTURES["tp2_z1_w2_bf16_fused"]
    inventory = joined_ranks(edited(case, tmp_path, info(older)))
    assert differences(values(inventory), truth(case)) == []


def test_a_weight_of_two_equal_halves_is_joined_half_by_half(tmp_path: Path) -> None:
    def halves(record: dict[str, Any]) -> None:
        del record["affine_map"]
        record["parameter_with_sub_params"] = []
        record["parameter_with_2_sub_params_cat_dim_0"] = [r"^qkv\.weight$", "qkv.bias"]

    case = _FIXTURES["tp2_z1_w2_bf16_fused"]
    found = values(joined_ranks(edited(case, tmp_path, info(halves))))["qkv.weight"]
    shards = torch.split(truth(case)["qkv.weight"], [8, 8, 4, 4, 4, 4])
    first, second = torch.cat(shards[0::2]), torch.cat(shards[1::2])
    assert torch.equal(found, torch.cat([first[:8], second[:8], first[8:], second[8:]]))


def test_a_copy_that_differs_is_among_the_replicas(tmp_path: Path) -> None:
    def drift(state: dict[str, Any]) -> None:
        state["module"]["seen"] += 1

    case = _FIXTURES["tp2_z2_w4_bf16"]
    inventory = joined_ranks(edited(case, tmp_path, drift, "mp_rank_01_model_states.pt"))
    assert unequal(inventory.replicas) == ["seen"]


def test_tied_names_come_back_though_only_one_rank_records_them() -> None:
    case = _FIXTURES["tp2_z1_w2_bf16_tied"]
    assert joined_ranks(tag_dir(case)).aliases == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: state.pop("universal_checkpoint_info"), "does not record how"),
        (info(lambda r: r["affine_map"].update(version=2)), "version of affine_map"),
        (info(lambda r: _first_piece(r).update(scale=0.5)), "multiplied by a factor"),
        (info(lambda r: _first_piece(r).update(source=[0, [1, 16]])), "no box"),
        (
            info(lambda r: r.update(autotp_unsupported_parameter_patterns={"^seen|x$": "why"})),
            "beyond what is read",
        ),
        (
            info(lambda r: r.update(autotp_unsupported_parameter_patterns={r"model\..": "odd"})),
            "exactly: odd",
        ),
        (info(_lists_without_norms), "share or split"),
    ],
)
def test_what_cannot_be_joined_exactly_is_refused_with_the_reason(
    change: Edit, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        joined_ranks(edited(_FIXTURES["tp2_z2_w4_bf16"], tmp_path, change))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (info(lambda r: _first_map(r).update(logical_shape=[1 << 40, 16])), "in two ways"),
        (info(lambda r: _first_map(r)["ranks"][1].update(shard_shape=[1, 16])), "not as it is"),
        (info(lambda r: _first_map(r)["ranks"].pop(1)), "not those of these"),
        (info(_row_bias), "split along"),
    ],
)
def test_a_record_that_contradicts_the_shards_is_damage(
    change: Edit, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(DamagedCheckpointError, match=problem):
        joined_ranks(edited(_FIXTURES["tp2_z2_w4_bf16"], tmp_path, change))


def _exchange_ranks(record: dict[str, Any]) -> None:
    """The two shards of a weight that is split by its rows, each called the other's."""
    ranks = _first_map(record)["ranks"]
    ranks[0], ranks[1] = ranks[1], ranks[0]


def _without_a_row_weight(record: dict[str, Any]) -> None:
    """As a record of the lists alone is, that takes one weight for split by its rows."""
    del record["affine_map"]
    record["parameter_with_row_parallelism_patterns"].pop(0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", [_exchange_ranks, _without_a_row_weight])
def test_a_record_that_one_tensor_rank_alone_has_is_refused(
    change: Edit, rank: int, tmp_path: Path
) -> None:
    folder = edited(
        _FIXTURES["tp2_z2_w4_bf16"], tmp_path, info(change), f"mp_rank_{rank:02d}_model_states.pt"
    )
    with pytest.raises(DamagedCheckpointError, match="otherwise than mp_rank_00_model_states"):
        joined_ranks(folder)


def test_a_record_need_not_be_on_every_tensor_rank(tmp_path: Path) -> None:
    change: Edit = lambda state: state.pop("universal_checkpoint_info")  # noqa: E731
    folder = edited(_FIXTURES["tp2_z2_w4_bf16"], tmp_path, change, "mp_rank_01_model_states.pt")
    truth_of = truth(_FIXTURES["tp2_z2_w4_bf16"])
    assert differences(values(joined_ranks(folder)), truth_of) == []


def test_tensor_ranks_of_different_saves_are_not_joined(tmp_path: Path) -> None:
    change: Edit = lambda state: state.update(global_steps=3)  # noqa: E731
    folder = edited(_FIXTURES["tp2_z1_w2_bf16_tied"], tmp_path, change, "mp_rank_01_model*")
    (problem,) = open_checkpoint(folder).problems
    assert problem.problem.endswith("differ in the global step")
    assert problem.finding is FindingKind.MIXED_STEPS


def test_tensor_ranks_of_runs_on_other_ranks_are_not_joined(tmp_path: Path) -> None:
    change: Edit = lambda state: state.update(dp_world_size=1)  # noqa: E731
    folder = edited(_FIXTURES["tp2_z2_w4_bf16"], tmp_path, change, "mp_rank_01_model*")
    (folder / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    told = [one.problem for one in open_checkpoint(folder).problems]
    assert any(one.endswith("differ in the data-parallel world size") for one in told)


def test_padding_of_the_vocabulary_is_kept_and_told(tmp_path: Path) -> None:
    change = info(lambda record: record.update(original_vocab_size=60))
    inventory = joined_ranks(edited(_FIXTURES["tp2_z1_w2_bf16_tied"], tmp_path, change))
    (note,) = inventory.notes
    assert "'model.embed_tokens.weight' has 67 rows, of which the last 7 are padding" in note


def test_a_missing_tensor_rank_is_named(tmp_path: Path) -> None:
    folder = edited(_FIXTURES["tp2_z1_w2_bf16_tied"], tmp_path, lambda _: None)
    for path in folder.glob("*mp_rank_01*"):
        path.unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"tensor ranks 1 .*mp_rank_01_model"):
        joined_ranks(folder)


def test_a_weight_whose_master_is_uncertain_on_one_rank_has_the_modules_values_on_all(
    tmp_path: Path,
) -> None:
    frozen, trained = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))

    def alike(state: dict[str, Any]) -> None:
        state["module"][frozen] = state["module"][trained].clone()

    folder = edited(_FIXTURES["tp2_z0_w2_bf16"], tmp_path, alike, "mp_rank_01_*")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.problems == ()
    dtypes = {tensor.name: tensor.dtype for tensor in checkpoint.tensors}
    assert dtypes[frozen] is dtypes[trained] is DType.BF16
    assert dtypes["model.layers.1.self_attn.k_proj.weight"] is DType.F32
    assert trained not in {replica.name for replica in checkpoint.replicas}
    assert all(trained in warning for warning in checkpoint.warnings)
    assert len(checkpoint.warnings) == 2
