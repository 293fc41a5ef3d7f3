"""Universal checkpoints: DeepSpeed's own, whole and then spoiled in one way after another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cell_cases import cases_named, facts_of, read_bytes, tag_of, truth_of
from tests.support.checkpoints import edit
from tests.support.model_parallel import assembled, unequal
from zexport.checkpoint.contents import Inventory
from zexport.checkpoint.layouts.structure import Structure
from zexport.checkpoint.layouts.universal_weights import check_whole, shape_of_flat
from zexport.checkpoint.opening import open_checkpoint
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsafeError,
    UnsupportedError,
    ZexportError,
)
from zexport.inspect.inspect import inspect_checkpoint
from zexport.ranges.dtypes import DType

FIXTURES = Path(__file__).parents[3] / "fixtures"
WEIGHT = "model.norm.weight"

on_every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{case.parent.name}-{case.name}") for case in cases_named("uni_")],
)


@on_every_case
def test_every_value_is_the_live_one_or_listed_as_left_out(case: Path) -> None:
    taken = take(tag_of(case))
    said = "the conversion to universal lost the values of "
    notes = [note.removeprefix(said) for note in taken.warnings if note.startswith(said)]
    lost = {name for note in notes for name in note.split(", ")}
    assert facts_of(taken) == {n: v for n, v in truth_of(case).items() if n not in lost}


@on_every_case
def test_every_file_that_holds_a_weight_is_handed_back(case: Path) -> None:
    taken = take(tag_of(case))
    paths = {file.path for file in taken.files}
    assert {path.name for path in paths} == {"fp32.pt"}
    assert len(paths) == len(taken.files)


def take(tag: Path) -> Inventory:
    return assembled(tag, Structure.UNIVERSAL)


@pytest.fixture
def from_zero2(tmp_path: Path) -> Path:
    """A tag converted from ZeRO-2: whole tensors in dictionaries, buffers and a tied weight."""
    source = tag_of(FIXTURES / "uni_z2_w2_bf16_odd")
    return Path(shutil.copytree(source, tmp_path / source.name))


@pytest.fixture
def from_zero3(tmp_path: Path) -> Path:
    """A tag converted from ZeRO-3: flat tensors, frozen weights in both model files."""
    source = tag_of(FIXTURES / "uni_z3_w2_bf16_frozen")
    return Path(shutil.copytree(source, tmp_path / source.name))


def resave(path: Path, change: Callable[[Any], object]) -> None:
    torch.save(change(torch.load(path)), path)


def refused(tag: Path, kind: type[ZexportError], match: str) -> None:
    with pytest.raises(kind, match=match):
        take(tag)


def test_a_weight_without_its_file_is_named(from_zero3: Path) -> None:
    (from_zero3 / "zero" / WEIGHT / "fp32.pt").unlink()
    refused(from_zero3, DamagedCheckpointError, f"lacks the file of the weight '{WEIGHT}'")


def test_a_weight_without_its_folder_is_named(from_zero3: Path) -> None:
    shutil.rmtree(from_zero3 / "zero" / WEIGHT)
    refused(from_zero3, DamagedCheckpointError, f"lacks the file of the weight '{WEIGHT}'")


def test_a_weight_of_another_conversion_is_surplus(from_zero3: Path) -> None:
    shutil.copytree(from_zero3 / "zero" / WEIGHT, from_zero3 / "zero" / "stray.weight")
    refused(from_zero3, DamagedCheckpointError, "no model file names, such as 'stray.weight'")


def _as_without_zero(state: Any) -> None:
    state["param_shapes"] = None


def _without_one_name(state: Any) -> None:
    state["param_shapes"][0].pop("inner.weight")


@pytest.mark.parametrize("change", [_as_without_zero, _without_one_name])
def test_model_files_that_leave_trained_weights_unnamed_are_of_another_run(
    change: Callable[[Any], None], from_zero2: Path
) -> None:
    edit(from_zero2 / "mp_rank_00_model_states.pt", change)
    refused(from_zero2, DamagedCheckpointError, "holds trained weights that no model file names")


def test_a_wrapped_weight_may_have_a_second_folder_that_the_module_made(from_zero2: Path) -> None:
    """``--inject_missing_state`` finds no master under the state dict's name of a wrapped one."""
    wrapper = "inner._checkpoint_wrapped_module."
    before = facts_of(take(from_zero2))
    for folder in [*(from_zero2 / "zero").glob("inner.*")]:
        master = folder.rename(folder.with_name(folder.name.replace("inner.", wrapper)))
        folder.mkdir()
        value = torch.load(master / "fp32.pt")["param"]
        torch.save({"param": value.bfloat16()}, folder / "fp32.pt")

    def rename(state: Any) -> None:
        state["param_shapes"] = [
            {name.replace("inner.", wrapper): shape for name, shape in shapes.items()}
            for shapes in state["param_shapes"]
        ]

    for path in from_zero2.glob("*model_states.pt"):
        edit(path, rename)
    wanted = {name.replace("inner.", wrapper): fact for name, fact in before.items()}
    assert wanted != before
    assert facts_of(take(from_zero2)) == wanted


