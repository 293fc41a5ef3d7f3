"""Any state of the optimizer, tensor by tensor, against what torch cuts out of the raw files."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

from tests.support.cell_cases import cases_named, read_bytes, read_cells, tag_of
from tests.support.checkpoints import Run, edit, save, small_model
from zexport.checkpoint.layouts.bind import MASTERS, bind
from zexport.checkpoint.layouts.expert_groups import bind_experts
from zexport.checkpoint.layouts.zero import bind_trained, flat_run, owners_of
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.optimizer_states import read_optimizer_states
from zexport.checkpoint.ranks import RankStates
from zexport.errors import LayoutError
from zexport.formats.torch_file import read_torch_file

_STATES = (MASTERS, "exp_avg", "exp_avg_sq")
_TENSOR = ("tp2_z1_", "tp2_z2_", "tp2_z3_")  # without ZeRO there are no flat groups
_CASES = [
    case
    for case in cases_named("z1_", "z2_", "z3_", "ds0_", "hf_", "accelerate_", *_TENSOR)
    if case.name not in {"z3_w2_bf16_tags", "hf_trainer_z3_outdir"}  # of several tags, or elsewhere
]
_OWN = "global_step2/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


class _Stub:
    """Stands for any class of DeepSpeed's."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_known = module.startswith(("torch", "collections"))
        return super().find_class(module, name) if is_known else _Stub


def _load(file: IO[bytes], **options: str) -> object:
    return _Unpickler(file, **options).load()


def _raw(ranks: RankStates) -> list[Any]:
    """The optimizer files of all ranks, as torch loads them."""
    module = SimpleNamespace(__name__="inert", Unpickler=_Unpickler, load=_load)
    return [
        torch.load(ranks.optimizer[rank].file.path, pickle_module=module, weights_only=False)[
            "optimizer_state_dict"
        ]
        for rank in sorted(ranks.optimizer)
    ]


def _flat(states: Any, group: int, state: str) -> torch.Tensor:
    """One rank's part of a flat group."""
    key = "fp32_flat_groups" if "fp32_flat_groups" in states else "single_partition_of_fp32_groups"
    if state == MASTERS:
        return states[key][group]
    base = states[
        "optimizer_state_dict" if "fp32_flat_groups" in states else "base_optimizer_state"
    ]
    return (base["state"] if isinstance(base, dict) else base)[group][state]


def _cut(
    parts: list[torch.Tensor], shapes: Mapping[str, Any], gaps: list[int], *, striped: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one flat group, out of the parts of the ranks that share it."""
    offset = 0
    for (name, shape), gap in zip(shapes.items(), gaps or [0] * len(shapes), strict=True):
        numel = torch.Size(shape).numel()
        if striped:
            share = -(-numel // len(parts))
            yield name, torch.cat([part[offset : offset + share] for part in parts])[:numel]
            offset += share
        else:
            yield name, torch.cat(parts)[offset : offset + numel]
            offset += numel + gap


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _model(ranks: RankStates) -> ModelStates:
    assert ranks.first_model is not None
    return ranks.first_model


@pytest.mark.parametrize("state", _STATES)
@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_every_state_of_every_weight_is_what_torch_cuts_out(case: Path, state: str) -> None:
    for ranks in read_cells(tag_of(case)).values():
        model, raw = _model(ranks), _raw(ranks)
        assert ranks.is_zero3 or ranks.world_size == len(raw)
        owners = owners_of(ranks, ranks.world_size)
        bound = bind_trained(owners, model, is_zero3=ranks.is_zero3, state=state)
        found = {tensor.name: tensor for one in bound for tensor in one.tensors}
        raw = raw[: ranks.world_size]
        expected = {
            name: value
            for group, shapes in enumerate(model.param_shapes)
            for name, value in _cut(
                [_flat(states, group, state) for states in raw],
                shapes,
                (raw[0].get("param_alignment_paddings") or {group: []})[group],
                striped=ranks.is_zero3,
            )
        }
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            source = found[name].source
            assert source is not None
            assert read_bytes(source) == _bytes(value), name
            assert found[name].dtype.torch_name == str(value.dtype).removeprefix("torch.")


@pytest.mark.parametrize("state", _STATES)
def test_the_states_of_experts_are_those_of_the_ranks_that_share_them(state: str) -> None:
    case = next(case for case in cases_named("moe_z2_w4_ep2") if case.name == "moe_z2_w4_ep2")
    (ranks,) = read_cells(tag_of(case)).values()
    model, raw = _model(ranks), _raw(ranks)
    shared = [index for index, count in enumerate(raw[0]["partition_count"]) if count == 2]
    bound = bind_experts(ranks, model, shared, 4, state)
    for index, group in zip(shared, bound.groups, strict=True):
        for ep_rank, one in enumerate(group):
            parts = [_flat(raw[rank], index, state) for rank in (ep_rank, ep_rank + 2)]
            expected = dict(_cut(parts, model.param_shapes[index], [], striped=False))
            for tensor in one.tensors:
                assert tensor.source is not None
                assert read_bytes(tensor.source) == _bytes(expected[tensor.name])


def _edited(root: Path, rank: int, change: Any) -> None:
    edit(root / _OWN.format(rank), lambda file: change(file["optimizer_state_dict"]))


def test_a_state_of_other_length_or_type_or_none_is_refused(tmp_path: Path) -> None:
    """Whole parameters of a partition, 8-bit codes and block scales are no run of elements."""
    save(small_model(), Run(stage=2), tmp_path)

    def change(states: dict[str, Any]) -> None:
        own = states["base_optimizer_state"]["state"][0]
        own["whole"] = torch.zeros(own["exp_avg"].numel() + 5)
        own["codes"] = torch.zeros(own["exp_avg"].numel(), dtype=torch.uint8)

    for rank in range(2):
        _edited(tmp_path, rank, change)
    files = [read_torch_file(tmp_path / _OWN.format(rank)) for rank in range(2)]
    owners = [read_optimizer_states(file) for file in files]
    (cell,) = read_cells(tmp_path / "global_step2").values()
    run = flat_run(0, _model(cell).param_shapes[0], owners)
    for state in ("whole", "codes", "absmax"):
        with pytest.raises(LayoutError):
            bind(run, owners, is_zero3=False, state=state)
    assert bind(run, owners, is_zero3=False, state="exp_avg").flat is not None


def test_a_missing_rank_leaves_names_and_shapes(tmp_path: Path) -> None:
    save(small_model(), Run(stage=3), tmp_path)
    (tmp_path / _OWN.format(1)).unlink()
    (cell,) = read_cells(tmp_path / "global_step2").values()
    bound = bind_trained(owners_of(cell, 2), _model(cell), is_zero3=True)
    tensors = [tensor for one in bound for tensor in one.tensors]
    assert {one.name: one.shape for one in tensors} == {
        name: shape for shapes in _model(cell).param_shapes for name, shape in shapes.items()
    }
    assert {one.source for one in tensors} == {None}
