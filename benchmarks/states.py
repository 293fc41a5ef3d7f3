"""The dictionaries DeepSpeed 0.19.8 saves: their keys, in its order, and the types of their values.

Sources: ``runtime/engine.py`` (``_save_checkpoint``, ``_save_zero_checkpoint``),
``runtime/zero/stage3.py`` and ``runtime/zero/stage_1_and_2.py`` (``state_dict``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from benchmarks.llama import Parameter
from benchmarks.values import Fragment

STEPS = 2
_VERSION = "0.19.8"


def shapes_of(parameters: Iterable[Parameter]) -> OrderedDict[str, torch.Size]:
    """Names and shapes, in order."""
    return OrderedDict((p.name, torch.Size(p.shape)) for p in parameters)


def model_state(
    *,
    module: OrderedDict[str, torch.Tensor],
    shapes: list[OrderedDict[str, torch.Size]],
    frozen_shapes: OrderedDict[str, torch.Size],
    frozen_pieces: OrderedDict[str, torch.Tensor],
    world_size: int,
    stage: ZeroStageEnum,
) -> dict[str, object]:
    """What a ``*_model_states.pt`` holds."""
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": frozen_shapes,
        "shared_params": {},
        "frozen_param_fragments": frozen_pieces,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": STEPS,
        "global_samples": STEPS * world_size,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _ds_config(stage),
        "ds_version": _VERSION,
    }


def zero3_optimizer_state(
    flats: Sequence[torch.Tensor], ids: Sequence[str], world_size: int
) -> dict[str, object]:
    """What a ZeRO-3 ``*_optim_states.pt`` holds; ``ids`` names each flat group."""
    base = _adamw_state(flats)
    for flat, group_id in zip(flats, ids, strict=True):
        flat.requires_grad_()
        flat.ds_id = group_id  # torch.save keeps such attributes
    state = {
        "zero_stage": ZeroStageEnum.weights,
        **_loss_scale(),
        "partition_count": world_size,
        "optimizer_state_dict": base,
        "fp32_flat_groups": list(flats),
    }
    return _with_config(state, ZeroStageEnum.weights)


def zero2_optimizer_state(
    flat: torch.Tensor,
    fragments: Sequence[Fragment],
    *,
    padding: int,
    tensors: int,
    world_size: int,
) -> dict[str, object]:
    """What a ZeRO-2 ``*_optim_states.pt`` holds.

    Args:
        flat: the rank's whole partition.
        fragments: its tensors.
        padding: elements at its end that belong to no weight; they stay in the file.
        tensors: number of weights in the whole group.
        world_size: number of ranks.
    """
    base = _adamw_state([flat])
    slices = OrderedDict(
        (part.parameter.name, fragment_address(numel=part.numel, start=part.start))
        for part in fragments
    )
    state = {
        **_loss_scale(),
        "clip_grad": 1.0,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [flat[: flat.numel() - padding].requires_grad_()],
        "zero_stage": ZeroStageEnum.gradients,
        "group_paddings": [padding],
        "param_alignment_paddings": [[0] * tensors],
        "partition_count": [world_size],
        "ds_version": _VERSION,
        "param_slice_mappings": [slices],
    }
    return _with_config(state, ZeroStageEnum.gradients)


def _with_config(state: dict[str, object], stage: ZeroStageEnum) -> dict[str, object]:
    return {
        "optimizer_state_dict": state,
        "ds_config": _ds_config(stage),
        "ds_version": _VERSION,
    }


def _loss_scale() -> dict[str, object]:
    return {"loss_scaler": LossScaler(scale=1.0), "dynamic_loss_scale": False, "overflow": False}


def _adamw_state(flats: Sequence[torch.Tensor]) -> dict[str, object]:
    """Torch's AdamW after some steps: two moments for every weight, two thirds of the bytes."""
    group = {
        "lr": 0.01,
        "betas": (0.9, 0.999),
        "eps": 1e-08,
        "weight_decay": 0.01,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "params": list(range(len(flats))),
    }
    state = {
        index: {
            "step": torch.tensor(float(STEPS)),
            "exp_avg": flat * 0.1,
            "exp_avg_sq": flat.square(),
        }
        for index, flat in enumerate(flats)
    }
    return {"state": state, "param_groups": [group]}


def _ds_config(stage: ZeroStageEnum) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": int(stage)},
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
    }
