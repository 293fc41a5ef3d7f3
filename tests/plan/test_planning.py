"""The plan: element types, shards, index, provenance and memory, before a byte is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import Model, Run, save, small_model, values
from zexport import plan_export
from zexport.checkpoint.open import open_checkpoint
from zexport.errors import IncompleteCheckpointError, MemoryLimitError, UnsafeError
from zexport.options import ExportDType, ExportOptions
from zexport.plan.plan import ExportPlan, TensorPlan
from zexport.plan.summary import memory_nbytes
from zexport.ranges.dtypes import DType


def _plan(root: Path, options: ExportOptions | None = None) -> ExportPlan:
    return plan_export(open_checkpoint(root), root.parent / "out", options)


def _tensors(plan: ExportPlan) -> dict[str, TensorPlan]:
    return {tensor.name: tensor for shard in plan.shards for tensor in shard.tensors}


def _side_file(plan: ExportPlan, name: str) -> bytes:
    (content,) = [file.content for file in plan.side_files if file.filename == name]
    assert content is not None
    return content


@pytest.mark.parametrize(
    ("dtype", "weight", "floating_buffer"),
    [
        (ExportDType.FP32, DType.F32, {"table": DType.F32, "mean": DType.BF16}),
        (ExportDType.BF16, DType.BF16, {"table": DType.BF16, "mean": DType.BF16}),
        (ExportDType.FP16, DType.F16, {"table": DType.F16, "mean": DType.F16}),
        (ExportDType.AUTO, DType.BF16, {"table": DType.BF16, "mean": DType.BF16}),
    ],
)
def test_the_type_is_for_weights_and_a_16_bit_one_for_floating_buffers_too(
    dtype: ExportDType, weight: DType, floating_buffer: dict[str, DType], zero2: Path
) -> None:
    planned = {n: t.dtype for n, t in _tensors(_plan(zero2, ExportOptions(dtype=dtype))).items()}
    assert planned["emb.weight"] is planned["norm.weight"] is weight
    assert {name: planned[name] for name in floating_buffer} == floating_buffer
    assert (planned["mask"], planned["big"]) == (DType.BOOL, DType.I64)


def test_shards_hold_what_fits_and_the_index_says_where(tmp_path: Path) -> None:
    model = Model([{name: values((10,), i) for i, name in enumerate("dbca")}])
    plan = _plan(save(model, Run(), tmp_path / "ckpt"), ExportOptions(max_shard_nbytes=80))
    assert [shard.data_nbytes for shard in plan.shards] == [80, 80]
    assert [shard.filename for shard in plan.shards] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    index = _side_file(plan, "model.safetensors.index.json").decode()
    content = json.loads(index)
    assert content["metadata"] == {"total_parameters": 40, "total_size": 160}
    assert content["weight_map"] == {
        tensor.name: shard.filename for shard in plan.shards for tensor in shard.tensors
    }
    assert list(content["weight_map"]) == ["a", "b", "c", "d"]
    assert index == json.dumps(content, indent=2, sort_keys=True) + "\n"


def test_buffers_are_bytes_of_the_index_but_no_parameters(zero2: Path) -> None:
    plan = _plan(zero2, ExportOptions(max_shard_nbytes=100))
    metadata = json.loads(_side_file(plan, "model.safetensors.index.json"))["metadata"]
    model = small_model()
    parameters = sum(t.numel() for t in (*model.masters.values(), *model.frozen.values()))
    assert metadata["total_parameters"] == parameters
    buffers = sum(t.nbytes for t in model.buffers.values())
    assert metadata["total_size"] == 4 * parameters + buffers


def test_tensors_lie_widest_first_and_then_by_name(zero2: Path) -> None:
    (shard,) = _plan(zero2).shards
    order = [(-tensor.dtype.itemsize, tensor.name) for tensor in shard.tensors]
    assert order == sorted(order)
    assert [name for _, name in order][:2] == ["big", "emb.weight"]
    assert all(tensor.offset % tensor.dtype.itemsize == 0 for tensor in shard.tensors)


def test_one_shard_has_no_index(zero2: Path) -> None:
    plan = _plan(zero2)
    assert [shard.filename for shard in plan.shards] == ["model.safetensors"]
    assert [file.filename for file in plan.side_files] == ["README.md"]


def test_a_problem_of_the_checkpoint_is_raised_before_anything_else(zero2: Path) -> None:
    next(zero2.glob("*/*rank_1*")).unlink()
    with pytest.raises(IncompleteCheckpointError):
        _plan(zero2, ExportOptions(max_memory_nbytes=1))


def test_what_is_missing_beside_the_weights_is_a_warning(zero2: Path) -> None:
    plan = _plan(zero2)
    assert "config.json, a tokenizer" in plan.warnings[0]
    assert plan.provenance["loadable"] is False


def test_the_manifest_says_where_it_came_from_and_nothing_that_varies(
    zero2: Path, tmp_path: Path
) -> None:
    provenance = _plan(zero2).provenance
    assert provenance["checkpoint"] == {
        "folder": "zero2/global_step2",
        "tag": "global_step2",
        "layout": "ZeRO-2",
        "stage": 2,
        "world_size": 2,
        "ranks": 2,
        "global_steps": 2,
        "deepspeed_version": "0.19.8",
        "module_dtype": "bfloat16",
        "master_dtype": "float32",
        "warnings": [],
        "notes": [],
    }
    assert provenance["tied"] == {"head.weight": "emb.weight"}
    assert str(tmp_path) not in json.dumps(provenance)


def test_memory_is_shared_out_or_refused(zero2: Path) -> None:
    for mebibytes in (97, 100, 128, 200):
        options = ExportOptions(max_memory_nbytes=mebibytes << 20, jobs=16)
        plan = _plan(zero2, options)
        assert memory_nbytes(plan) <= mebibytes << 20
        assert plan.chunk_nbytes % 4096 == 0
    with pytest.raises(MemoryLimitError, match="--max-memory") as caught:
        _plan(zero2, ExportOptions(max_memory_nbytes=96 << 20))
    assert caught.value.exit_code == 2


def test_only_files_that_are_read_are_sources(zero3: Path) -> None:
    excluded = save(small_model(), Run(exclude_frozen=True), zero3.parent / "excluded")
    sources = [
        sorted(source.path.name for source in _plan(root, options).sources)
        for root, options in (
            (zero3, ExportOptions()),
            (excluded, ExportOptions(exclude_frozen=True)),
        )
    ]
    assert [len(names) for names in sources] == [6, 3]
    assert sources[1][-1] == "zero_pp_rank_0_mp_rank_00_model_states.pt"  # for its buffers


def test_a_base_gives_the_weights_that_were_left_out(tmp_path: Path) -> None:
    model = small_model()
    root = save(model, Run(exclude_frozen=True), tmp_path / "ckpt")
    (base := tmp_path / "base").mkdir()
    tensors = {name: value.clone() for name, value in model.tensors.items()}
    save_file({**tensors, "norm.bias": torch.ones(7)}, base / "model.safetensors")
    plan = _plan(root, ExportOptions(base=base))
    assert plan.provenance["from_base"] == ["norm.bias", "norm.weight"]
    assert base / "model.safetensors" in [source.path for source in plan.sources]
    assert _tensors(plan)["norm.weight"].stored_dtype is DType.BF16


def test_a_base_whose_index_names_a_file_outside_is_refused(tmp_path: Path) -> None:
    root = save(small_model(), Run(exclude_frozen=True), tmp_path / "ckpt")
    (base := tmp_path / "base").mkdir()
    save_file({"norm.bias": torch.ones(7)}, tmp_path / "outside.safetensors")
    index = {"weight_map": {"norm.bias": "../outside.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsafeError) as caught:
        _plan(root, ExportOptions(base=base))
    assert caught.value.path == base / "model.safetensors.index.json"
