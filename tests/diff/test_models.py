"""``zexport diff`` of two models: values are compared with torch."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import cli
from zexport import (
    CheckpointError,
    DamagedCheckpointError,
    DiffReport,
    ExportOptions,
    Outcome,
    TensorDiff,
    consolidate,
    diff_models,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
PLAIN = FIXTURES / "z3_w2_bf16" / "ckpt"
FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, 3e38, 65520.0, 464.0, 500.0, 1e-7]

Tensors = Mapping[str, torch.Tensor]


def write(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, folder / "model.safetensors")
    return folder


def compare(tmp_path: Path, a: Tensors, b: Tensors) -> dict[str, TensorDiff]:
    report = diff_models(write(tmp_path / "a", a), write(tmp_path / "b", b))
    return {tensor.name: tensor for tensor in report.tensors}


def compare_one(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> TensorDiff:
    return compare(tmp_path, {"x": a}, {"x": b})["x"]


def random(dtype: torch.dtype, numel: int, seed: int, special: list[float]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in INTEGERS:
        limit = 2 if dtype is torch.bool else 100
        return torch.randint(0, limit, (numel,), generator=generator).to(dtype)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values[: len(special)] = torch.tensor(special, dtype=torch.float64)
    return values.to(dtype)


def assert_values(tensor: TensorDiff, a: torch.Tensor, b: torch.Tensor) -> None:
    x, y = a.double().flatten(), b.double().flatten()
    finite = x.isfinite() & y.isfinite()
    nan = x.isnan() | y.isnan()
    difference, norm = (x - y)[finite].abs(), float(x[finite].norm())
    seen = tensor.values
    assert seen is not None
    assert seen.max_abs == float(difference.max())
    assert seen.norm == pytest.approx(norm, rel=1e-9)
    assert seen.relative_norm == pytest.approx(float(difference.norm()) / norm, rel=1e-9)
    assert (seen.a_nan, seen.b_nan) == (int(x.isnan().sum()), int(y.isnan().sum()))
    assert seen.nan_in_one == int((x.isnan() ^ y.isnan()).sum())
    assert seen.inf_in_one == int((~finite & ~nan & (x != y)).sum())
    if a.dtype is not b.dtype:
        assert seen.unequal == int(((x != y) & ~(x.isnan() & y.isnan())).sum())


# --- values ---


def test_values_of_all_dtype_pairs_match_torch(tmp_path: Path) -> None:
    a = {str(dtype): random(dtype, 9000, 1, SPECIAL) for dtype in (*FLOATS, *INTEGERS)}
    b = {str(dtype): random(dtype, 9000, 2, []) for dtype in (*FLOATS, *INTEGERS)}
    pairs = {f"{one} {two}": (a[one], b[two]) for one in a for two in b}
    found = compare(
        tmp_path,
        {name: one for name, (one, _) in pairs.items()},
        {name: two for name, (_, two) in pairs.items()},
    )
    for name, pair in pairs.items():
        assert found[name].outcome is Outcome.DIFFERENT, name
        assert_values(found[name], *pair)


def test_tensor_rounded_by_torch_is_cast_equal(tmp_path: Path) -> None:
    a, b, changed = {}, {}, {}
    for one in FLOATS:
        for two in FLOATS:
            name = f"{one} {two}"
            a[name] = random(one, 5000, 3, [0.0, -0.0, math.nan, 1e-40, 464.0, 1e-7])
            b[name] = a[name].to(two)
            changed[name] = b[name].clone()
            changed[name][-1] = 8.0
    there, back = compare(tmp_path / "there", a, b), compare(tmp_path / "back", b, a)
    for name, tensor in a.items():
        expected = Outcome.EQUAL if tensor.dtype is b[name].dtype else Outcome.CAST_EQUAL
        assert (there[name].outcome, back[name].outcome) == (expected, expected), name
    found = compare(tmp_path / "changed", a, changed)
    assert {one.outcome for one in found.values()} == {Outcome.DIFFERENT}


def test_rounding_names_side_and_dtype(tmp_path: Path) -> None:
    a = random(torch.float32, 1000, 4, [])
    for through in (torch.bfloat16, torch.float16):
        for b in (a.to(through), a.to(through).float()):
            rounding = compare_one(tmp_path, a, b).rounding
            assert rounding is not None
            assert (rounding.side, f"torch.{rounding.dtype.torch_name}") == ("a", str(through))


def test_partial_rounding_overflow_and_underflow_to_zero_are_different(tmp_path: Path) -> None:
    partly = random(torch.float32, 200_000, 5, [])
    rounded = partly.clone()
    rounded[100_000:] = rounded[100_000:].bfloat16().float()
    assert compare_one(tmp_path, partly, rounded).outcome is Outcome.DIFFERENT
    for a in (torch.full((3,), 1e5), torch.full((3,), 1e-9)):
        assert compare_one(tmp_path, a, a.half()).outcome is Outcome.DIFFERENT
        assert compare_one(tmp_path, a, a.half().float()).outcome is Outcome.DIFFERENT


def test_integers_are_compared_exactly(tmp_path: Path) -> None:
    a = {str(dtype): random(dtype, 100, 6, []) for dtype in INTEGERS}
    found = compare(tmp_path, a, {name: one.to(torch.int64) for name, one in a.items()})
    assert found.pop("torch.int64").outcome is Outcome.EQUAL
    assert {one.outcome for one in found.values()} == {Outcome.CAST_EQUAL}
    large = torch.tensor([2**60])  # 2**60 + 1 is the same float64
    assert compare_one(tmp_path, large, large + 1).outcome is Outcome.DIFFERENT


def test_large_tensor_is_compared_whole_and_largest_difference_is_located(tmp_path: Path) -> None:
    a = random(torch.bfloat16, 5 * 1000 * 1001, 8, SPECIAL).reshape(5, 1000, 1001)
    b = a.clone()
    b[2:] += 0.5
    b[4, 999, 7] = 1000
    tensor = compare_one(tmp_path, a, b)
    assert_values(tensor, a, b)
    assert tensor.values is not None
    assert tensor.values.worst_at == (4, 999, 7)
    bits = (a.view(torch.int16) != b.view(torch.int16)).sum()
    assert tensor.values.unequal == int(bits)


# --- folders ---


def test_missing_tensors_and_other_shapes_are_listed_first(tmp_path: Path) -> None:
    both = {"same": torch.ones(2), "wide": torch.ones(3)}
    found = compare(
        tmp_path,
        both | {"mine": torch.ones(1)},
        both | {"wide": torch.ones(4), "yours": torch.ones(1)},
    )
    assert [(tensor.outcome, name) for name, tensor in found.items()] == [
        (Outcome.ONLY_IN_A, "mine"),
        (Outcome.ONLY_IN_B, "yours"),
        (Outcome.SHAPE, "wide"),
        (Outcome.EQUAL, "same"),
    ]


def test_sharded_export_equals_live_weights_of_the_engine(tmp_path: Path) -> None:
    for case in ("z1_w2_bf16", "z3_w3_bf16_tied"):
        consolidate(FIXTURES / case / "ckpt", tmp_path / case, ExportOptions(max_shard_nbytes=4000))
        assert len(list((tmp_path / case).glob("*.safetensors"))) > 2
        assert diff_models(tmp_path / case, FIXTURES / case / "truth.safetensors").is_equal


def test_tied_weights_are_compared_under_either_name(tmp_path: Path) -> None:
    tied = tmp_path / "tied"
    consolidate(FIXTURES / "z3_w3_bf16_tied" / "ckpt", tied)
    ((alias, source),) = json.loads((tied / "zexport_manifest.json").read_bytes())["tied"].items()
    tensors = load_file(tied / "model.safetensors")
    untied = write(tmp_path / "untied", tensors | {alias: tensors[source]})
    for report in (diff_models(tied, untied), diff_models(untied, tied)):
        assert report.is_equal
        renamed = {t.a_name for t in report.tensors if t.a_name != t.b_name}
        assert renamed in ({source}, {alias})
    other = write(tmp_path / "other", tensors | {alias: tensors[source] + 1})
    assert diff_models(tied, other).count(Outcome.DIFFERENT) == 1


def indexed(folder: Path, weight_map: Mapping[str, str]) -> Path:
    folder.mkdir()
    save_file({"x": torch.ones(1)}, folder / "weights.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_wrong_index_is_refused(tmp_path: Path) -> None:
    for name, file in (("y", "weights.safetensors"), ("x", "gone.safetensors")):
        folder = indexed(tmp_path / name, {name: file})
        with pytest.raises(CheckpointError):
            diff_models(folder, folder)


def test_checkpoint_or_missing_folder_is_refused(tmp_path: Path) -> None:
    for path in (PLAIN, tmp_path / "gone"):
        with pytest.raises(CheckpointError, match=r"verify (MODEL )?--against"):
            diff_models(path, path)


def test_file_that_changes_while_read_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"x": torch.ones(4), "y": torch.ones(4)})
    with pytest.raises(DamagedCheckpointError, match="changed"):
        diff_models(folder, folder, progress=lambda _: write(folder, {"x": torch.ones(4)}))


# --- command ---


BASE = {"layers.0.weight": torch.eye(16), "layers.1.weight": torch.rand(16), "norm": torch.ones(3)}


def run(*words: str | Path) -> tuple[int, str]:
    done = cli.run("diff", *words).or_raise()
    return done.exit_code, done.stdout


def test_fail_on_decides_the_exit_code(tmp_path: Path) -> None:
    b = write(tmp_path / "b", BASE)
    for changed, expected in (
        (BASE, [0, 0, 0]),
        ({name: tensor.bfloat16() for name, tensor in BASE.items()}, [0, 7, 0]),
        ({name: tensor + 0.1 for name, tensor in BASE.items()}, [0, 7, 7]),
        ({name: BASE[name] for name in [*BASE][1:]}, [0, 7, 7]),
    ):
        a = write(tmp_path / "a", changed)
        words = ("none", "different", "not-cast-equal")
        assert [run(a, b, "--fail-on", word)[0] for word in words] == expected


def test_text_names_wiped_tensors_and_modules(tmp_path: Path) -> None:
    b = write(tmp_path / "b", BASE)
    for value, label in ((0.0, "all zero in A"), (math.nan, "NaN or Inf on one side only")):
        a = write(tmp_path / "a", BASE | {"layers.0.weight": torch.full((16, 16), value)})
        text = run(a, b)[1]
        assert [line.split()[0] for line in text.splitlines() if label in line[10:]] == [
            "layers.0.weight"
        ]
        assert "1 of 3 tensors differ" in text
    a = write(tmp_path / "a", {name: tensor + 1 for name, tensor in BASE.items()})
    assert re.search(r"^ +layers\.0 +1 of 1 ", run(a, b)[1], re.MULTILINE)


def test_rank_files_are_compared_instead_of_placeholders(tmp_path: Path) -> None:
    sides = [shutil.copytree(PLAIN, tmp_path / name) for name in "ab"]
    for tensor, is_model in ((torch.zeros(0), False), (torch.ones(2), True)):
        for side in sides:
            write(side, {"x": tensor})
        compared = json.loads(run(*sides, "--json", "--all")[1])["tensors"]
        assert (len(compared) == 1) == is_model


# --- settings ---


def folder_with(folder: Path, name: str, config: Mapping[str, Any]) -> Path:
    write(folder, {"layer.weight": torch.ones(3, 2)})
    (folder / name).write_text(json.dumps(config))
    return folder


def settings(report: DiffReport) -> list[tuple[str, str, str]]:
    assert report.is_equal == (not report.settings)
    return [(one.about, one.a, one.b) for one in report.settings]


def test_config_keys_that_differ_are_listed(tmp_path: Path) -> None:
    common = {"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "vocab_size": 3}
    a = {**common, "use_cache": True, "text_config": {"vocab_size": 3}, "id2label": {"0": "cat"}}
    b = {**a, "text_config": {"vocab_size": 5}, "id2label": {"0": "dog"}, "rms_norm_eps": 1e-5}
    b["rope_parameters"] = {"rope_theta": 7.0}  # as transformers 5 writes it
    del b["rope_theta"]
    one, two = (folder_with(tmp_path / n, "config.json", c) for n, c in (("a", a), ("b", b)))
    same = folder_with(tmp_path / "same", "config.json", {**common, "use_cache": False})
    assert settings(diff_models(one, same)) == []
    assert settings(diff_models(one, two)) == [
        ("config.json: id2label.0", "cat", "dog"),
        ("config.json: rms_norm_eps", "1e-06", "1e-05"),
        ("config.json: rope_theta", "10000.0", "7.0"),
        ("config.json: text_config.vocab_size", "3", "5"),
    ]
    assert run(one, two, "--fail-on", "not-cast-equal")[0] == 7


def test_adapter_keys_that_differ_are_listed(tmp_path: Path) -> None:
    base = "base_model_name_or_path"
    a, moved, b = (
        folder_with(
            tmp_path / name,
            "adapter_config.json",
            {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, base: f"{name}/{model}"},
        )
        for name, alpha, model in (("a", 6, "base"), ("moved", 6, "base"), ("b", 600, "other"))
    )
    assert settings(diff_models(a, moved)) == []
    assert settings(diff_models(a, b)) == [
        ("adapter_config.json: lora_alpha", "6", "600"),
        (f"adapter_config.json: {base}", "base", "other"),
    ]
