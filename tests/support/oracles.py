"""Naive consolidation: load every file with torch, concatenate in memory, split."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.checkpoints import Tensors, deepspeed_names
from tests.support.raw_states import by_rank, raw_states


def consolidated(tag_dir: Path) -> Tensors:
    """Every tensor of a checkpoint, at its own element type; tied names left out."""
    paths = by_rank(tag_dir, "model_states")
    with deepspeed_names():
        models = [torch.load(path, weights_only=False) for path in paths]
        states = raw_states(tag_dir)
    first, is_zero3 = models[0], paths[0].name.startswith("zero_pp_rank")
    tensors = {
        name: states[f"{name}|fp32"].view(shape)
        for shapes in first["param_shapes"]
        for name, shape in shapes.items()
    }
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        pieces = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        tensors[name] = torch.cat(pieces)[: shape.numel()].view(shape)
    for name, value in first["module"].items():
        is_placeholder = is_zero3 and name not in first["buffer_names"]
        if name not in tensors and name not in first["shared_params"] and not is_placeholder:
            tensors[name] = value
    return tensors


def cast(tensors: Tensors, dtype: torch.dtype, buffers: set[str]) -> Tensors:
    """Cast like an export to ``dtype``: fp32 keeps buffers, integers never change."""
    kept = {
        name
        for name, value in tensors.items()
        if not value.is_floating_point() or (name in buffers and dtype is torch.float32)
    }
    return {name: value if name in kept else value.to(dtype) for name, value in tensors.items()}


def differences(found: Tensors, expected: Tensors) -> list[str]:
    """Names that are not there, or not the same bit for bit."""
    return sorted(
        (found.keys() ^ expected.keys())
        | {name for name in found.keys() & expected.keys() if not same(found[name], expected[name])}
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether type, shape and every bit agree (NaN with NaN of the same bits)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other) if t.numel()]
    return not bits or torch.equal(bits[0], bits[1])
