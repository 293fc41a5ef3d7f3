"""Made-up ZeRO checkpoints: any model, saved with ``torch.save`` in DeepSpeed 0.19's layout.

Padding is NaN throughout, so that an element read from it cannot pass for a weight.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A model in training; the groups hold its fp32 master weights."""

    groups: Sequence[Tensors]
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    @property
    def trained(self) -> Tensors:
        return {name: value for group in self.groups for name, value in group.items()}

    @property
    def tensors(self) -> Tensors:
        """Every tensor once, each with its own element type."""
        return {**self.trained, **self.frozen, **self.buffers}


@dataclass(frozen=True)
class Run:
    """How a model was trained and saved.

    ``sub_group_numel`` (ZeRO-3) and ``aligned`` (ZeRO-1/2) are DeepSpeed's ``sub_group_size`` and
    ``parameter_alignment``; ``optimizer_step`` is ``None`` for an optimizer that counts none.
    With ``replica_groups`` ZeRO-3 is MiCS: the first ``world_size`` ranks of that many times as
    many hold the whole model, and save it.
    """

    stage: int = 3
    world_size: int = 2
    replica_groups: int = 1
    sub_group_numel: int = 1 << 40
    aligned: bool = False
    bf16_optimizer: bool = False
    exclude_frozen: bool = False
    steps: int = 2
    optimizer_step: object = "tensor"
    ds_version: str = "0.19.8"
    client_state: Mapping[str, object] = field(default_factory=dict)
    legacy: bool = False


def save(model: Model, run: Run, root: Path, tag: str = "global_step2") -> Path:
    """Write one tag and ``latest``; the folder that holds both."""
    folder = root / tag
    folder.mkdir(parents=True, exist_ok=True)
    is_zero3 = run.stage == 3
    for rank in range(run.world_size):
        optimizer = _zero3_optimizer if is_zero3 else _zero12_optimizer
        _save(optimizer(model, run, rank), optimizer_file(folder, model, rank), run)
        if is_zero3 or rank == 0:
            _save(_model_states(model, run, rank), model_file(folder, run, rank), run)
    (root / "latest").write_text(tag)
    return root


def optimizer_file(folder: Path, model: Model, rank: int) -> Path:
    prefix = "bf16_" if model.dtype is torch.bfloat16 else ""
    return folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_file(folder: Path, run: Run, rank: int) -> Path:
    prefix = f"zero_pp_rank_{rank}_" if run.stage == 3 else ""
    return folder / f"{prefix}mp_rank_00_model_states.pt"


def _save(state: object, path: Path, run: Run) -> None:
    with deepspeed_names():
        torch.save(state, path, _use_new_zipfile_serialization=not run.legacy)


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Load a rank file, let ``change`` edit its dictionary, and write it again."""
    with deepspeed_names():
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)


# --- model states ---


def _model_states(model: Model, run: Run, rank: int) -> dict[str, object]:
    frozen = _recorded_frozen(model, run)
    stripes = {
        name: _stripe(value, rank, run.world_size) if run.stage == 3 else value
        for name, value in (frozen or {}).items()
    }
    return {
        "module": _module(model, run),
        "buffer_names": list(model.buffers),
        "optimizer": None,
        "param_shapes": [_shapes(group) for group in flat_groups(model, run)],
        "frozen_param_shapes": None if frozen is None else _shapes(frozen),
        "shared_params": dict(model.tied) if rank == 0 else {},
        "frozen_param_fragments": None if frozen is None else OrderedDict(stripes),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": run.steps,
        "global_samples": run.steps * run.world_size,
        "dp_world_size": run.world_size * run.replica_groups,
        "mp_world_size": 1,
        "ds_config": _config(model, run),
        "ds_version": run.ds_version,
        **run.client_state,
    }


def _recorded_frozen(model: Model, run: Run) -> Tensors | None:
    """ZeRO-1 keeps no record, nor does a save that excludes frozen parameters."""
    return None if run.exclude_frozen or run.stage == 1 else model.frozen


def _shapes(tensors: Tensors) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, value.shape) for name, value in tensors.items())


def _module(model: Model, run: Run) -> OrderedDict[str, torch.Tensor]:
    """The module's state dict: placeholders under ZeRO-3, views of the flat 16-bit groups else."""
    module: OrderedDict[str, torch.Tensor] = OrderedDict()
    frozen = {} if run.exclude_frozen else model.frozen
    if run.stage == 3:
        for name in (*model.trained, *frozen):
            module[name] = torch.empty(0, dtype=model.dtype)
    else:
        for group in model.groups:
            module.update(_views(group, model.dtype))
        module.update(frozen)
    module.update(model.buffers)
    for alias, name in model.tied.items():
        if name in module:
            module[alias] = module[name]
    return module


