"""Inputs that try to cause a wrong model, code execution or a lost folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zexport
from tests.support.checkpoints import Run, save, small_model, values
from zexport import ExportOptions, OutputError, UnsafeError

FIXTURES = Path(__file__).parents[2] / "fixtures"


def _copy(name: str, tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / name / "ckpt", tmp_path / "ckpt")


# --- a wrong model ---


def test_base_weight_comes_from_the_file_named_in_the_index(tmp_path: Path) -> None:
    model = small_model()
    root = save(model, Run(exclude_frozen=True), tmp_path / "run")
    (base := tmp_path / "base").mkdir()
    whole = {name: tensor.contiguous() for name, tensor in model.tensors.items()}
    save_file(whole, base / "a.safetensors")
    save_file({name: values(t.shape, 99) for name, t in whole.items()}, base / "b.safetensors")
    placed = dict.fromkeys(whole, "a.safetensors") | {"another": "b.safetensors"}
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    zexport.consolidate(root, tmp_path / "out", ExportOptions(base=base))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], model.frozen[name].float()) for name in model.frozen)


@pytest.mark.parametrize("name", ["../a.safetensors", "/a", "..", "", "a\0", 5])
def test_base_index_outside_its_folder_is_refused(name: object, tmp_path: Path) -> None:
    root = save(small_model(), Run(exclude_frozen=True), tmp_path / "run")
    (base := tmp_path / "base").mkdir()
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UnsafeError, match="index"):
        zexport.consolidate(root, tmp_path / "out", ExportOptions(base=base))


# --- code execution ---


def test_modules_in_the_checkpoint_folder_are_not_imported(tmp_path: Path) -> None:
    root = _copy("z3_w2_bf16", tmp_path)
    (root / "zexport_source.json").unlink(missing_ok=True)
    seen = tmp_path / "seen"
    for module in ("json", "torch", "transformers"):
        (root / f"{module}.py").write_text(f"open({str(seen)!r}, 'a').write({module!r})")
    script = Path(sys.executable).with_name("zexport")
    done = subprocess.run(
        [script, "consolidate", ".", "../out", "--quiet"],
        cwd=root,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not seen.exists()


# --- a lost folder ---


@pytest.mark.parametrize("ending", [".partial", ".replaced"])
def test_checkpoint_named_like_a_staging_folder_is_kept(ending: str, tmp_path: Path) -> None:
    root = save(small_model(), Run(), tmp_path / f"model{ending}")
    before = sorted(root.rglob("*"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    with pytest.raises(OutputError, match=r"would be mixed|blocks the export"):
        zexport.consolidate(root, tmp_path / "model", ExportOptions(overwrite=True))
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("ending", [".partial", ".replaced"])
def test_user_folder_named_like_a_staging_folder_is_kept(
    ending: str, zero3: Path, tmp_path: Path
) -> None:
    mine = tmp_path / f"model{ending}" / "mine"
    mine.parent.mkdir()
    mine.write_text("kept")
    with pytest.raises(OutputError, match="blocks the export") as caught:
        zexport.consolidate(zero3, tmp_path / "model", ExportOptions(overwrite=True))
    assert caught.value.path == mine.parent
    with pytest.raises(OutputError, match="blocks the export"):  # a second attempt keeps it, too
        zexport.consolidate(zero3, tmp_path / "model", ExportOptions(overwrite=True))
    assert mine.read_text() == "kept"
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("level", ["", "global_step2", ".."])
def test_overwrite_does_not_replace_a_checkpoint(level: str, zero3: Path, tmp_path: Path) -> None:
    other = save(small_model(), Run(), tmp_path / "runs" / "checkpoint-2")
    before = sorted(other.rglob("*"))
    with pytest.raises(OutputError, match="contains a checkpoint"):
        zexport.consolidate(zero3, other / level, ExportOptions(overwrite=True))
    assert sorted(other.rglob("*")) == before