def test_a_link_in_place_of_a_folder_is_unsafe(from_zero3: Path, tmp_path: Path) -> None:
    folder = from_zero3 / "zero" / WEIGHT
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    refused(from_zero3, UnsafeError, "is a link")


def test_a_name_that_leads_outside_finds_no_folder(from_zero3: Path) -> None:
    outside = from_zero3 / "outside"
    (from_zero3 / "zero" / WEIGHT).rename(outside)

    def change(state: Any) -> None:
        state["param_shapes"][0] = {
            "../outside" if name == WEIGHT else name: shape
            for name, shape in state["param_shapes"][0].items()
        }

    for path in from_zero3.glob("*_model_states.pt"):
        edit(path, change)
    refused(from_zero3, DamagedCheckpointError, "lacks the file of the weight '../outside'")


def test_a_flat_weight_of_another_length_is_damage(from_zero3: Path) -> None:
    resave(from_zero3 / "zero" / WEIGHT / "fp32.pt", lambda flat: flat[:-1].clone())
    refused(from_zero3, DamagedCheckpointError, "another length than the model files say")


def test_a_whole_weight_of_another_shape_is_damage(from_zero2: Path) -> None:
    path = from_zero2 / "zero" / "inner.weight" / "fp32.pt"
    resave(path, lambda state: state | {"param": state["param"].T.contiguous()})
    refused(from_zero2, DamagedCheckpointError, "another shape than the model files say")


def test_a_weight_of_whole_numbers_is_damage(from_zero3: Path) -> None:
    resave(from_zero3 / "zero" / WEIGHT / "fp32.pt", lambda flat: flat.int())
    refused(from_zero3, DamagedCheckpointError, "does not hold a floating-point weight")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_weight_of_another_type_than_the_others_is_damage(
    dtype: torch.dtype, from_zero2: Path
) -> None:
    path = from_zero2 / "zero" / "inner.weight" / "fp32.pt"
    resave(path, lambda state: state | {"param": state["param"].to(dtype)})
    refused(from_zero2, DamagedCheckpointError, "in another element type than the others")


def test_masters_that_are_all_of_16_bits_are_one_type(from_zero2: Path) -> None:
    rounded = {
        path.parent.name: torch.load(path)["param"].bfloat16()
        for path in from_zero2.glob("zero/*/fp32.pt")
        if (path.parent / "exp_avg.pt").exists()
    }
    for name, value in rounded.items():
        resave(from_zero2 / "zero" / name / "fp32.pt", lambda s, v=value: s | {"param": v})
    found = {tensor.name: tensor.dtype for tensor in take(from_zero2).tensors}
    assert {found[name] for name in rounded} == {DType.BF16}


