"""Names of rank files, parsed whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from zexport.checkpoint.rank_files import (
    RankFileKind,
    list_rank_files,
    parse_rank_file,
    ranges_of,
    rank_file_name,
)


@pytest.mark.parametrize(
    ("name", "kind", "rank", "mp_rank"),
    [
        ("zero_pp_rank_12_mp_rank_03_optim_states.pt", RankFileKind.OPTIMIZER, 12, 3),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", RankFileKind.OPTIMIZER, 0, 0),
        ("zero_pp_rank_7_mp_rank_00_model_states.pt", RankFileKind.MODEL_PER_RANK, 7, 0),
        ("mp_rank_01_model_states.pt", RankFileKind.MODEL, 0, 1),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", RankFileKind.EXPERT, 0, 0),
        ("expp_rank_1_mp_rank_00_optim_states.pt", RankFileKind.EXPERT_OPTIMIZER, 1, 0),
        ("layer_00-model_states.pt", RankFileKind.PIPELINE_LAYER, 0, 0),
        ("layer_03-model_00-model_states.pt", RankFileKind.PIPELINE_LAYER, 0, 0),
    ],
)
def test_a_name_says_kind_and_ranks(name: str, kind: RankFileKind, rank: int, mp_rank: int) -> None:
    file = parse_rank_file(Path("tag") / name)
    assert file is not None
    assert (file.kind, file.rank, file.mp_rank) == (kind, rank, mp_rank)


@pytest.mark.parametrize(
    ("name", "layer", "expert", "tensor_rank"),
    [
        ("layer_3_expert_12_mp_rank_00_model_states.pt", 3, 12, None),
        ("layer_03-model_states.pt", 3, 0, None),
        ("layer_10-model_01-model_states.pt", 10, 0, 1),
    ],
)
def test_a_name_says_layer_and_expert(
    name: str, layer: int, expert: int, tensor_rank: int | None
) -> None:
    file = parse_rank_file(Path(name))
    assert file is not None
    assert (file.layer, file.expert, file.tensor_rank) == (layer, expert, tensor_rank or 0)
    assert name == rank_file_name(file.kind, layer=layer, expert=expert, tensor_rank=tensor_rank)


def test_what_bf16_optimizer_writes_is_named_as_it_is_read() -> None:
    name = "bf16_zero_pp_rank_12_mp_rank_03_optim_states.pt"
    file = parse_rank_file(Path(name))
    assert file is not None
    assert rank_file_name(file.kind, file.rank, file.mp_rank, prefix=file.prefix) == name


@pytest.mark.parametrize(
    "name",
    [
        "copy_of_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt.tmp",
        "._mp_rank_00_model_states.pt",
        "zero_pp_rank_x_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_0_optim_states.pt",
        "zero_pp_rank_\u0663_mp_rank_00_optim_states.pt",  # a digit, but not one DeepSpeed writes
        "mp_rank_00_model_states.pt\n",
        "optim_states.pt",
        "latest",
    ],
)
def test_any_other_name_says_nothing(name: str) -> None:
    assert parse_rank_file(Path(name)) is None


def test_files_are_listed_by_number_and_not_by_letter(tmp_path: Path) -> None:
    for rank in (10, 9, 2):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "zero_pp_rank_3_mp_rank_00_optim_states.pt").mkdir()
    assert [file.rank for file in list_rank_files(tmp_path)] == [2, 9, 10]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([], ""), ([4], "4"), ([3, 1, 2], "1-3"), ([0, 1, 5, 9, 10, 5], "0-1, 5, 9-10")],
)
def test_ranks_are_written_as_ranges(numbers: list[int], words: str) -> None:
    assert ranges_of(numbers) == words
