"""Statistics of tensors against numpy's own, on files that torch has written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import Model, Run, optimizer_file, save
from tests.support.real_cases import handed_over, on_every_real_checkpoint
from zexport import DamagedCheckpointError
from zexport.checkpoint.open import open_checkpoint
from zexport.inspect.statistics import TensorStatistics, measure

BUFFERS = [8, 24, 1 << 20]


def naive(value: torch.Tensor) -> tuple[float, object, object, float | None, int, int]:
    """All in memory at once, in doubles."""
    values = value.reshape(-1)
    wide = values.to(torch.float64).numpy()
    finite = wide[np.isfinite(wide)]
    nan, inf = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
    if not finite.size:
        return 0.0, None, None, None, nan, inf
    exact = finite if value.is_floating_point() else values.numpy().astype(object)
    return (
        float(np.linalg.norm(finite)),
        exact.min(),
        exact.max(),
        float(finite.mean()),
        nan,
        inf,
    )


def assert_equal(found: TensorStatistics, value: torch.Tensor) -> None:
    norm, low, high, mean, nan, inf = naive(value)
    assert (found.min, found.max, found.nan, found.inf) == (low, high, nan, inf), found.name
    assert math.isclose(found.norm, norm, rel_tol=1e-12), found.name
    assert (found.mean is None) == (mean is None)
    if mean is not None and found.mean is not None:
        assert math.isclose(found.mean, mean, rel_tol=1e-9, abs_tol=1e-12 * (norm + 1)), found.name


def remarkable() -> Model:
    """Masters with every special value, frozen weights of 16 bits, buffers of every kind."""
    torch.manual_seed(0)
    masters = {
        "plain": torch.randn(7, 11) * 3 + 1,
        "special": torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), -2.5, 0.0, 1e-45]),
        "nowhere": torch.full((5,), float("nan")),
        "extreme": torch.tensor([3.4e38, -3.4e38, 3.4e38, 1.0]),
        "none": torch.empty(0),
        "scalar": torch.tensor(-4.25),
    }
    frozen = {"half": torch.randn(9, 5).bfloat16(), "fp16": torch.randn(13).half() * 100}
    buffers = {
        "long": torch.tensor([2**62 + 1, -(2**62) - 3, 7]),
        "bool": torch.tensor([True, False, True]),
        "byte": torch.tensor([0, 255, 3], dtype=torch.uint8),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "short": torch.tensor([-5, 30000], dtype=torch.int16),
        "int": torch.tensor([-5, 2**31 - 1], dtype=torch.int32),
        "double": torch.randn(6, 7, dtype=torch.float64),
        "strided": torch.arange(24.0).reshape(4, 6).T,
    }
    return Model([masters], frozen, buffers)


@pytest.mark.parametrize("buffer_nbytes", BUFFERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_statistics_equal_numpys_whatever_the_buffer(
    tmp_path: Path, stage: int, buffer_nbytes: int
) -> None:
    model = remarkable()
    checkpoint = open_checkpoint(save(model, Run(stage=stage), tmp_path))
    found = measure(checkpoint, buffer_nbytes=buffer_nbytes).tensors
    assert {entry.name for entry in found} == model.tensors.keys()
    for entry in found:
        assert_equal(entry, model.tensors[entry.name])


def test_a_changed_weight_is_told_by_its_crc(zero3: Path) -> None:
    path = optimizer_file(zero3 / "global_step2", remarkable(), 1)
    checkpoint = open_checkpoint(zero3)
    (extent, *_) = checkpoint.tensors[0].source.extents(0, 4)  # type: ignore[union-attr]
    assert extent.path != path
    content = bytearray(extent.path.read_bytes())
    content[extent.offset] ^= 1
    extent.path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="CRC-32"):
        measure(open_checkpoint(zero3))


def test_tensors_of_missing_ranks_are_left_out(zero3: Path) -> None:
    optimizer_file(zero3 / "global_step2", remarkable(), 2).unlink()
    checkpoint = open_checkpoint(zero3)
    without = {tensor.name for tensor in checkpoint.tensors if tensor.source is None}
    found = {entry.name for entry in measure(checkpoint).tensors}
    assert without
    assert found == {tensor.name for tensor in checkpoint.tensors} - without


@on_every_real_checkpoint
def test_statistics_are_those_of_the_live_weights(root: Path) -> None:
    case = next(folder for folder in root.parents if (folder / "case.json").is_file())
    truth = load_file(case / "truth.safetensors")
    checkpoint = open_checkpoint(handed_over(case))
    assert json.loads((case / "case.json").read_text())["name"] == case.name
    for entry in measure(checkpoint).tensors:
        assert_equal(entry, truth[entry.name])