def _views(group: Tensors, dtype: torch.dtype) -> Tensors:
    flat = torch.cat([torch.empty(0), *(value.reshape(-1) for value in group.values())]).to(dtype)
    views: Tensors = {}
    offset = 0
    for name, value in group.items():
        views[name] = flat[offset : offset + value.numel()].view(value.shape)
        offset += value.numel()
    return views


# --- optimizer states ---


def flat_groups(model: Model, run: Run) -> list[Tensors]:
    """The dictionaries of ``param_shapes``: parameter groups, under ZeRO-3 cut into sub-groups."""
    if run.stage != 3:
        return [dict(group) for group in model.groups]
    groups: list[Tensors] = []
    for group in model.groups:
        current: Tensors = {}
        for name, value in group.items():
            current[name] = value
            if sum(map(torch.numel, current.values())) >= run.sub_group_numel:
                groups.append(current)
                current = {}
        groups += [current] if current else []
    return groups


def _zero3_optimizer(model: Model, run: Run, rank: int) -> dict[str, object]:
    groups = flat_groups(model, run)
    flats = [
        torch.cat([_stripe(value, rank, run.world_size) for value in group.values()])
        for group in groups
    ]
    for index, flat in enumerate(flats):
        flat.ds_id = f"{index}_{len(flats)}"
    state = {
        "zero_stage": _stand_in("deepspeed.runtime.zero.config", "ZeroStageEnum")(3),
        **_loss_scale(),
        "partition_count": run.world_size,
        "optimizer_state_dict": _adam(flats, run),
        "fp32_flat_groups": flats,
    }
    return _with_config(state, model, run)


