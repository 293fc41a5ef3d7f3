"""``zexport inspect``: what it says of whole, damaged, unsupported and very large checkpoints."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.checkpoints import (
    Model,
    Run,
    model_file,
    optimizer_file,
    save,
    small_model,
)
from tests.support.forked import typed
from tests.support.sparse_checkpoint import write_sparse_zero3
from zexport import ExportOptions, NameLayout, UnsafeError, UnsupportedError, consolidate
from zexport.inspect.inspect import Inspection, Outcome, inspect_checkpoint
from zexport.report.inspect import print_inspection
from zexport.report.inspect_json import inspection_json

FIXTURES = Path(__file__).parents[2] / "fixtures"

TAG = "global_step2"

_NOTHING_TO_DESCRIBE = {"dmg_latest_traversal": UnsafeError, "dmg_z3_deflated": UnsupportedError}


def text_of(inspection: Inspection, **options: Any) -> str:
    out = io.StringIO()
    print_inspection(Console(file=out, width=80), inspection, **options)
    return out.getvalue()


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return typed("inspect", *args)


def as_json(*args: str | Path) -> Any:
    done = run(*args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def real_cases() -> list[Path]:
    folders = [Path(__file__).parents[2] / "fixtures", Path(os.environ.get("ZEXPORT_CASES", ""))]
    return sorted({file.parent for folder in folders for file in folder.glob("*/case.json")})


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in real_cases()])
def test_every_real_checkpoint_is_described_or_refused_in_words(case: Path) -> None:
    facts = json.loads((case / "case.json").read_text())
    root = case / "ckpt" / facts.get("hand_over", "")
    if case.name in _NOTHING_TO_DESCRIBE:
        with pytest.raises(_NOTHING_TO_DESCRIBE[case.name]):
            inspect_checkpoint(root)
        return
    found = inspect_checkpoint(root)
    shown = text_of(found, tensors=True, files=True)
    assert "Verdict: " in shown
    content = json.loads(json.dumps(inspection_json(found, tensors=True), allow_nan=False))
    assert content["verdict"]["exportable"] == (not content["problems"] and not _waits(found))


def _waits(found: Inspection) -> bool:
    return found.verdict.outcome in (Outcome.NEEDS_BASE, Outcome.CHOOSE_TAG)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_says_what_the_run_was(tmp_path: Path, stage: int) -> None:
    model = small_model()
    found = as_json(save(model, Run(stage=stage, world_size=3, steps=7), tmp_path))
    checkpoint = found["checkpoint"]
    assert found["schema"] == 2
    assert found["verdict"]["exportable"]
    assert (checkpoint["stage"], checkpoint["world_size"]) == (stage, 3)
    assert (checkpoint["global_steps"], checkpoint["deepspeed_version"]) == (7, "0.19.8")
    assert (checkpoint["module_dtype"], checkpoint["master_dtype"]) == ("bfloat16", "float32")
    assert checkpoint["optimizer"] == "AdamW"
    for role, tensors in (
        ("trainable", model.masters),
        ("frozen", model.frozen),
        ("buffers", model.buffers),
    ):
        numel = sum(tensor.numel() for tensor in tensors.values())
        assert checkpoint["parameters"][role] == {"tensors": len(tensors), "numel": numel}
    tied = sum(model.tensors[name].numel() for name in model.tied.values())
    assert checkpoint["parameters"]["tied"] == {"tensors": len(model.tied), "numel": tied}


def test_missing_ranks_are_given_by_number_and_by_file_name(tmp_path: Path) -> None:
    model = small_model()
    run_ = Run(stage=3, world_size=4)
    root = save(model, run_, tmp_path)
    gone = [optimizer_file(root / TAG, model, rank) for rank in (1, 3)]
    gone.append(model_file(root / TAG, run_, 0))
    for path in gone:
        path.unlink()
    found = as_json(root)
    missing = found["checkpoint"]["missing"]
    assert (missing["optimizer_ranks"], missing["model_ranks"]) == ([1, 3], [0])
    assert set(missing["files"]) == {path.name for path in gone}
    assert not found["verdict"]["exportable"]
    shown = run(root).stdout
    assert all(path.name in shown for path in gone)
    assert "Verdict: not exportable" in shown


@pytest.mark.parametrize(
    "case",
    ["pp2_tp2_z1_w8_bf16_tied", "tp2_z2_w4_bf16", "tp2_z1_w2_bf16_tied", "stages_moe_z1_w4_ep2"],
)
def test_missing_files_are_named_on_every_stage_and_tensor_rank(case: str, tmp_path: Path) -> None:
    for number in range(len(list((FIXTURES / case / "ckpt").glob("*/*mp_rank_*_states.pt")))):
        root = Path(shutil.copytree(FIXTURES / case / "ckpt", tmp_path / str(number)))
        gone = sorted(root.glob("*/*mp_rank_*_states.pt"))[number]
        if "expert" in gone.name:
            continue
        gone.unlink()
        assert inspect_checkpoint(root).missing_files() == (gone.name,)


def test_frozen_weights_left_out_are_said_to_need_a_base(tmp_path: Path) -> None:
    model = Model([{"w": torch.randn(5)}], {"f": torch.randn(7).bfloat16()})
    root = save(model, Run(stage=3, exclude_frozen=True), tmp_path)
    found = as_json(root)
    assert found["verdict"]["outcome"] == "needs_base"
    assert found["checkpoint"]["frozen_left_out"]
    assert "--base MODEL" in run(root).stdout


def two_tags(root: Path) -> Path:
    save(small_model(), Run(stage=3, steps=9), root, "global_step9")
    save(small_model(), Run(stage=3, steps=10), root, "global_step10")
    return root


def test_several_tags_without_latest_are_shown_and_nothing_is_chosen(tmp_path: Path) -> None:
    root = two_tags(tmp_path)
    (root / "latest").unlink()
    optimizer_file(root / "global_step10", small_model(), 1).unlink()
    found = as_json(root)
    assert found["checkpoint"] is None
    assert [(tag["name"], tag["step"], tag["complete"]) for tag in found["tags"]] == [
        ("global_step9", 9, True),
        ("global_step10", 10, False),
    ]
    assert found["verdict"]["next_step"].endswith("--tag global_step9")  # the newest complete one
    assert "global_step10" in run(root).stdout


def test_the_checkpoints_of_a_run_are_shown_by_the_name_that_tag_takes(tmp_path: Path) -> None:
    for name, step in (("checkpoint-9", 9), ("checkpoint-100", 100)):
        save(small_model(), Run(stage=2, steps=step), tmp_path / name, f"global_step{step}")
    found = as_json(tmp_path)
    assert [(tag["name"], tag["step"]) for tag in found["tags"]] == [
        ("checkpoint-9", 9),
        ("checkpoint-100", 100),
    ]
    assert as_json(tmp_path, "--tag", "checkpoint-9")["checkpoint"]["global_steps"] == 9
    cut = optimizer_file(tmp_path / "checkpoint-100" / "global_step100", small_model(), 1)
    cut.write_bytes(cut.read_bytes()[:-100])
    found = as_json(tmp_path, "--stats", "--html", tmp_path / "run.html")
    assert [tag["complete"] for tag in found["tags"]] == [True, False]
    asked = f"--tag checkpoint-9 --stats --html {tmp_path}/run.html"
    assert found["verdict"]["next_step"].endswith(asked)
    assert "checkpoint-9</dt><dd>step 9, " in (tmp_path / "run.html").read_text()
    assert as_json(tmp_path, "--tag", "newest")["checkpoint"]["global_steps"] == 9


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_placeholders_beside_the_tag_are_named_and_real_weights_are_not(
    zero3: Path, suffix: str
) -> None:
    weights = {"a": torch.empty(0), "b": torch.empty(0), "c": torch.ones(3)}
    path = zero3 / {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[suffix]
    if suffix == "bin":
        torch.save(weights, path)
    else:
        save_file(weights, path)
    (file,) = inspect_checkpoint(zero3).weight_files
    assert (file.name, file.tensors, file.placeholders) == (path.name, 3, ("a", "b"))
    shown = run(zero3).stdout
    assert f"{path.name}: placeholders, 2 of 3 tensors are empty" in shown
    assert "which an export does not read" not in shown


def test_stats_are_those_of_the_exported_tensors(zero2: Path, tmp_path: Path) -> None:
    consolidate(zero2, tmp_path / "out", ExportOptions(layout=NameLayout.MEMORY))
    found = as_json(zero2, "--stats")["checkpoint"]["tensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for entry in found:
            value = file.get_tensor(entry["name"]).double()
            assert entry["statistics"]["max"] == (value.max().item() if value.numel() else None)
            assert entry["statistics"]["norm"] == pytest.approx(value.norm().item(), rel=1e-12)
    assert "Norm" in run(zero2, "--stats").stdout


def test_without_stats_neither_numpy_nor_torch_is_imported(zero3: Path) -> None:
    heavy = ("numpy", "torch", "transformers", "rich.progress")
    program = (
        "import sys; from zexport.cli.inspect import inspect; "
        f"inspect.main([{str(zero3)!r}], standalone_mode=False); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_sixty_four_files_of_ten_gigabytes_are_inspected_by_their_metadata_alone(
    tmp_path: Path,
) -> None:
    shapes = {f"model.layers.{i}.weight": (8192, 16384) for i in range(400)}
    root = tmp_path / "large"
    write_sparse_zero3(root, shapes, world_size=64)
    sizes = [path.stat().st_size for path in root.glob("*/*_optim_states.pt")]
    assert (len(sizes), min(sizes) > 10e9) == (64, True)
    began = time.process_time()
    found = inspect_checkpoint(root)
    text_of(found)
    assert found.verdict.outcome is Outcome.EXPORTABLE
    assert found.nbytes_read() == 400 * 8192 * 16384 * 4
    assert time.process_time() - began < 10  # about 1 s; reading the holes would take minutes
