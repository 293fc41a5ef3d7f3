"""``inspect --stats`` compared with numpy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import Model, Run, save
from tests.support.cli import run
from tests.support.real_cases import handed_over, on_every_real_checkpoint
from zexport import DamagedCheckpointError, open_checkpoint


def statistics(root: Path) -> dict[str, dict[str, Any]]:
    done = run("inspect", root, "--stats", "--json").or_raise()
    tensors = json.loads(done.stdout)["checkpoint"]["tensors"]
    return {one["name"]: one["statistics"] for one in tensors}


def assert_equal(found: dict[str, Any], value: torch.Tensor) -> None:
    values = value.reshape(-1)
    wide = values.to(torch.float64).numpy()
    finite = wide[np.isfinite(wide)]
    assert (found["nan"], found["inf"]) == (np.isnan(wide).sum(), np.isinf(wide).sum())
    if not finite.size:
        assert [found[key] for key in ("norm", "min", "max", "mean")] == [0, None, None, None]
        return
    exact = finite if value.is_floating_point() else values.numpy().astype(object)
    norm = math.hypot(*finite)
    assert (found["min"], found["max"]) == (exact.min(), exact.max())
    assert math.isclose(found["norm"], norm, rel_tol=1e-12)
    mean = math.fsum(finite / len(finite))
    assert math.isclose(found["mean"], mean, rel_tol=1e-9, abs_tol=1e-12 * norm)


@pytest.mark.parametrize("stage", [1, 3])
def test_special_values_and_dtypes(tmp_path: Path, stage: int) -> None:
    torch.manual_seed(0)
    trained = {
        "plain": torch.randn(7, 11) * 3 + 1,
        "long": torch.randn(1000, 700),  # several blocks
        "special": torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), -2.5, 0.0, 1e-45]),
        "nowhere": torch.full((5,), float("nan")),
        "extreme": torch.tensor([3.4e38, -3.4e38, 3.4e38, 1.0]),
        "none": torch.empty(0),
        "scalar": torch.tensor(-4.25),
    }
    frozen = {"half": torch.randn(9, 5).bfloat16(), "fp16": torch.randn(13).half() * 100}
    buffers = {
        "int64": torch.tensor([2**62 + 1, -(2**62) - 3, 7]),
        "bool": torch.tensor([True, False, True]),
        "byte": torch.tensor([0, 255, 3], dtype=torch.uint8),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "double": torch.tensor([1e300, -1e-300, 2.0], dtype=torch.float64),
        "strided": torch.arange(24.0).reshape(4, 6).T,
    }
    model = Model([trained], frozen, buffers)
    found = statistics(save(model, Run(stage=stage), tmp_path))
    assert found.keys() == model.tensors.keys()
    for name, one in found.items():
        assert_equal(one, model.tensors[name])


def test_changed_weight_is_found_by_its_checksum(zero3: Path) -> None:
    (extent, *_) = open_checkpoint(zero3).tensors[0].source.extents(0, 4)  # type: ignore[union-attr]
    content = bytearray(extent.path.read_bytes())
    content[extent.offset] ^= 1
    extent.path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="CRC-32"):
        statistics(zero3)


@on_every_real_checkpoint
def test_statistics_are_those_of_the_live_weights(root: Path) -> None:
    case = next(folder for folder in root.parents if (folder / "case.json").is_file())
    truth = load_file(case / "truth.safetensors")
    for name, one in statistics(handed_over(case)).items():
        assert_equal(one, truth[name])
