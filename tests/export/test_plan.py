"""The plan of an export: dtypes, shards, index, provenance, memory; and the options it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import zexport
from tests.support.checkpoints import Model, Run, save, small_model, values
from tests.support.exports import export, invoke, refused
from tests.support.live_models import files_of
from tests.support.real_cases import facts

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


@pytest.mark.parametrize(
    ("dtype", "weight", "mean"),
    [("fp32", FP32, BF16), ("bf16", BF16, BF16), ("fp16", FP16, FP16), ("auto", BF16, BF16)],
)
def test_dtype_is_for_weights_and_a_16_bit_one_for_floating_buffers_too(
    dtype: str, weight: torch.dtype, mean: torch.dtype, zero2: Path
) -> None:
    out, model = zero2.parent / "out", small_model()
    export(zero2, out, "--dtype", dtype)
    expected = {
        name: value.to(mean if name == "mean" else weight) if value.is_floating_point() else value
        for name, value in model.tensors.items()
    }
    assert facts(files_of(out)) == facts(expected)


def test_shards_and_index_of_a_limited_size(tmp_path: Path) -> None:
    model = Model([{name: values((10,), i) for i, name in enumerate("dbca")}])
    root, out = save(model, Run(), tmp_path / "run"), tmp_path / "out"
    zexport.consolidate(root, out, max_shard_nbytes=80)
    text = (out / "model.safetensors.index.json").read_text()
    index = json.loads(text)
    assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
    assert index["metadata"] == {"total_parameters": 40, "total_size": 160}
    shards = sorted(out.glob("*.safetensors"))
    assert [one.name for one in shards] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    found = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            found |= dict.fromkeys(file.keys(), shard.name)
    assert index["weight_map"] == found
    assert facts(files_of(out)) == facts(model.trained)


def test_dry_run_shows_what_the_export_then_writes(zero3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = invoke("consolidate", zero3, out, "--dry-run")
    assert not out.exists()
    assert len(plan["sources"]) == 6
    assert plan["tied"] == {"head.weight": "emb.weight"}
    report = export(zero3, out)
    shards = {one["name"]: one["nbytes"] for one in plan["files"]}
    assert shards == {path.name: path.stat().st_size for path in out.glob("*.safetensors")}
    assert {*shards, *plan["side_files"], "zexport_manifest.json"} == set(report["files"])
    same = ("origin", "form", "tensors", "checkpoint", "options", "tied", "accounting", "warnings")
    assert {key: plan[key] for key in same} == {key: report[key] for key in same}
    assert str(tmp_path) not in (out / "zexport_manifest.json").read_text()


def test_memory_limit_is_kept_or_refused(zero2: Path, tmp_path: Path) -> None:
    for mebibytes in (97, 200):
        options = ("--max-memory", f"{mebibytes}MiB", "--jobs", 16, "--dry-run")
        plan = invoke("consolidate", zero2, tmp_path / "out", *options)
        assert plan["memory_nbytes"] <= mebibytes << 20
    options = ("--max-memory", "96MiB")
    refused(zero2, tmp_path / "out", *options, kind="memory_limit", word="--max-memory")
    next(zero2.glob("*/*rank_1*")).unlink()  # a damaged checkpoint is reported first
    refused(zero2, tmp_path / "out", *options, kind="incomplete", word="1")


# --- options of the Python API ---


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "b16"), ("layout", None), ("allow", "nan"), ("tag", 4), ("exclude_frozen", "no")],
)
def test_impossible_argument_is_refused_by_name(name: str, value: Any, zero2: Path) -> None:
    with pytest.raises(zexport.ZexportError, match=f"^{name} ") as caught:
        zexport.consolidate(zero2, zero2.parent / "out", **{name: value})
    assert (caught.value.kind, caught.value.exit_code) == ("usage", 2)
    assert not (zero2.parent / "out").exists()
