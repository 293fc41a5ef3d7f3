"""ZeRO-0: unnamed fp32 master weights are matched by order, shape and values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
import torch

import zexport
from tests.support.checkpoints import deepspeed_names, fragment_address
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
    keys = ("param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments")
    state = dict[str, object](dict.fromkeys(keys))
    state |= {"module": module, "optimizer": optimizer, "buffer_names": list(buffers)}
    state["dp_world_size"] = 2
    with deepspeed_names():
        torch.save(state, folder / "mp_rank_00_model_states.pt")
    found = zexport.open_checkpoint(folder)
    raise_problems(found, frozenset({FindingKind.CAST_MISMATCH}))
    return found


def weights_fp32(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def differing(taken: TrainingState) -> list[tuple[str, int]]:
    """Weights that differ from their rounded master weights, with the first such element."""
    casts = [one for one in taken.replicas if isinstance(one, CastReplica)]
    with SourceReader(taken.torch_files) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr("zexport.ranges.compare._BATCH_NUMEL", 7)
        found = compare_casts(casts, reader.read_into, full=False, expect=reader.expect)
    return [(one.replica.name, one.first) for one in found]


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("module", "optimizer"),
    [
        ({"a": torch.ones(4, dtype=BF16)}, {"fp32_groups": [[torch.ones(5)]]}),
        ({"a": torch.ones(9, dtype=BF16)[:4]}, {"fp32_groups_flat": [torch.ones(9)]}),
        (
            {"a": weights_fp32((5, 3))[0].to(BF16), "frozen": torch.ones(5, 3, dtype=BF16)},
            {"fp32_groups": [weights_fp32((5, 3), seed=1)]},
        ),
        (
            {n: torch.ones(s, dtype=BF16) for n, s in (("a", (5, 3)), ("b", (5, 3)), ("c", (4,)))},
            {"fp32_groups": [weights_fp32((5, 3), (4,)), weights_fp32((4,))]},
        ),
    ],
    ids=["shape", "hole", "another step", "claimed twice"],
)
def test_master_weights_that_fit_no_weight_are_rejected(
    module: Tensors, optimizer: object, tmp_path: Path
) -> None:
    found = save(tmp_path, module, optimizer)
    assert {one.finding for one in found.problems} == {FindingKind.CAST_MISMATCH}
    with pytest.raises(DamagedCheckpointError):
        raise_problems(found)


def test_layers_of_equal_shapes_are_matched_by_values(tmp_path: Path) -> None:
    names = [f"{layer}.{part}" for layer in range(4) for part in ("w", "b")]
    trained = dict(zip(names, weights_fp32(*[(5, 3), (3,)] * 4), strict=True))
    module = {name: value.bfloat16() for name, value in trained.items()}
    by_layer = [[trained["2.w"], trained["2.b"]], [trained["0.w"], trained["0.b"]]]
    taken = save(tmp_path, module, {"fp32_groups": by_layer})
    chosen = {name: trained[name] for name in ("2.w", "2.b", "0.w", "0.b")}
    assert facts_of(taken) == facts(module | chosen)
    frozen = [t.name for t in taken.tensors if t.role is Role.FROZEN]
    assert frozen == ["1.w", "1.b", "3.w", "3.b"]
    assert differing(taken) == []


def test_weights_with_equal_rounded_values_keep_module_values_with_a_warning(
    tmp_path: Path,
) -> None:
    (known,) = weights_fp32((5, 3))
    alike = {name: torch.ones(4, dtype=torch.bfloat16) for name in ("a", "b")}
    module = {**alike, "known": known.bfloat16()}
    taken = save(tmp_path, module, {"fp32_groups": [[torch.full((4,), 1.0001), known]]})
    assert facts_of(taken) == facts({**alike, "known": known})
    assert {t.role for t in taken.tensors} == {Role.TRAINABLE}
    assert taken.warnings[0].endswith(": a, b")
    assert "rounded" in taken.warnings[0]
    assert differing(taken) == []


@pytest.mark.parametrize(
    ("factor", "source", "names"), [(2, 2, ": third"), (1, 0, ": first, third")]
)
def test_changed_or_copied_weight_contradicts_its_master_weights(
    factor: int, source: int, names: str, tmp_path: Path
) -> None:
    own = weights_fp32((5, 3), (4,), (5, 3))
    first, second, third = (value.bfloat16() for value in (own[0], own[1], own[source] * factor))
    module = {"first": first, "second": second, "third": third}
    (problem,) = save(tmp_path, module, {"fp32_groups": [[own[1], own[2], own[0]]]}).problems
    assert problem.finding is FindingKind.CAST_MISMATCH
    assert str(problem.found).endswith(names)


def test_module_weights_that_differ_from_rounded_master_weights_are_found(tmp_path: Path) -> None:
    one, other = weights_fp32((40, 3), (40, 3))
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


def test_fused_optimizer_is_split_by_the_views_of_module_weights(tmp_path: Path) -> None:
    flats = weights_fp32((22,), (22,))
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


def bf16_optimizer(flat: torch.Tensor, places: dict[str, tuple[int, int]]) -> dict[str, object]:
    mapping = {name: fragment_address(*place) for name, place in places.items()}
    groups = {"single_partition_of_fp32_groups": [flat], "param_slice_mappings": [mapping]}
    return {**groups, "partition_count": [1]}


def test_named_master_weights_are_matched_by_name(tmp_path: Path) -> None:
    (flat,) = weights_fp32((8,))
    module = {"w": flat[2:8].view(2, 3).bfloat16(), "b": flat[:2].bfloat16()}
    taken = save(tmp_path, module, bf16_optimizer(flat, {"b": (0, 2), "w": (2, 6)}))
    assert facts_of(taken) == facts({"w": flat[2:8].view(2, 3), "b": flat[:2]})
    assert differing(taken) == []


@pytest.mark.parametrize("places", [{"w": (0, 4)}, {"w": (4, 6)}, {"other": (0, 4)}])
def test_named_master_weights_that_contradict_the_module_are_rejected(
    tmp_path: Path, places: dict[str, tuple[int, int]]
) -> None:
    module = {"w": torch.ones(2, 3, dtype=torch.bfloat16)}
    with pytest.raises(DamagedCheckpointError):
        save(tmp_path, module, bf16_optimizer(torch.ones(8), places))


def test_without_master_weights_module_values_are_used_with_a_warning(tmp_path: Path) -> None:
    count, none = torch.tensor(2**40 + 1), torch.ones(0, 3)
    module = {"a": torch.ones(4, dtype=torch.bfloat16), "none": none, "count": count}
    taken = save(tmp_path, module, {"state": {}, "param_groups": []}, buffers=["count", "lost"])
    assert facts_of(taken) == facts(module)
    assert taken.left_out == ("lost",)
    assert taken.replicas == ()
    assert "fp32 master weights are missing" in taken.warnings[0]
    roles = {tensor.name: tensor.role for tensor in taken.tensors}
    assert roles == {"a": Role.TRAINABLE, "none": Role.TRAINABLE, "count": Role.BUFFER}
