"""ZeRO-0: which master is whose, on made-up files and on DeepSpeed's own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cell_cases import cases_named, facts_of, read_cells, tag_of, truth_of
from tests.support.checkpoints import deepspeed_names, edit
from tests.support.real_cases import facts
from zexport.checkpoint.contents import Inventory, Role
from zexport.checkpoint.layouts.master_matching import match_in_order
from zexport.checkpoint.layouts.unnamed_masters import is_tiled
from zexport.checkpoint.layouts.zero0 import take_zero0_inventory
from zexport.checkpoint.model_states import read_model_states
from zexport.checkpoint.opening import open_checkpoint
from zexport.checkpoint.ranks import is_zero0
from zexport.errors import DamagedCheckpointError, LayoutError, UnsupportedError
from zexport.findings import FindingKind
from zexport.formats.torch_file import read_torch_file
from zexport.ranges.reader import SourceReader
from zexport.ranges.replicas import CastReplica, compare_casts

FIXTURES = Path(__file__).parents[3] / "fixtures"

Tensors = dict[str, torch.Tensor]

on_every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{case.parent.name}-{case.name}") for case in cases_named("z0_")],
)


def all_matches(parameters: Sequence[str], groups: list[list[str]]) -> list[list[int]]:
    """The naive answer: every assignment of masters to parameters, tried."""
    masters = [kind for group in groups for kind in group]
    ends = [sum(map(len, groups[: n + 1])) for n in range(len(groups))]
    starts = [0, *ends][: len(groups)]
    return [
        list(chosen)
        for chosen in permutations(range(len(parameters)), len(masters))
        if all(parameters[i] == kind for i, kind in zip(chosen, masters, strict=True))
        and all(sorted(chosen[a:b]) == list(chosen[a:b]) for a, b in zip(starts, ends, strict=True))
    ]


@given(data=st.data(), kinds=st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
def test_what_is_called_certain_is_the_only_possibility(
    data: st.DataObject, kinds: list[str]
) -> None:
    owners = data.draw(st.lists(st.integers(-1, 2), min_size=len(kinds), max_size=len(kinds)))
    groups = [[k for k, o in zip(kinds, owners, strict=True) if o == g] for g in range(3)]
    spans = match_in_order(kinds, groups)
    matches = all_matches(kinds, groups)
    assert matches
    for number, span in enumerate(spans):
        possible = {match[number] for match in matches}
        assert span.first <= min(possible)
        assert max(possible) <= span.last
    if sum(map(bool, groups)) == 1:
        for number, span in enumerate(spans):
            possible = {match[number] for match in matches}
            assert (span.first, span.last) == (min(possible), max(possible))


@given(
    kinds=st.lists(st.sampled_from("ab"), max_size=5),
    groups=st.lists(st.lists(st.sampled_from("ab"), max_size=3), max_size=2),
)
def test_what_is_refused_is_impossible_and_what_is_certain_possible(
    kinds: list[str], groups: list[list[str]]
) -> None:
    try:
        spans = match_in_order(kinds, groups)
    except LayoutError:
        assert not all_matches(kinds, groups)
    else:
        if all(span.is_certain for span in spans):
            assert all_matches(kinds, groups) == [[span.first for span in spans]]


def test_groups_by_shape_are_certain() -> None:
    spans = match_in_order("mvmvm", ["mmm", "vv"])
    assert [span.first for span in spans] == [0, 2, 4, 1, 3]
    assert all(span.is_certain for span in spans)


@pytest.mark.parametrize(
    ("views", "numel", "tiled"),
    [
        ([(3, 2), (0, 3)], 5, True),
        ([(0, 3)], 5, False),
        ([(0, 3), (2, 3)], 5, False),
        ([(1, 4)], 5, False),
        ([(0, 3), (3, 0), (3, 2)], 5, True),
    ],
)
def test_views_tile_a_storage_without_gap_or_overlap(
    views: list[tuple[int, int]], numel: int, tiled: bool
) -> None:
    assert is_tiled(views, numel) is tiled


# --- made-up files ---


def save(
    folder: Path,
    module: Tensors,
    optimizer: object,
    buffers: Sequence[str] = (),
    **keys: object,
) -> Inventory:
    path = folder / "mp_rank_00_model_states.pt"
    state = {
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": optimizer,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "dp_world_size": 2,
        **keys,
    }
    torch.save(state, path)
    return take_zero0_inventory(read_model_states(read_torch_file(path)))


def masters(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def differing(taken: Inventory) -> list[tuple[str, int]]:
    """The weights that are not their masters, rounded, and the first element that is not."""
    casts = [one for one in taken.replicas if isinstance(one, CastReplica)]
    files = [read_torch_file(casts[0].path)]
    with SourceReader(files) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr("zexport.ranges.replicas._BATCH_NUMEL", 7)
        found = compare_casts(casts, reader.read_into, full=False)
    return [(one.replica.name, one.first) for one in found]


def test_layers_of_the_same_shapes_are_told_apart_by_their_values(tmp_path: Path) -> None:
    names = [f"{layer}.{part}" for layer in range(4) for part in ("w", "b")]
    trained = dict(zip(names, masters(*[(5, 3), (3,)] * 4), strict=True))
    module = {name: value.bfloat16() for name, value in trained.items()}
    by_layer = [[trained["2.w"], trained["2.b"]], [trained["0.w"], trained["0.b"]]]
    taken = save(tmp_path, module, {"fp32_groups": by_layer})
    chosen = {name: trained[name] for name in ("2.w", "2.b", "0.w", "0.b")}
    assert facts_of(taken) == facts(module | chosen)
    frozen = [t.name for t in taken.tensors if t.role is Role.FROZEN]
    assert frozen == ["1.w", "1.b", "3.w", "3.b"]
    assert differing(taken) == []


def taken_of(inventory: Inventory) -> dict[str, str]:
    return {tensor.name: tensor.dtype.torch_name for tensor in inventory.tensors}


def test_masters_none_of_which_is_a_weights_alone_are_refused(tmp_path: Path) -> None:
    module = {name: torch.ones(4, dtype=torch.bfloat16) for name in ("a", "b")}
    with pytest.raises(UnsupportedError, match=r"several weights look like one.*'a' and 'b'"):
        save(tmp_path, module, {"fp32_groups": [[torch.full((4,), 1.0001)]]})


def test_weights_that_are_alike_after_rounding_keep_the_modules_values_and_are_named(
    tmp_path: Path,
) -> None:
    (known,) = masters((5, 3))
    alike = {name: torch.ones(4, dtype=torch.bfloat16) for name in ("a", "b")}
    module = {**alike, "known": known.bfloat16()}
    taken = save(tmp_path, module, {"fp32_groups": [[torch.full((4,), 1.0001), known]]})
    assert facts_of(taken) == facts({**alike, "known": known})
    assert {t.role for t in taken.tensors} == {Role.TRAINABLE}
    assert "'a' and 'b' alike" in taken.warnings[0]
    assert taken.warnings[0].endswith(": a, b")
    assert "rounded to bfloat16" in taken.warnings[0]
    assert differing(taken) == []


def test_masters_that_fit_no_weight_are_refused(tmp_path: Path) -> None:
    module = {"a": torch.ones(4, dtype=torch.bfloat16)}
    with pytest.raises(UnsupportedError, match="do not fit the module's weights"):
        save(tmp_path, module, {"fp32_groups": [[torch.ones(5)]]})


@pytest.mark.parametrize("form", ["fp32_groups", "fp32_groups_flat"])
def test_masters_of_integers_are_refused(form: str, tmp_path: Path) -> None:
    groups = [torch.ones(4, dtype=torch.int32)]
    module = {"a": torch.ones(4, dtype=torch.bfloat16)}
    with pytest.raises(DamagedCheckpointError, match=r"of a type that no masters have .*int32"):
        save(tmp_path, module, {form: [groups] if form == "fp32_groups" else groups})


@pytest.mark.usefixtures("named_as_deepspeeds")
def test_named_masters_of_integers_are_refused(tmp_path: Path) -> None:
    module = {"a": torch.ones(4, dtype=torch.bfloat16)}
    flat = torch.ones(4, dtype=torch.int32)
    with pytest.raises(DamagedCheckpointError, match="of a type that no masters have"):
        save(tmp_path, module, bf16_optimizer(flat, {"a": (0, 4)}))


def test_a_master_of_no_weight_leaves_the_others_to_be_known_by_their_values(
    tmp_path: Path,
) -> None:
    first, second, third = masters((5, 3), (4,), (5, 3))
    trained = {"first": first, "second": second, "third": third}
    module = {name: value.bfloat16() for name, value in trained.items()}
    groups = [[third, torch.ones(9), second]]
    taken = save(tmp_path, module, {"fp32_groups": groups})
    assert facts_of(taken) == facts({**trained, "first": module["first"]})
    assert taken.warnings[0].endswith(": first")
    assert differing(taken) == []


def test_a_master_and_a_weight_that_are_like_nothing_contradict_each_other(tmp_path: Path) -> None:
    first, second, third = masters((5, 3), (4,), (5, 3))
    module = {"first": first.bfloat16(), "second": second.bfloat16(), "third": third.bfloat16() * 2}
    taken = save(tmp_path, module, {"fp32_groups": [[second, third, first]]})
    (problem,) = taken.problems
    assert problem.finding is FindingKind.CAST_MISMATCH
    assert problem.found == "no master like third"


def test_a_weight_that_turned_into_the_like_of_another_contradicts_its_master(
    tmp_path: Path,
) -> None:
    first, second, third = masters((5, 3), (4,), (5, 3))
    module = {"first": first.bfloat16(), "second": second.bfloat16(), "third": first.bfloat16()}
    taken = save(tmp_path, module, {"fp32_groups": [[second, third, first]]})
    (problem,) = taken.problems
    assert problem.found == "no master like first, third"


def test_masters_in_another_order_that_all_find_their_weights_leave_frozen_ones(
    tmp_path: Path,
) -> None:
    first, second, frozen = masters((5, 3), (4,), (7,))
    module = {"first": first.bfloat16(), "second": second.bfloat16(), "frozen": frozen.bfloat16()}
    taken = save(tmp_path, module, {"fp32_groups": [[second, first]]})
    assert facts_of(taken) == facts({**module, "first": first, "second": second})
    assert [tensor.name for tensor in taken.tensors if tensor.role is Role.FROZEN] == ["frozen"]
    assert taken.problems == ()


def test_masters_of_another_step_are_refused_where_order_and_shape_fit(tmp_path: Path) -> None:
    one, other, stale = masters((5, 3), (5, 3), (5, 3))
    module = {"a": one.bfloat16(), "frozen": other.bfloat16()}
    with pytest.raises(UnsupportedError, match="do not fit the module's weights"):
        save(tmp_path, module, {"fp32_groups": [[stale]]})


def test_masters_in_another_order_are_found_out_when_values_are_compared(tmp_path: Path) -> None:
    one, other = masters((40, 3), (40, 3))
    module = {"a": one.bfloat16(), "b": other.bfloat16()}
    taken = save(tmp_path, module, {"fp32_groups": [[other, one]]})
    assert differing(taken) == [("a", 0), ("b", 0)]


def test_one_master_that_rounds_otherwise_is_found_out_wherever_it_is(tmp_path: Path) -> None:
    (one,) = masters((40, 3))
    module = {"a": one.half()}
    module["a"].view(-1)[113] += 1
    taken = save(tmp_path, module, {"fp32_groups": [[one]]})
    assert differing(taken) == [("a", 113)]


def test_nan_is_nan_and_infinity_infinity(tmp_path: Path) -> None:
    one = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -0.0])
    module = {"a": one.half()}
    module["a"].view(torch.int16)[0] = 0x7FFF
    assert differing(save(tmp_path, module, {"fp32_groups": [[one]]})) == []


def test_nan_is_not_infinity(tmp_path: Path) -> None:
    taken = save(
        tmp_path,
        {"a": torch.tensor([float("inf")], dtype=torch.float16)},
        {"fp32_groups": [[torch.tensor([float("nan")])]]},
    )
    assert differing(taken) == [("a", 0)]


def test_weights_without_elements_are_not_tied_to_one_another(tmp_path: Path) -> None:
    storage = torch.ones(4)
    module = {"a": storage[:0], "b": storage[:0], "c": storage[:2], "d": storage[:2]}
    taken = save(tmp_path, module, None)
    assert taken.aliases == {"d": "c"}
    assert facts_of(taken) == facts(module)


def test_a_fused_optimizers_flat_groups_are_cut_as_the_modules_weights_are(tmp_path: Path) -> None:
    flats = masters((22,), (22,))
    module: Tensors = {"frozen": torch.ones(22, dtype=torch.bfloat16)}
    for group, flat in enumerate(flats):
        low = flat.bfloat16()
        module[f"{group}.b"] = low[15:22]
        module[f"{group}.w"] = low[:15].view(5, 3)
    module["tied"] = module["0.w"]
    taken = save(tmp_path, module, {"fp32_groups_flat": flats[::-1]})
    truth = dict(module)
    for group, flat in enumerate(flats):
        truth |= {f"{group}.b": flat[15:22], f"{group}.w": flat[:15].view(5, 3)}
    truth["tied"] = truth["0.w"]
    assert facts_of(taken) == facts(truth)
    assert taken.aliases == {"tied": "0.w"}
    assert differing(taken) == []


def test_weights_that_leave_a_hole_in_their_storage_are_no_flat_group(tmp_path: Path) -> None:
    (flat,) = masters((22,))
    low = flat.bfloat16()
    module = {"w": low[:15].view(5, 3), "b": low[16:]}
    with pytest.raises(UnsupportedError, match="do not fit the module's weights"):
        save(tmp_path, module, {"fp32_groups_flat": [flat]})


class fragment_address:  # noqa: N801 - DeepSpeed's name
    """Stands for DeepSpeed's class of this name while pickle looks for it."""

    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


