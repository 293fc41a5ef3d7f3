"""Exports of generated checkpoints equal a naive consolidation bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Model, Run, Tensors, save, small_model, values
from tests.support.oracles import cast, consolidated, differences
from tests.support.strategies import EXPORT_DTYPES, TORCH_DTYPES, models, runs
from zexport import ExportDType, ExportOptions

_ALL_RUNS = [
    Run(stage=1),
    Run(stage=1, bf16_optimizer=True),
    Run(stage=2, world_size=3),
    Run(stage=2, aligned=True),
    Run(stage=3, world_size=3),
    Run(stage=3, world_size=4, sub_group_numel=20),
    Run(stage=3, world_size=2, replica_groups=2),
]


def _load(out: Path) -> Tensors:
    files = sorted(out.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(model=models(), run=runs(), dtype=EXPORT_DTYPES, shard_nbytes=st.integers(1, 200))
@example(
    model=Model([{"a": values((1,), 1)}]), run=Run(2, 5), dtype=ExportDType.FP32, shard_nbytes=1
)
@example(  # an empty tensor in a legacy torch file
    model=Model([{"a": values((1,), 1), "b": values((0,), 2)}]),
    run=Run(3, 1, sub_group_numel=1, legacy=True),
    dtype=ExportDType.FP32,
    shard_nbytes=1,
)
def test_export_equals_naive_consolidation(
    model: Model, run: Run, dtype: ExportDType, shard_nbytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = save(model, run, Path(folder) / "ckpt")
        options = ExportOptions(dtype=dtype, max_shard_nbytes=shard_nbytes)
        zexport.consolidate(root, Path(folder) / "out", options)
        expected = consolidated(root / "global_step2")
        assert differences(expected, model.tensors) == []
        as_cast = cast(expected, TORCH_DTYPES[dtype], set(model.buffers))
        assert differences(_load(Path(folder) / "out"), as_cast) == []


@pytest.mark.parametrize("chunk_nbytes", [4, 28, 1 << 20])
@pytest.mark.parametrize("run", _ALL_RUNS, ids=str)
def test_chunk_size_does_not_change_the_export(run: Run, chunk_nbytes: int, tmp_path: Path) -> None:
    model = small_model()
    plan = zexport.plan_export(
        zexport.open_checkpoint(save(model, run, tmp_path / "ckpt")), tmp_path / "out"
    )
    zexport.run_export(replace(plan, chunk_nbytes=chunk_nbytes))
    expected = cast(model.tensors, torch.float32, set(model.buffers))
    assert differences(_load(tmp_path / "out"), expected) == []


@pytest.mark.parametrize("module_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("run", _ALL_RUNS, ids=str)
def test_dtype_auto_is_the_dtype_of_the_module(
    run: Run, module_dtype: torch.dtype, tmp_path: Path
) -> None:
    model = small_model(module_dtype)
    zexport.consolidate(
        save(model, run, tmp_path / "ckpt"),
        tmp_path / "out",
        ExportOptions(dtype=ExportDType.AUTO),
    )
    expected = cast(model.tensors, module_dtype, set(model.buffers))
    assert differences(_load(tmp_path / "out"), expected) == []


def test_exports_are_byte_identical(tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=3), tmp_path / "ckpt")
    for out, jobs in (("one", 1), ("two", 4)):
        options = ExportOptions(max_shard_nbytes=100, jobs=jobs)
        zexport.consolidate(root, tmp_path / out, options)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        for out in ("one", "two")
    )
    assert one == two


def test_export_does_not_change_the_checkpoint(zero3: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in zero3.rglob("*") if path.is_file()}
    zexport.consolidate(zero3, tmp_path / "out")
    assert {path: path.read_bytes() for path in zero3.rglob("*") if path.is_file()} == before
