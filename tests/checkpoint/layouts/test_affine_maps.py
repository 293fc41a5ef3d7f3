"""DeepSpeed's affine maps: believed, and held against what else says how tensors are split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import edit
from tests.support.real_cases import copied
from zexport import ExportOptions, ReshardOptions, ZexportError, consolidate, reshard

_COLUMN = r"^model\.layers\.1\.mlp\.gate_proj\.weight$"
_WHOLE = r"^model\.norm\.weight$"


def _exchanged(ranks: Any) -> None:
    """What two ranks have of the whole, the other way round."""
    for one, other in zip(ranks[0]["pieces"], ranks[1]["pieces"], strict=True):
        one["source"], other["source"] = other["source"], one["source"]


def _cut(ranks: Any, shape: list[int]) -> None:
    """Halves, of what the lists beside the map say that each rank has it whole."""
    half = shape[0] // 2
    for rank in ranks:
        ranks[rank]["pieces"] = [
            {"shape": [half], "source": [at, [1]], "dest": [at, [1]], "locations": [0, 1]}
            for at in (0, half)
        ]


def _exchange_columns(model: Any) -> None:
    params = model["universal_checkpoint_info"]["affine_map"]["params"]
    _exchanged(params[_COLUMN]["ranks"])


def _cut_what_is_whole(model: Any) -> None:
    params = model["universal_checkpoint_info"]["affine_map"]["params"]
    _cut(params[_WHOLE]["ranks"], params[_WHOLE]["logical_shape"])


def _exchange_experts(model: Any) -> None:
    for layer in model["ds_autoep_layers"]:
        for one in layer["affine_maps"]["params"].values():
            _exchanged(one["ranks"])


def _cut_experts(model: Any) -> None:
    for layer in model["ds_autoep_layers"]:
        for one in layer["affine_maps"]["params"].values():
            one["ranks"][0]["pieces"].pop()


def _another_version(model: Any) -> None:
    for layer in model["ds_autoep_layers"]:
        layer["affine_maps"]["version"] = 2


@pytest.mark.parametrize(
    ("name", "change", "code", "words"),
    [
        ("tp2_z1_w2_bf16_tied", _exchange_columns, 3, "says in two ways how .*gate_proj"),
        ("tp2_z1_w2_bf16_tied", _cut_what_is_whole, 3, "says in two ways how .*norm"),
        ("autoep_z2_w4_ep2", _exchange_experts, 3, "another placement of experts"),
        ("autoep_z2_w4_ep2", _cut_experts, 3, "does not fill the shard of rank 0"),
        ("autoep_z3_w4_ep2", _exchange_experts, 3, "another placement of experts"),
        ("autoep_z2_w4_ep2", _another_version, 4, "a form of AutoEP"),
    ],
)
def test_a_map_that_disagrees_with_what_stands_beside_it_is_refused(
    name: str, change: Any, code: int, words: str, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    for path in root.glob("*/*mp_rank_0*_model_states.pt"):
        if "expert" not in path.name:
            edit(path, change)
    with pytest.raises(ZexportError, match=words) as refused:
        consolidate(root, tmp_path / "model", ExportOptions())
    assert refused.value.exit_code == code
    with pytest.raises(ZexportError, match=words):
        reshard(root, tmp_path / "out", ReshardOptions(world_size=2))


def _by_maps_alone(model: Any) -> None:
    for layer in model["ds_autoep_layers"]:
        del layer["expert_placement"]


def test_experts_are_placed_by_their_maps_where_nothing_else_says_it(tmp_path: Path) -> None:
    root = copied("autoep_z2_w4_ep2", tmp_path)
    for path in root.glob("*/mp_rank_00_model_states.pt"):
        edit(path, _by_maps_alone)
    consolidate(root, tmp_path / "model", ExportOptions())