def _stripe(value: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Rank's equal share of a tensor that is padded by itself."""
    flat = value.reshape(-1)
    share = -(-flat.numel() // world_size)
    return _padded(flat, share * world_size)[rank * share : (rank + 1) * share].clone()


def _zero12_optimizer(model: Model, run: Run, rank: int) -> dict[str, object]:
    partitions: list[torch.Tensor] = []
    trimmed: list[int] = []
    paddings: list[list[int]] = []
    for group in model.groups:
        paddings.append(
            _alignment_paddings(group, model.dtype) if run.aligned else [0] * len(group)
        )
        flat = _flat(group, paddings[-1])
        share = -(-flat.numel() // (2 * run.world_size)) * 2
        partition = _padded(flat, share * run.world_size)[rank * share : (rank + 1) * share].clone()
        surplus = share - min(share, max(0, flat.numel() - rank * share))
        trimmed.append(surplus)
        keep = share if run.bf16_optimizer else share - surplus
        partitions.append(partition[:keep])
    state: dict[str, object] = {
        "clip_grad": 1.0,
        "base_optimizer_state": _adam(partitions, run),
        "single_partition_of_fp32_groups": partitions,
        "group_paddings": trimmed,
        "partition_count": [run.world_size] * len(partitions),
        "ds_version": run.ds_version,
        "param_slice_mappings": [OrderedDict() for _ in partitions],
    }
    if not run.bf16_optimizer:
        stage = _stand_in("deepspeed.runtime.zero.config", "ZeroStageEnum")(run.stage)
        state |= {**_loss_scale(), "zero_stage": stage, "param_alignment_paddings": paddings}
    return _with_config(state, model, run)


def _flat(group: Tensors, paddings: Sequence[int]) -> torch.Tensor:
    dtype = next(iter(group.values())).dtype if group else torch.float32
    parts = [
        _padded(value.reshape(-1), value.numel() + padding)
        for value, padding in zip(group.values(), paddings, strict=True)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def _alignment_paddings(group: Tensors, dtype: torch.dtype) -> list[int]:
    """Each parameter but the last is padded to 16 bytes of the module's type."""
    step = 16 // dtype.itemsize
    paddings = [-value.numel() % step for value in group.values()]
    return [*paddings[:-1], 0] if paddings else []


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    filler = float("nan") if flat.is_floating_point() else 0
    return torch.cat([flat, torch.full((numel - flat.numel(),), filler, dtype=flat.dtype)])


def _adam(flats: Sequence[torch.Tensor], run: Run) -> dict[str, object]:
    step = torch.tensor(float(run.steps)) if run.optimizer_step == "tensor" else run.optimizer_step
    states = {
        index: {"exp_avg": flat.clone(), "exp_avg_sq": flat.clone()}
        | ({} if step is None else {"step": step})
        for index, flat in enumerate(flats)
    }
    return {"state": states, "param_groups": [{"lr": 0.01, "params": list(states)}]}


def _loss_scale() -> dict[str, object]:
    scaler = _stand_in("deepspeed.runtime.fp16.loss_scaler", "LossScaler")()
    return {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}


def _config(model: Model, run: Run) -> dict[str, object]:
    return {
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": run.stage},
        "bf16": {"enabled": model.dtype is torch.bfloat16},
        "fp16": {"enabled": model.dtype is torch.float16},
    }


def _with_config(state: Mapping[str, object], model: Model, run: Run) -> dict[str, object]:
    return {
        "optimizer_state_dict": dict(state),
        "ds_config": _config(model, run),
        "ds_version": run.ds_version,
    }


# --- DeepSpeed's classes, by name, without importing DeepSpeed ---


class ZeroStageEnum(int, Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 128.0


class DynamicLossScaler(LossScaler):
    pass


class fragment_address:  # noqa: N801 - DeepSpeed's name, which the pickle contains
    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


def _module_of(cls: type, home: str) -> ModuleType:
    cls.__module__, cls.__qualname__ = home, cls.__name__
    module = ModuleType(home)
    setattr(module, cls.__name__, cls)
    return module


_MODULES = {
    "deepspeed": ModuleType("deepspeed"),
    "deepspeed.utils": ModuleType("deepspeed.utils"),
    "deepspeed.utils.tensor_fragment": _module_of(
        fragment_address, "deepspeed.utils.tensor_fragment"
    ),
    "deepspeed.runtime.zero.config": _module_of(ZeroStageEnum, "deepspeed.runtime.zero.config"),
    "deepspeed.runtime.fp16.loss_scaler": _module_of(
        LossScaler, "deepspeed.runtime.fp16.loss_scaler"
    ),
}
DynamicLossScaler.__module__ = LossScaler.__module__
vars(_MODULES[LossScaler.__module__])["DynamicLossScaler"] = DynamicLossScaler


def _stand_in(home: str, name: str) -> type:
    found = getattr(_MODULES[home], name)
    assert isinstance(found, type)
    return found


@contextmanager
def deepspeed_names() -> Iterator[None]:
    """Let pickle find these classes where DeepSpeed's own would be."""
    with mock.patch.dict(sys.modules, _MODULES):
        yield


# --- a small model ---


def values(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ordinary numbers; no two seeds give the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(prod(shape), generator=generator).view(tuple(shape)).to(dtype)


def small_model(dtype: torch.dtype = torch.bfloat16) -> Model:
    """Two groups, frozen weights, a tied pair, and buffers of every kind."""
    return Model(
        groups=[
            {"emb.weight": values((13, 7), 1), "lin.weight": values((5, 7), 2)},
            {"lin.bias": values((5,), 3), "scale": values((), 4)},
        ],
        frozen={"norm.weight": values((7,), 5, dtype), "norm.bias": values((7,), 6, dtype)},
        buffers={
            "mask": torch.tensor([True, False, True]),
            "big": torch.tensor([2**40 + 1, -1]),
            "table": values((3, 2), 7),
            "mean": values((5,), 8, dtype),
        },
        tied={"head.weight": "emb.weight"},
        dtype=dtype,
    )
