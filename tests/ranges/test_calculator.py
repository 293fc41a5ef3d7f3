"""Computed tensors: right, and the same bits in every window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from zexport.ranges import calculator
from zexport.ranges.computed import Elements, Factors, LowRankUpdate, Recast, ScaledSum
from zexport.ranges.dtypes import DType
from zexport.ranges.reader import SourceReader
from zexport.ranges.source import ByteSource, Extent
from zexport.storage.files import version


class File:
    def __init__(self, path: Path, values: torch.Tensor) -> None:
        raw = values.contiguous().view(torch.uint8).numpy().tobytes()
        path.write_bytes(raw)
        self.path, self.version, self.records = path, version(path), ()
        dtype = DType.BF16 if values.dtype is torch.bfloat16 else DType.F32
        self.elements = Elements(Extent(path, 0, len(raw)), dtype)


class Tensors:
    """Random tensors in files, by name."""

    def __init__(self, folder: Path, **shapes: tuple[int, ...]) -> None:
        torch.manual_seed(3)
        self.values = {name: torch.randn(shape) for name, shape in shapes.items()}
        self.values["base"] = self.values["base"].bfloat16()
        self.files = {n: File(folder / n, value) for n, value in self.values.items()}

    def __getitem__(self, name: str) -> Elements:
        return self.files[name].elements

    def read(self, source: ByteSource, step: int) -> torch.Tensor:
        out = np.empty(source.nbytes // 4, np.float32)
        with SourceReader(self.files.values()) as reader:
            for at in range(0, out.size, step):
                part = out[at : at + step]
                reader.read_into(source, at * 4, memoryview(part).cast("B"))
        return torch.from_numpy(out)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a small tensor many blocks, slabs and parts."""
    monkeypatch.setattr(calculator, "_BLOCK_NUMEL", 64)
    monkeypatch.setattr(calculator, "_SLAB_NUMEL", 100)
    monkeypatch.setattr(calculator, "_PART_NUMEL", 50)


def delta(factors: Factors, tensors: Tensors) -> torch.Tensor:
    """The update as peft's ``ParamWrapper`` computes it, ``(matrices, outputs, inputs)``."""
    a = tensors.values["a"].view(factors.matrices, factors.rank, factors.inputs)
    b = tensors.values["b"].view(factors.outputs, factors.rank, factors.matrices)
    return torch.einsum("ore,eri->eoi", b, a)


@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_magnitude", [False, True])
def test_update_is_right_and_the_same_in_every_window(
    tmp_path: Path, matrices: int, is_transposed: bool, has_magnitude: bool
) -> None:
    inputs, outputs, rank = 7, 53, 3
    shape = (inputs, outputs) if is_transposed else (outputs, inputs)
    tensors = Tensors(
        tmp_path,
        base=(matrices, *shape),
        a=(matrices * rank, inputs),
        b=(outputs, rank * matrices),
        magnitude=(outputs,),
    )
    factors = Factors(tensors["a"], tensors["b"], inputs, outputs, rank, matrices)
    magnitude = tensors["magnitude"] if has_magnitude else None
    update = LowRankUpdate(tensors["base"], factors, 0.3, is_transposed, magnitude)
    whole = tensors.read(update, 1 << 20)
    for step in (1, 5, 64, 371):
        assert torch.equal(tensors.read(update, step), whole)
    change = delta(factors, tensors) * 0.3
    wanted = tensors.values["base"].float() + (change.mT if is_transposed else change)
    if has_magnitude:
        dim = 1 if is_transposed else 2
        norm = torch.linalg.norm(wanted, dim=dim, keepdim=True)
        wide = tensors.values["magnitude"].view(1, 1, -1)
        wanted *= (wide if is_transposed else wide.mT) / norm
    torch.testing.assert_close(whole.view(wanted.shape), wanted)


def test_sum_and_cast_equal_torch(tmp_path: Path) -> None:
    tensors = Tensors(tmp_path, base=(130,), addend=(130,))
    total = ScaledSum(tensors["base"], tensors["addend"], 0.7)
    base, addend = tensors.values["base"], tensors.values["addend"]
    assert torch.equal(tensors.read(total, 9), base.float() + addend * 0.7)
    rounded = Elements(Recast(tensors["addend"], DType.BF16), DType.BF16)
    assert torch.equal(tensors.read(Recast(rounded, DType.F32), 11), addend.bfloat16().float())
