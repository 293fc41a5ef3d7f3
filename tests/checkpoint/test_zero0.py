"""ZeRO-0: fp32 master weights without names find their weights by order, shape and values."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch

import zexport
from tests.support.real_cases import facts, facts_of
from zexport import DamagedCheckpointError, FindingKind, Role, TrainingState
from zexport.checkpoint.state import raise_problems
from zexport.ranges.compare import CastReplica, compare_casts
from zexport.ranges.reader import SourceReader

Tensors = dict[str, torch.Tensor]


def save(
    folder: Path, module: Tensors, optimizer: object, buffers: Sequence[str] = ()
) -> TrainingState:
    for key in ("fp32_groups", "fp32_groups_flat"):
        if isinstance(optimizer, dict) and key in optimizer:
            numbers = count()
            sizes = [1 if key.endswith("flat") else len(group) for group in optimizer[key]]
            groups = [{"params": [next(numbers) for _ in range(size)]} for size in sizes]
            optimizer |= {"optimizer_state_dict": {"state": {}, "param_groups": groups}}
    state = {
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": optimizer,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "dp_world_size": 2,
    }
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    found = zexport.open_checkpoint(folder)
    raise_problems(found, frozenset({FindingKind.CAST_MISMATCH}))
    return found


def masters(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def differing(taken: TrainingState) -> list[tuple[str, int]]:
    """The weights that are not their masters, rounded, and the first element that is not."""
    casts = [one for one in taken.replicas if isinstance(one, CastReplica)]
    with SourceReader(taken.torch_files) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr("zexport.ranges.compare._BATCH_NUMEL", 7)
        found = compare_casts(casts, reader.read_into, full=False)
    return [(one.replica.name, one.first) for one in found]


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("module", "optimizer"),
    [
        ({"a": torch.ones(4, dtype=BF16)}, {"fp32_groups": [[torch.ones(5)]]}),
        ({"a": torch.ones(9, dtype=BF16)[:4]}, {"fp32_groups_flat": [torch.ones(9)]}),
        (
            {"a": masters((5, 3))[0].to(BF16), "frozen": torch.ones(5, 3, dtype=BF16)},
            {"fp32_groups": [masters((5, 3), seed=1)]},
        ),
        (
            {n: torch.ones(s, dtype=BF16) for n, s in (("a", (5, 3)), ("b", (5, 3)), ("c", (4,)))},
            {"fp32_groups": [masters((5, 3), (4,)), masters((4,))]},
        ),
    ],
    ids=["shape", "hole", "another step", "claimed twice"],
)
def test_masters_that_fit_no_weight_are_refused(
    module: Tensors, optimizer: object, tmp_path: Path
) -> None:
    found = save(tmp_path, module, optimizer)
    assert {one.finding for one in found.problems} == {FindingKind.CAST_MISMATCH}
    with pytest.raises(DamagedCheckpointError):
        raise_problems(found)


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


def test_weights_that_are_alike_after_rounding_keep_the_modules_values_and_are_named(
    tmp_path: Path,
) -> None:
    (known,) = masters((5, 3))
    alike = {name: torch.ones(4, dtype=torch.bfloat16) for name in ("a", "b")}
    module = {**alike, "known": known.bfloat16()}
    taken = save(tmp_path, module, {"fp32_groups": [[torch.full((4,), 1.0001), known]]})
    assert facts_of(taken) == facts({**alike, "known": known})
    assert {t.role for t in taken.tensors} == {Role.TRAINABLE}
    assert taken.warnings[0].endswith(": a, b")
    assert "rounded" in taken.warnings[0]
    assert differing(taken) == []


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
    assert str(problem.found).endswith(": third")


def test_a_weight_that_turned_into_the_like_of_another_contradicts_its_master(
    tmp_path: Path,
) -> None:
    first, second, third = masters((5, 3), (4,), (5, 3))
    module = {"first": first.bfloat16(), "second": second.bfloat16(), "third": first.bfloat16()}
    taken = save(tmp_path, module, {"fp32_groups": [[second, third, first]]})
    (problem,) = taken.problems
    assert str(problem.found).endswith(": first, third")


def test_masters_in_another_order_that_all_find_their_weights_leave_frozen_ones(
    tmp_path: Path,
) -> None:
    first, second, frozen = masters((5, 3), (4,), (7,))
    module = {"first": first.bfloat16(), "second": second.bfloat16(), "frozen": frozen.bfloat16()}
    taken = save(tmp_path, module, {"fp32_groups": [[second, first]]})
    assert facts_of(taken) == facts({**module, "first": first, "second": second})
    assert [tensor.name for tensor in taken.tensors if tensor.role is Role.FROZEN] == ["frozen"]
    assert taken.problems == ()


def test_masters_that_round_to_other_values_are_found(tmp_path: Path) -> None:
    one, other = masters((40, 3), (40, 3))
    own = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -0.0])
    changed, nan = one.half(), own.half()
    changed.view(-1)[113] += 1
    nan.view(torch.int16)[0] = 0x7FFF
    for number, (found, groups, expected) in enumerate(
        (
            ({"a": one.bfloat16(), "b": other.bfloat16()}, [other, one], [("a", 0), ("b", 0)]),
            ({"a": changed}, [one], [("a", 113)]),
            ({"a": nan}, [own], []),
            ({"a": torch.full((5,), float("inf")).half()}, [own], [("a", 0)]),
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        assert differing(save(folder, found, {"fp32_groups": [groups]})) == expected


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


class fragment_address:  # noqa: N801 - DeepSpeed's name
    """Stands for DeepSpeed's class of this name while pickle looks for it."""

    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


def bf16_optimizer(flat: torch.Tensor, places: dict[str, tuple[int, int]]) -> dict[str, object]:
    mapping = {name: fragment_address(*place) for name, place in places.items()}
    return {
        "single_partition_of_fp32_groups": [flat],
        "param_slice_mappings": [mapping],
        "partition_count": [1],
    }


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
    with pytest.raises(DamagedCheckpointError):
        save(tmp_path, module, bf16_optimizer(torch.ones(8), places))


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
    assert "no fp32 master weights" in taken.warnings[0]
    roles = {tensor.name: tensor.role for tensor in taken.tensors}
    assert roles == {"a": Role.TRAINABLE, "none": Role.TRAINABLE, "count": Role.BUFFER}
