"""Two models side by side: every figure against torch, every outcome against how it was made."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from zexport import (
    Cause,
    CheckpointError,
    DamagedCheckpointError,
    DiffReport,
    ExportOptions,
    UnsafeError,
    ZexportError,
    consolidate,
    diff_models,
)
from zexport.cli.main import cli
from zexport.diff.roundings import Side
from zexport.diff.tensor import Outcome, PairValues, TensorDiff
from zexport.formats.safetensors import HeaderEntry, build_header
from zexport.ranges.dtypes import DType

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
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
DTYPES = [*FLOATS, *WHOLE, torch.complex64]
ODD = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, 3e38, 65520.0, 464.0, 500.0, 1e-7]

Tensors = Mapping[str, torch.Tensor]


def written(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def compared(tmp_path: Path, a: Tensors, b: Tensors) -> DiffReport:
    return diff_models(written(tmp_path / "a", a), written(tmp_path / "b", b))


def only(report: DiffReport) -> TensorDiff:
    (tensor,) = report.tensors
    return tensor


def told(tensor: TensorDiff) -> PairValues:
    assert tensor.values is not None
    return tensor.values


def random(dtype: torch.dtype, numel: int, seed: int, *, odd: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in WHOLE:
        return torch.randint(
            0, 2 if dtype is torch.bool else 100, (numel,), generator=generator
        ).to(dtype)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    if odd and dtype is not torch.complex64:
        values[: len(ODD)] = torch.tensor(ODD, dtype=torch.float64)
    return values.to(torch.float32).to(dtype)


def naive(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    """The figures, all in memory."""
    if a.is_complex() or b.is_complex():
        a, b = (torch.view_as_real(t.to(torch.complex128)).flatten() for t in (a, b))
    x, y = a.double(), b.double()
    both = x.isfinite() & y.isfinite()
    nan = x.isnan() | y.isnan()
    d = (x - y)[both].abs()
    xf, yf = x[both], y[both]
    norms = float(xf.norm() * yf.norm())
    return {
        "max": float(d.max()) if d.numel() else None,
        "mean": float(d.mean()) if d.numel() else None,
        "relative": 0.0
        if not d.any()
        else (float(d.norm() / xf.norm()) if float(xf.norm()) else None),
        "cosine": float(xf @ yf) / norms if norms else None,
        "nan": (int(x.isnan().sum()), int(y.isnan().sum()), int((x.isnan() ^ y.isnan()).sum())),
        "inf": int((~both & ~nan & (x != y)).sum()),
    }


def check_figures(tensor: TensorDiff, a: torch.Tensor, b: torch.Tensor) -> None:
    seen, wanted = told(tensor), naive(a, b)
    close = {"rel": 1e-9, "abs": 1e-300}
    assert seen.max_abs == wanted["max"]
    assert seen.mean_abs == pytest.approx(wanted["mean"], **close)
    assert seen.relative_norm == pytest.approx(wanted["relative"], **close)
    assert seen.cosine == pytest.approx(wanted["cosine"], abs=1e-12)
    assert (seen.a_nan, seen.b_nan, seen.nan_in_one) == wanted["nan"]
    assert seen.inf_in_one == wanted["inf"]


# --- figures, against torch ---


@pytest.mark.parametrize("b_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("a_dtype", DTYPES, ids=str)
def test_the_figures_of_any_two_element_types_are_those_of_torch(
    a_dtype: torch.dtype, b_dtype: torch.dtype, tmp_path: Path
) -> None:
    a, b = random(a_dtype, 1000, 1, odd=True), random(b_dtype, 1000, 2, odd=False)
    tensor = only(compared(tmp_path, {"x": a}, {"x": b}))
    assert tensor.outcome is Outcome.DIFFERENT
    check_figures(tensor, a, b)


@pytest.mark.parametrize("b_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("a_dtype", FLOATS, ids=str)
def test_what_torch_rounded_is_cast_equal_in_either_order(
    a_dtype: torch.dtype, b_dtype: torch.dtype, tmp_path: Path
) -> None:
    a = random(a_dtype, 5000, 3, odd=True)
    b = a.to(b_dtype)
    expected = Outcome.EQUAL if a_dtype is b_dtype else Outcome.CAST_EQUAL
    there = only(compared(tmp_path / "there", {"x": a}, {"x": b}))
    back = only(compared(tmp_path / "back", {"x": b}, {"x": a}))
    assert (there.outcome, back.outcome) == (expected, expected)
    check_figures(there, a, b)
    spoilt = b.clone()
    spoilt[-1] = 8.0
    assert only(compared(tmp_path / "no", {"x": a}, {"x": spoilt})).outcome is Outcome.DIFFERENT


@pytest.mark.parametrize("through", [torch.bfloat16, torch.float16], ids=str)
def test_values_that_went_through_a_narrow_type_are_cast_equal(
    through: torch.dtype, tmp_path: Path
) -> None:
    a = random(torch.float32, 1000, 4, odd=False)
    report = compared(tmp_path, {"x": a}, {"x": a.to(through).float()})
    tensor = only(report)
    assert tensor.outcome is Outcome.CAST_EQUAL
    assert tensor.rounding is not None
    assert tensor.rounding.side is Side.A
    assert tensor.rounding.dtype.torch_name == str(through).removeprefix("torch.")
    assert report.verdict.cause is Cause.ROUNDING


def test_a_tensor_of_which_only_a_part_was_rounded_is_different(tmp_path: Path) -> None:
    a = random(torch.float32, 200_000, 5, odd=False)
    b = a.clone()
    b[100_000:] = b[100_000:].bfloat16().float()
    assert only(compared(tmp_path, {"x": a}, {"x": b})).outcome is Outcome.DIFFERENT


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_the_same_whole_numbers_in_another_type_are_cast_equal(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    a = random(dtype, 100, 6, odd=False)
    other = torch.int16 if dtype is torch.int64 else torch.int64
    tensor = only(compared(tmp_path, {"x": a}, {"x": a.to(other)}))
    assert tensor.outcome is Outcome.CAST_EQUAL


def test_whole_numbers_that_a_double_cannot_tell_apart_are_different(tmp_path: Path) -> None:
    a = torch.tensor([2**60])
    assert only(compared(tmp_path, {"x": a}, {"x": a + 1})).outcome is Outcome.DIFFERENT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_equal_tensors_are_equal_of_every_type_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    a = random(dtype, math.prod(shape), 7, odd=False).reshape(shape)
    tensor = only(compared(tmp_path, {"x": a}, {"x": a}))
    assert tensor.outcome is Outcome.EQUAL
    assert (tensor.a_shape, told(tensor).worst_at) == (shape, None)


def test_a_tensor_of_many_pieces_adds_up_and_names_the_place_of_the_largest_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zexport.diff import streaming
    from zexport.diff import values as arithmetic

    a = random(torch.float32, 7 * 11 * 13, 8, odd=True).reshape(7, 11, 13)
    b = a.clone()
    b[2:] += 0.5
    b[5, 3, 7] = 1000
    whole = only(compared(tmp_path / "whole", {"x": a}, {"x": b}))
    monkeypatch.setattr(streaming, "_PIECE_NUMEL", 64)
    monkeypatch.setattr(streaming, "_CHUNK_NUMEL", 7)
    monkeypatch.setattr(arithmetic, "_BLOCK_NUMEL", 3)
    parts = only(compared(tmp_path / "parts", {"x": a}, {"x": b}))
    assert told(whole).worst_at == told(parts).worst_at == (5, 3, 7)
    check_figures(parts, a.flatten(), b.flatten())
    assert told(parts).unequal == told(whole).unequal


def test_zeros_of_the_other_sign_are_told_though_they_differ_by_nothing(tmp_path: Path) -> None:
    tensor = only(compared(tmp_path, {"x": torch.zeros(3)}, {"x": -torch.zeros(3)}))
    assert (tensor.outcome, told(tensor).unequal) == (Outcome.DIFFERENT, 3)
    assert (told(tensor).max_abs, told(tensor).worst_at) == (0.0, None)


# --- folders ---


def test_names_on_one_side_and_other_shapes_are_listed_first(tmp_path: Path) -> None:
    both = {"same": torch.ones(2), "wide": torch.ones(3)}
    report = compared(
        tmp_path,
        both | {"mine": torch.ones(1)},
        both | {"wide": torch.ones(4), "yours": torch.ones(1)},
    )
    assert [(t.outcome, t.name) for t in report.tensors] == [
        (Outcome.ONLY_IN_A, "mine"),
        (Outcome.ONLY_IN_B, "yours"),
        (Outcome.SHAPE, "wide"),
        (Outcome.EQUAL, "same"),
    ]
    assert report.verdict.cause is Cause.TENSORS


def test_shards_of_one_side_are_compared_with_the_single_file_of_the_other(tmp_path: Path) -> None:
    consolidate(PLAIN, tmp_path / "one")
    consolidate(PLAIN, tmp_path / "many", ExportOptions(max_shard_nbytes=4000))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    report = diff_models(tmp_path / "one", tmp_path / "many")
    assert {tensor.outcome for tensor in report.tensors} == {Outcome.EQUAL}
    assert report.verdict.cause is Cause.NONE


@pytest.mark.parametrize("case", ["z1_w2_bf16", "z2_w2_fp16", "z3_w4_bf16_odd", "z3_w3_bf16_tied"])
def test_an_export_and_the_live_weights_of_the_engine_are_the_same(
    case: str, tmp_path: Path
) -> None:
    consolidate(FIXTURES / case / "ckpt", tmp_path / "out")
    report = diff_models(tmp_path / "out", FIXTURES / case / "truth.safetensors")
    assert {tensor.outcome for tensor in report.tensors} == {Outcome.EQUAL}


def test_a_tie_that_a_manifest_records_is_compared_with_its_source(tmp_path: Path) -> None:
    tied = FIXTURES / "z3_w3_bf16_tied" / "ckpt"
    consolidate(tied, tmp_path / "tied")
    manifest = json.loads((tmp_path / "tied" / "zexport_manifest.json").read_bytes())
    ((alias, source),) = manifest["tied"].items()
    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    untied = written(tmp_path / "untied", tensors | {alias: tensors[source]})
    for report in (diff_models(tmp_path / "tied", untied), diff_models(untied, tmp_path / "tied")):
        assert {tensor.outcome for tensor in report.tensors} == {Outcome.EQUAL}
        names = {(t.a_name, t.b_name) for t in report.tensors if t.a_name != t.b_name}
        assert names in ({(source, alias)}, {(alias, source)})
    other = written(tmp_path / "other", tensors | {alias: tensors[source] + 1})
    assert diff_models(tmp_path / "tied", other).count(Outcome.DIFFERENT) == 1


@pytest.mark.slow
def test_a_tie_that_only_the_config_knows_is_compared_with_its_source(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 12,
    }
    weights = {"model.embed_tokens.weight": torch.ones(12, 8)}
    full = weights | {"lm_head.weight": torch.ones(12, 8)}
    a, b = written(tmp_path / "a", full), written(tmp_path / "b", weights)
    for ties, left in ((True, 0), (False, 1)):
        (b / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": ties}))
        assert diff_models(a, b).count(Outcome.ONLY_IN_A) == left


def broken(folder: Path, index: object) -> Path:
    folder.mkdir()
    save_file({"x": torch.ones(1)}, folder / "weights.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("index", "kind"),
    [
        ({"weight_map": {}}, DamagedCheckpointError),
        ([], DamagedCheckpointError),
        ({"weight_map": {"y": "weights.safetensors"}}, DamagedCheckpointError),
        ({"weight_map": {"x": "../weights.safetensors"}}, UnsafeError),
        ({"weight_map": {"x": 1}}, UnsafeError),
        ({"weight_map": {"x": "gone.safetensors"}}, CheckpointError),
    ],
    ids=["empty", "list", "lacks", "outside", "number", "gone"],
)
def test_a_wrong_index_is_refused(index: object, kind: type[ZexportError], tmp_path: Path) -> None:
    with pytest.raises(kind):
        diff_models(broken(tmp_path / "a", index), tmp_path / "a")


def test_of_a_file_and_an_index_what_transformers_would_load_is_compared(tmp_path: Path) -> None:
    folder = broken(tmp_path / "a", {"weight_map": {"x": "weights.safetensors"}})
    assert diff_models(folder, folder / "weights.safetensors").count(Outcome.EQUAL) == 1
    written(folder, {"x": torch.zeros(1)})
    assert diff_models(folder, folder / "model.safetensors").count(Outcome.EQUAL) == 1
    (folder / "config.json").write_text('{"transformers_weights": "weights.safetensors"}')
    assert diff_models(folder, folder / "weights.safetensors").count(Outcome.EQUAL) == 1
    (folder / "config.json").write_text('{"transformers_weights": "../model.safetensors"}')
    with pytest.raises(UnsafeError, match="transformers_weights"):
        diff_models(folder, folder)


def test_placeholders_beside_rank_files_are_not_compared(tmp_path: Path) -> None:
    sides = [shutil.copytree(PLAIN, tmp_path / name) for name in "ab"]
    for tensor, is_model in ((torch.zeros(0), False), (torch.ones(2), True)):
        for side in sides:
            written(side, {"x": tensor})
        compared = json.loads(run(*sides, "--json", "--all")[1])["tensors"]
        assert (len(compared) == 1) == is_model


@pytest.mark.parametrize("path", [PLAIN, PLAIN / "gone"], ids=["checkpoint", "nothing"])
def test_what_is_no_model_folder_is_refused_with_the_way_to_compare_a_checkpoint(
    path: Path,
) -> None:
    with pytest.raises(CheckpointError, match=r"verify (MODEL )?--against"):
        diff_models(path, path)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", {"x": torch.ones(4), "y": torch.ones(4)})
    with pytest.raises(DamagedCheckpointError, match="changed"):
        diff_models(folder, folder, progress=lambda _: written(folder, {"x": torch.ones(4)}))


# --- the answer ---


def moved(base: Tensors, by: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: tensor + by * torch.randn_like(tensor) for name, tensor in base.items()}


@pytest.fixture
def base() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    matrices = {f"layer.{index}.weight": torch.randn(16, 16) for index in range(6)}
    return matrices | {"norm.weight": torch.ones(16), "bias": torch.zeros(16)}


def test_the_answer_counts_what_changed_and_says_by_how_much(base: Tensors, tmp_path: Path) -> None:
    changed = {n: t for n, t in moved(base, 0.1).items() if n != "layer.0.weight"}
    report = compared(tmp_path, {**base, **changed}, base)
    assert report.verdict.cause is Cause.VALUES
    assert report.verdict.sentence.startswith("7 of 8 tensors changed by 9 % to")


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "all zero in {}"), (math.nan, "NaN or Inf"), (math.inf, "NaN or Inf")],
)
def test_a_tensor_that_was_wiped_out_is_named(
    value: float, words: str, base: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    wiped = base | {"layer.3.weight": torch.full((16, 16), value)}
    for side, pair in (("A", (wiped, base)), ("B", (base, wiped))):
        verdict = compared(tmp_path / side, *pair).verdict
        assert verdict.cause is Cause.VALUES
        assert words.format(side) in verdict.sentence
        assert verdict.sentence.endswith("(layer.3.weight)")


def test_an_adapter_and_a_model_are_not_two_models(base: Tensors, tmp_path: Path) -> None:
    kept, out = FIXTURES / "z2_w2_bf16_lora" / "ckpt", tmp_path / "adapter"
    consolidate(kept, out)
    model = written(tmp_path / "model", base)
    verdicts = [diff_models(*sides).verdict for sides in ((out, model), (model, out))]
    assert [verdict.cause for verdict in verdicts] == [Cause.TENSORS] * 2
    assert verdicts[0].sentence.startswith("A is an adapter and B is a model")
    assert verdicts[1].sentence.startswith("A is a model and B is an adapter")
    assert all("--adapter merge" in verdict.sentence for verdict in verdicts)
    assert diff_models(out, out).verdict.cause is Cause.NONE


# --- the command ---


def run(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["diff", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ("equal", {"none": 0, "different": 0, "not-cast-equal": 0}),
        ("rounded", {"none": 0, "different": 7, "not-cast-equal": 0}),
        ("trained", {"none": 0, "different": 7, "not-cast-equal": 7}),
        ("missing", {"none": 0, "different": 7, "not-cast-equal": 7}),
        ("too large", {"none": 0, "different": 7, "not-cast-equal": 7}),
    ],
)
def test_the_exit_code_is_0_unless_it_is_asked_to_tell(
    change: str, codes: dict[str, int], base: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    changed = {
        "equal": base,
        "rounded": {name: tensor.bfloat16() for name, tensor in base.items()},
        "trained": moved(base, 0.1),
        "missing": {name: tensor for name, tensor in base.items() if name != "bias"},
        "too large": {name: (tensor * 1e5).half() for name, tensor in base.items()},
    }[change]
    base = {n: t * 1e5 for n, t in base.items()} if change == "too large" else base
    a, b = written(tmp_path / "a", changed), written(tmp_path / "b", base)
    assert {word: run(a, b, "--fail-on", word)[0] for word in codes} == codes


def test_json_lists_what_differs_and_every_tensor_with_all(base: Tensors, tmp_path: Path) -> None:
    a = written(tmp_path / "a", dict(base) | {"bias": torch.full((16,), math.nan)})
    b = written(tmp_path / "b", base)
    told = json.loads(run(a, b, "--json")[1])
    assert [tensor["a_name"] for tensor in told["tensors"]] == ["bias"]
    assert told["tensors"][0]["values"]["nan_in_one"] == 16
    assert told["counts"]["equal"] == len(base) - 1
    assert len(json.loads(run(a, b, "--json", "--all")[1])["tensors"]) == len(base)


def test_memory_stays_bounded_on_tensors_that_are_larger(tmp_path: Path) -> None:
    """Sparse files: 64 M elements in bf16 (128 MB) and fp32 (256 MB), without torch."""
    for name, dtype in (("a", DType.F32), ("b", DType.BF16)):
        header, _ = build_header([HeaderEntry("x", dtype, (1 << 6, 1 << 20))])
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + (dtype.itemsize << 26))
    script = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from zexport import diff_models\n"
        "report = diff_models(sys.argv[1], sys.argv[2], jobs=4)\n"
        "assert report.verdict.cause.value == 'rounding', report.verdict\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a"), str(tmp_path / "b")],
        capture_output=True,
        check=True,
        timeout=600,
        text=True,
    )
    assert int(done.stdout) < 150 * 1024