def bf16_optimizer(flat: torch.Tensor, places: dict[str, tuple[int, int]]) -> dict[str, object]:
    mapping = {name: fragment_address(*place) for name, place in places.items()}
    return {"single_partition_of_fp32_groups": [flat], "param_slice_mappings": [mapping]}


@pytest.fixture
def named_as_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    home = ModuleType("deepspeed.utils.tensor_fragment")
    home.fragment_address = fragment_address  # type: ignore[attr-defined]
    for name in ("deepspeed", "deepspeed.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    monkeypatch.setattr(fragment_address, "__module__", home.__name__)


@pytest.mark.usefixtures("named_as_deepspeeds")
def test_masters_that_are_named_are_taken_by_name(tmp_path: Path) -> None:
    (flat,) = masters((8,))
    module = {"w": flat[2:8].view(2, 3).bfloat16(), "b": flat[:2].bfloat16()}
    taken = save(tmp_path, module, bf16_optimizer(flat, {"b": (0, 2), "w": (2, 6)}))
    assert facts_of(taken) == facts({"w": flat[2:8].view(2, 3), "b": flat[:2]})
    assert differing(taken) == []


@pytest.mark.usefixtures("named_as_deepspeeds")
@pytest.mark.parametrize("places", [{"w": (0, 4)}, {"w": (4, 6)}, {"other": (0, 4)}])
def test_named_masters_that_contradict_the_module_are_refused(
    tmp_path: Path, places: dict[str, tuple[int, int]]
) -> None:
    module = {"w": torch.ones(2, 3, dtype=torch.bfloat16)}
    with pytest.raises(UnsupportedError, match=r"is all there|does not fit"):
        save(tmp_path, module, bf16_optimizer(torch.ones(8), places))


@pytest.mark.usefixtures("named_as_deepspeeds")
def test_a_named_master_of_which_another_rank_has_a_part_leaves_the_modules_value(
    tmp_path: Path,
) -> None:
    (flat,) = masters((8,))
    cut = torch.ones(9, dtype=torch.bfloat16)
    module = {"w": flat[:6].view(2, 3).bfloat16(), "cut": cut, "elsewhere": cut * 2}
    optimizer = bf16_optimizer(flat, {"w": (0, 6), "cut": (6, 2)})
    taken = save(tmp_path, module, optimizer | {"partition_count": [2]})
    assert facts_of(taken) == facts({**module, "w": flat[:6].view(2, 3)})
    assert "other partitions were not saved: cut, elsewhere" in taken.warnings[0]


def test_without_masters_the_modules_values_are_taken_and_said_so(tmp_path: Path) -> None:
    module = {
        "a": torch.ones(4, dtype=torch.bfloat16),
        "none": torch.ones(0, 3),
        "count": torch.tensor(2**40 + 1),
    }
    taken = save(tmp_path, module, {"state": {}, "param_groups": []}, buffers=["count", "lost"])
    assert facts_of(taken) == facts(module)
    assert taken.left_out == ("lost",)
    assert taken.replicas == ()
    assert "no fp32 masters" in taken.warnings[0]
    roles = {tensor.name: tensor.role for tensor in taken.tensors}
    assert roles == {"a": Role.TRAINABLE, "none": Role.TRAINABLE, "count": Role.BUFFER}


# --- DeepSpeed's own ---


@on_every_case
def test_every_value_is_the_live_one(case: Path) -> None:
    (ranks,) = read_cells(tag_of(case)).values()
    assert is_zero0(ranks)
    assert ranks.first_model is not None
    taken = take_zero0_inventory(ranks.first_model)
    assert facts_of(taken) == truth_of(case)
    with SourceReader([ranks.first_model.file]) as reader:
        casts = [one for one in taken.replicas if isinstance(one, CastReplica)]
        assert compare_casts(casts, reader.read_into, full=True) == ()
        reader.finish()


@pytest.fixture
def unmastered(tmp_path: Path) -> Path:
    """A run in bf16 as DeepSpeed 0.17 saves it: names of masters, and masters in no file."""
    root = Path(shutil.copytree(FIXTURES / "z0_w2_bf16" / "ckpt", tmp_path / "run"))
    edit(model_file(root), _as_deepspeed_017)
    return root


def model_file(root: Path) -> Path:
    return root / "global_step2" / "mp_rank_00_model_states.pt"


def _as_deepspeed_017(state: dict[str, Any]) -> None:
    shapes = {name: tensor.shape for name, tensor in state["module"].items()}
    state.update(ds_version="0.17.6", optimizer=None, param_shapes=[shapes])
    state["ds_config"].pop("data_types", None)


def test_weights_whose_masters_were_never_saved_are_the_modules(unmastered: Path) -> None:
    checkpoint = open_checkpoint(unmastered)
    with deepspeed_names():
        module = torch.load(model_file(unmastered), weights_only=False)["module"]
    assert checkpoint.problems == ()
    assert checkpoint.layout == "ZeRO-0"
    inventory = Inventory(checkpoint.tensors, checkpoint.aliases, checkpoint.left_out)
    assert facts_of(inventory) == facts(module)
    assert "no fp32 masters" in checkpoint.warnings[0]


@pytest.mark.parametrize(
    "change",
    [
        {"zero_optimization": {"stage": 1}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"bf16": {"enabled": False}},
    ],
)
def test_masters_that_other_runs_save_in_files_of_their_own_are_missed(
    change: dict[str, object], unmastered: Path
) -> None:
    edit(model_file(unmastered), lambda state: state["ds_config"].update(change))
    (problem,) = open_checkpoint(unmastered).problems
    assert "lacks the optimizer files of all ranks" in problem.problem