def test_frozen_weights_need_the_model_files_of_all_ranks(from_zero3: Path) -> None:
    (from_zero3 / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    refused(from_zero3, IncompleteCheckpointError, "lacks the model files of rank 1")


def test_names_need_the_model_file_of_rank_0(from_zero3: Path) -> None:
    (from_zero3 / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    refused(from_zero3, IncompleteCheckpointError, "lacks the model file of rank 0")


def test_without_any_model_file_it_is_a_checkpoint_that_lacks_it(from_zero2: Path) -> None:
    for path in from_zero2.glob("*.pt"):
        path.unlink()
    (problem,) = inspect_checkpoint(from_zero2.parent).problems
    assert isinstance(problem, IncompleteCheckpointError)
    assert "lacks the model file of rank 0" in str(problem)


@pytest.mark.parametrize(("ranks", "spoiled"), [(2, True), (1, False)])
def test_round_robin_gradients_of_several_ranks_spoil_the_conversion(
    from_zero2: Path, ranks: int, spoiled: bool
) -> None:
    def change(state: Any) -> None:
        state["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
        state["dp_world_size"] = ranks

    edit(from_zero2 / "mp_rank_00_model_states.pt", change)
    if spoiled:
        refused(from_zero2, UnsupportedError, "round_robin_gradients")
    else:
        assert take(from_zero2).tensors


def test_a_weight_made_from_16_bit_values_is_refused(from_zero2: Path) -> None:
    folder = from_zero2 / "zero" / "inner.weight"
    resave(folder / "fp32.pt", lambda state: {"param": state["param"].bfloat16().float()})
    assert take(from_zero2).tensors, "moments beside it show a master"
    (folder / "exp_avg.pt").unlink()
    refused(from_zero2, UnsupportedError, "holds no master of the weight 'inner.weight'")


# --- tensor parallelism, made up: a column split, a replicated weight, a padded vocabulary ---


def tensor_parallel(folder: Path, whole: dict[str, Any], shards: Sequence[dict[str, Any]]) -> Path:
    for mp, weights in enumerate(shards):
        state = {
            "module": {name: value.bfloat16() for name, value in weights.items()}
            | {"pos": POSITIONS},
            "buffer_names": ["pos"],
            "optimizer": None,
            "param_shapes": [{name: value.shape for name, value in weights.items()}],
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
            "shared_params": {},
            "dp_world_size": 1,
            "ds_config": {"zero_optimization": {"stage": 2}},
        }
        torch.save(state, folder / f"mp_rank_{mp:02d}_model_states.pt")
    for name, state in whole.items():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save(state, folder / "zero" / name / "fp32.pt")
    return folder


POSITIONS = torch.arange(5)


def test_shards_of_tensor_parallel_ranks_are_believed_as_the_converter_joined_them(
    tmp_path: Path,
) -> None:
    column, norm, words = torch.randn(7, 3), torch.randn(3), torch.randn(9, 3)
    padded = torch.cat([words, torch.full((3, 3), torch.nan)])
    shards = [
        {"column": column[:4], "norm": norm, "words": padded[:6]},
        {"column": column[4:], "norm": norm, "words": padded[6:]},
    ]
    whole = {
        "column": {"param": column, "cat_dim": 0},
        "norm": {"param": norm, "cat_dim": 0},
        "words": {"param": words, "cat_dim": 0, "vocab_tensor": True},
    }
    inventory = take(tensor_parallel(tmp_path, whole, shards))
    found = {t.name: (t.shape, read_bytes(t.source)) for t in inventory.tensors if t.source}
    expected = {"column": column, "norm": norm, "words": words, "pos": POSITIONS}
    assert found == {n: (tuple(v.shape), v.numpy().tobytes()) for n, v in expected.items()}
    assert {replica.name for replica in inventory.replicas} == {"norm", "pos"}
    assert unequal(inventory.replicas) == []


def test_frozen_weights_in_pieces_of_which_nothing_tells_are_refused(tmp_path: Path) -> None:
    shards = [{"a": torch.ones(2)}, {"a": torch.ones(2)}]
    tag = tensor_parallel(tmp_path, {"a": {"param": torch.ones(4), "cat_dim": 0}}, shards)
    for path in tag.glob("mp_*"):
        edit(path, lambda state: state["module"].update(frozen=torch.ones(2)))
    refused(tag, UnsupportedError, "does not record how its tensors are split")


@pytest.mark.parametrize(
    ("whole", "shards", "experts", "cut"),
    [
        ((4, 3), [(2, 3)], 4, False),
        ((4, 3), [(4, 3)], None, False),
        ((4, 3), [(2, 3), (2, 3)], None, False),
        ((4, 3), [(4, 2), (4, 1)], None, False),
        ((5, 3), [(4, 3), (4, 3)], None, True),
    ],
)
def test_shards_that_may_make_up_the_whole_pass(
    whole: tuple[int, ...], shards: list[tuple[int, ...]], experts: int | None, cut: bool
) -> None:
    check_whole("a", whole, shards, experts=experts, cut=cut)


@pytest.mark.parametrize(
    ("whole", "shards", "experts", "cut"),
    [
        ((4, 3), [(2, 3)], None, False),
        ((4, 3), [(2, 3)], 5, False),
        ((4, 3), [(2, 2)], 4, False),
        ((4, 3), [(2, 3), (1, 3)], None, False),
        ((4, 3), [(2, 4), (2, 4)], None, False),
        ((4, 3), [(12,), (12,)], None, False),
        ((9, 3), [(4, 3), (4, 3)], None, True),
        ((5, 2), [(4, 3), (4, 3)], None, True),
    ],
)
def test_shards_that_cannot_make_up_the_whole_are_a_contradiction(
    whole: tuple[int, ...], shards: list[tuple[int, ...]], experts: int | None, cut: bool
) -> None:
    with pytest.raises(LayoutError, match="another shape"):
        check_whole("a", whole, shards, experts=experts, cut=cut)


def test_a_flat_weight_of_two_shapes_is_a_contradiction() -> None:
    with pytest.raises(LayoutError, match="another length"):
        shape_of_flat("a", 6, [(2, 3), (3, 2)])


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", ["pp2_tp2_z1_w8_bf16_tied", "pp2_z1_w4_bf16_tied"])
def test_a_converted_pipeline_has_the_live_weights_and_says_what_may_be_lost(
    name: str, tmp_path: Path
) -> None:
    tag = tmp_path / "global_step2_universal"
    source = FIXTURES / name / "ckpt" / "global_step2"
    words = ("--input_folder", source, "--output_folder", tag, "--inject_missing_state")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    checkpoint = open_checkpoint(tag)
    live = truth_of(FIXTURES / name)
    trained = {name: facts for name, facts in live.items() if not name.endswith(".seen")}
    frozen = {name for name in trained if name.startswith("2.fc")} if "tp2" not in name else set()
    inventory = Inventory(checkpoint.tensors, checkpoint.aliases, checkpoint.left_out)
    assert facts_of(inventory) == {n: facts for n, facts in trained.items() if n not in frozen}
    assert [note for note in checkpoint.warnings if note.startswith("frozen weights, if")]


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("numel", range(25))
def test_padding_that_older_converters_left_behind_a_weight_is_known(
    numel: int, world_size: int
) -> None:
    """DeepSpeed 0.15 to 0.19.2: ``min(stripe, abs(numel - rank * stripe))`` of every rank."""
    stripe = -(-numel // world_size)
    stored = sum(min(stripe, abs(numel - rank * stripe)) for rank in range(world_size))
    assert shape_of_flat("a", stored, [(numel,)], world_size) == (numel,)
    with pytest.raises(LayoutError, match="another length"):
        shape_of_flat("a", stored + 1, [(numel,)], world_size)


def test_padding_behind_a_weight_is_not_exported(from_zero3: Path) -> None:
    def of_15_ranks(states: dict[str, Any]) -> dict[str, Any]:
        module = {
            n: t for n, t in states["module"].items() if n not in states["frozen_param_shapes"]
        }
        nothing = {"frozen_param_shapes": None, "frozen_param_fragments": None}
        return states | nothing | {"module": module, "dp_world_size": 15}

    for file in from_zero3.glob("*model_states.pt"):
        resave(file, of_15_ranks)
    expected = facts_of(take(from_zero3))
    stored = from_zero3 / "zero" / WEIGHT / "fp32.pt"
    numel = torch.load(stored).numel()
    padding = torch.full((max(0, 14 * -(-numel // 15) - numel),), 1e21)
    assert padding.numel()
    resave(stored, lambda flat: torch.cat([flat, padding]))
    assert facts_of(take(from_zero3)) == expected
