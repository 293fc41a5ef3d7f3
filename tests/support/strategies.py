"""Hypothesis: models of any shape, and every way of saving them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.support.checkpoints import Model, Run, Tensors, values
from zexport import ExportDType

_SIZES = st.sampled_from([0, 1, 1, 2, 3, 5, 8])
SHAPES = st.lists(_SIZES, max_size=3).map(tuple)
"""Scalars, vectors, matrices; some without an element, most smaller than the world."""

MODULE_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
EXPORT_DTYPES = st.sampled_from([ExportDType.FP32, ExportDType.BF16, ExportDType.FP16])
TORCH_DTYPES = {
    ExportDType.FP32: torch.float32,
    ExportDType.BF16: torch.bfloat16,
    ExportDType.FP16: torch.float16,
}


@st.composite
def models(draw: st.DrawFn) -> Model:
    """One to three groups of up to four weights each, with frozen, tied and buffer tensors."""
    dtype = draw(MODULE_DTYPES)
    seeds = iter(range(1000))

    def tensors(prefix: str, shapes: list[tuple[int, ...]], kind: torch.dtype) -> Tensors:
        return {f"{prefix}.{i}": values(s, next(seeds), kind) for i, s in enumerate(shapes)}

    master = draw(st.sampled_from([torch.float32, torch.float32, dtype]))
    groups = [
        tensors(f"group{index}", shapes, master)
        for index, shapes in enumerate(
            draw(st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=3))
        )
    ]
    frozen = tensors("frozen", draw(st.lists(SHAPES, max_size=3)), dtype)
    buffers = tensors("buffer", draw(st.lists(SHAPES, max_size=2)), dtype)
    buffers["count"] = torch.tensor(2**40 + draw(st.integers(0, 9)))
    # DeepSpeed reports all empty tensors as tied to each other.
    stored = {**{n: t for group in groups for n, t in group.items()}, **frozen}
    full = [name for name, tensor in stored.items() if tensor.numel()]
    tied = draw(st.lists(st.sampled_from(full), max_size=2)) if full else []
    return Model(groups, frozen, buffers, {f"tied.{i}": name for i, name in enumerate(tied)}, dtype)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Every stage, one to five ranks, and what may vary within a stage."""
    stage = draw(st.sampled_from([1, 2, 3]))
    bf16_optimizer = stage == 1 and draw(st.booleans())
    return Run(
        stage=stage,
        world_size=draw(st.integers(1, 5)),
        replica_groups=draw(st.integers(1, 3)) if stage == 3 else 1,
        sub_group_numel=draw(st.sampled_from([1, 10, 1 << 40])),
        aligned=stage < 3 and not bf16_optimizer and draw(st.booleans()),
        bf16_optimizer=bf16_optimizer,
        optimizer_step=draw(st.sampled_from(["tensor", None, 2])),
        legacy=draw(st.booleans()),
    )
