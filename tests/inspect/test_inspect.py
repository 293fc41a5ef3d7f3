"""``zexport inspect`` of complete, damaged, ambiguous and very large checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import Model, Run, model_file, optimizer_file, save, small_model
from tests.support.cli import run

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO3 = FIXTURES / "z3_w2_bf16" / "ckpt"
TAG = "global_step2"
FOLDERS = [FIXTURES, Path(os.environ.get("ZEXPORT_CASES", ""))]
CASES = sorted({file.parent for folder in FOLDERS for file in folder.glob("*/case.json")})
_UNREADABLE = {"dmg_latest_traversal": "unsafe"}


def inspect(*words: object) -> Any:
    done = run("inspect", *words, "--json").or_raise()
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_every_real_checkpoint_is_described_or_refused(case: Path) -> None:
    root = case / "ckpt" / json.loads((case / "case.json").read_text()).get("hand_over", "")
    done = run("inspect", root, "--tensors", "--files", "--json")
    if case.name in _UNREADABLE:
        assert done.error is not None
        assert done.error.kind == _UNREADABLE[case.name]
        return
    found = json.loads(done.or_raise().stdout)
    assert (found["verdict"]["outcome"] == "not_exportable") == bool(found["problems"])
    if found["checkpoint"] is not None:
        numel = sum(one["numel"] for one in found["checkpoint"]["tensors"])
        roles = ("trainable", "frozen", "buffers")
        counts = [found["checkpoint"]["parameters"][role] for role in roles]
        assert numel == sum(count["numel"] for count in counts)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_run_is_described(tmp_path: Path, stage: int) -> None:
    model = small_model()
    root = save(model, Run(stage=stage, world_size=3, steps=7), tmp_path)
    found = inspect(root)
    checkpoint = found["checkpoint"]
    assert found["verdict"]["exportable"]
    assert (checkpoint["stage"], checkpoint["world_size"]) == (stage, 3)
    assert (checkpoint["global_steps"], checkpoint["deepspeed_version"]) == (7, "0.19.8")
    assert (checkpoint["module_dtype"], checkpoint["master_dtype"]) == ("bfloat16", "float32")
    assert checkpoint["optimizer"] == "AdamW"
    roles = {"trainable": model.trained, "frozen": model.frozen, "buffers": model.buffers}
    for role, tensors in roles.items():
        numel = sum(tensor.numel() for tensor in tensors.values())
        assert checkpoint["parameters"][role] == {"tensors": len(tensors), "numel": numel}
    tied = sum(model.tensors[name].numel() for name in model.tied.values())
    assert checkpoint["parameters"]["tied"] == {"tensors": len(model.tied), "numel": tied}
    text = run("inspect", root, "--files", "--tensors", "--stats").stdout
    for word in (
        "Verdict: exportable",
        "Norm",
        *(Path(f["name"]).name for f in checkpoint["files"]),
    ):
        assert word in text


def test_missing_rank_files_are_named(tmp_path: Path) -> None:
    model, settings = small_model(), Run(stage=3, world_size=4)
    root = save(model, settings, tmp_path)
    gone = [optimizer_file(root / TAG, model, rank) for rank in (1, 3)]
    gone.append(model_file(root / TAG, settings, 0))
    for path in gone:
        path.unlink()
    found = inspect(root, "--stats")
    missing = found["checkpoint"]["missing"]
    assert (missing["optimizer_ranks"], missing["model_ranks"]) == ([1, 3], [0])
    assert set(missing["files"]) == {path.name for path in gone}
    assert found["verdict"]["outcome"] == "not_exportable"
    assert any(one["statistics"] is None for one in found["checkpoint"]["tensors"])
    text = run("inspect", root).stdout
    assert all(path.name in text for path in gone)
    assert "Verdict: not exportable" in text


@pytest.mark.parametrize("case", ["pp2_tp2_z1_w8_bf16_tied", "tp2_z2_w4_bf16"])
def test_missing_file_of_any_model_parallel_rank_is_named(case: str, tmp_path: Path) -> None:
    root = shutil.copytree(FIXTURES / case / "ckpt", tmp_path / "ckpt")
    for gone in sorted(root.glob("*/*mp_rank_*_states.pt")):
        gone.rename(tmp_path / gone.name)
        assert inspect(root)["checkpoint"]["missing"]["files"] == [gone.name]
        (tmp_path / gone.name).rename(gone)


def test_missing_frozen_weights_need_a_base(tmp_path: Path) -> None:
    model = Model([{"w": torch.randn(5)}], {"f": torch.randn(7).bfloat16()})
    found = inspect(save(model, Run(stage=3, exclude_frozen=True), tmp_path))
    assert found["verdict"]["outcome"] == "needs_base"
    assert found["checkpoint"]["frozen_left_out"]
    assert "--base MODEL" in found["verdict"]["next_step"]


def test_tags_are_listed_with_size_and_none_is_chosen_without_latest(tmp_path: Path) -> None:
    for step in (9, 10):
        save(small_model(), Run(stage=3, steps=step), tmp_path, f"global_step{step}")
    optimizer_file(tmp_path / "global_step10", small_model(), 1).unlink()
    tags = inspect(tmp_path)["tags"]
    assert [(tag["name"], tag["complete"], tag["chosen"]) for tag in tags] == [
        ("global_step9", None, False),
        ("global_step10", False, True),
    ]
    for tag in tags:
        files = (tmp_path / tag["name"]).iterdir()
        assert tag["nbytes"] == sum(file.stat().st_size for file in files)
    (tmp_path / "latest").unlink()
    found = inspect(tmp_path)
    assert found["checkpoint"] is None
    assert [(tag["step"], tag["complete"]) for tag in found["tags"]] == [(9, True), (10, False)]
    assert found["verdict"]["next_step"].endswith("--tag global_step9")
    assert "global_step10" in run("inspect", tmp_path).stdout


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_placeholders_in_weight_files_are_reported(zero3: Path, name: str) -> None:
    weights = {"a": torch.empty(0), "b": torch.empty(0), "c": torch.ones(3)}
    if name.endswith(".bin"):
        torch.save(weights, zero3 / name)
    else:
        save_file(weights, zero3 / name)
    (file,) = inspect(zero3)["checkpoint"]["weight_files"]
    assert (file["name"], file["tensors"], file["placeholders"]) == (name, 3, ["a", "b"])
    assert f"{name}: placeholders; the export" in run("inspect", zero3).stdout


def test_fail_exits_like_consolidate(tmp_path: Path) -> None:
    cut = shutil.copytree(ZERO3, tmp_path / "cut")
    next((cut / TAG).glob("*rank_1*optim_states.pt")).unlink()
    ambiguous = shutil.copytree(ZERO3, tmp_path / "ambiguous")
    shutil.copytree(ambiguous / TAG, ambiguous / "global_step4")
    (ambiguous / "latest").unlink()
    misfit = shutil.copytree(ZERO3, tmp_path / "misfit")  # only planning finds this
    config = json.loads((misfit / "config.json").read_text())
    (misfit / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    (misfit / "zexport_source.json").unlink(missing_ok=True)
    codes = []
    for path in (ZERO3, ZERO3.parent, cut, ambiguous, misfit, tmp_path / "nothing"):
        codes.append(run("inspect", path, "--fail").exit_code)
        assert codes[-1] == run("consolidate", path, tmp_path / path.name / "out").exit_code, path
    assert codes == [0, 0, 3, 2, 4, 3]
    assert run("inspect", cut).exit_code == 0
    assert "Error: " in run("inspect", misfit, "--fail").stderr
