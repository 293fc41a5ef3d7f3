"""Attempts to get a wrong model, foreign code or a lost folder out of zexport."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zexport
from tests.support.checkpoints import Run, save, small_model, values
from tests.support.expert_checkpoints import rewrite
from zexport.errors import (
    DamagedCheckpointError,
    OutputError,
    UnsafeError,
)
from zexport.options import ExportOptions

FIXTURES = Path(__file__).parents[2] / "fixtures"


def _copy(name: str, tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / name / "ckpt", tmp_path / "ckpt")


def _files(root: Path, ending: str) -> list[Path]:
    return sorted(root.glob(f"global_step*/*{ending}"))


def _refused(root: Path, out: Path, match: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=match):
        zexport.consolidate(root, out)
    assert not out.exists()


# --- a wrong model ---


def test_a_base_weight_comes_from_the_file_that_the_index_names(tmp_path: Path) -> None:
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
def test_a_base_index_that_leads_elsewhere_is_refused(name: object, tmp_path: Path) -> None:
    root = save(small_model(), Run(exclude_frozen=True), tmp_path / "run")
    (base := tmp_path / "base").mkdir()
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UnsafeError, match="does not lie beside it"):
        zexport.consolidate(root, tmp_path / "out", ExportOptions(base=base))


def test_a_checkpoint_of_no_weight_makes_no_model(zero2: Path, tmp_path: Path) -> None:
    empty: dict[str, object] = {
        "param_shapes": [],
        "module": {},
        "buffer_names": [],
        "frozen_param_shapes": {},
    }
    for path in _files(zero2, "model_states.pt"):
        rewrite(path, lambda state: state.update(empty, shared_params={}))
    groups: dict[str, object] = {"single_partition_of_fp32_groups": [], "partition_count": []}
    more: dict[str, object] = {"param_slice_mappings": [], "param_alignment_paddings": []}
    for path in _files(zero2, "optim_states.pt"):
        rewrite(path, lambda state: state["optimizer_state_dict"].update(groups, **more))
    _refused(zero2, tmp_path / "out", "contains no weights")


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (lambda tensors: tensors.clear(), "lists no tensor"),
        (
            lambda tensors: tensors.update(x={**tensors["scale"], "shard": "README.md"}),
            "is listed in a file that is not",
        ),
    ],
)
def test_a_manifest_that_accounts_for_no_weight_is_not_whole(
    table: Callable[[dict[str, object]], object], problem: str, zero3: Path, tmp_path: Path
) -> None:
    zexport.consolidate(zero3, out := tmp_path / "out")
    manifest = json.loads((out / "zexport_manifest.json").read_text())
    table(manifest["tensors"])
    if not manifest["tensors"]:
        del manifest["files"]["model.safetensors"]
        (out / "model.safetensors").unlink()
    (out / "zexport_manifest.json").write_text(json.dumps(manifest))
    assert problem in {one.problem for one in zexport.verify_export(out).problems}


# --- foreign code ---


def test_modules_that_lie_in_the_checkpoint_are_not_imported(tmp_path: Path) -> None:
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
def test_a_checkpoint_is_not_cleared_away_for_its_name(ending: str, tmp_path: Path) -> None:
    root = save(small_model(), Run(), tmp_path / f"model{ending}")
    before = sorted(root.rglob("*"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    with pytest.raises(OutputError, match="would be mixed"):
        zexport.consolidate(root, tmp_path / "model", ExportOptions(overwrite=True))
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("ending", [".partial", ".replaced"])
def test_a_folder_of_the_user_is_not_cleared_away_for_its_name(
    ending: str, zero3: Path, tmp_path: Path
) -> None:
    mine = tmp_path / f"model{ending}" / "mine"
    mine.parent.mkdir()
    mine.write_text("kept")
    with pytest.raises(OutputError, match="is in the way") as caught:
        zexport.consolidate(zero3, tmp_path / "model", ExportOptions(overwrite=True))
    assert caught.value.path == mine.parent
    with pytest.raises(OutputError, match="is in the way"):  # nor by a second try
        zexport.consolidate(zero3, tmp_path / "model", ExportOptions(overwrite=True))
    assert mine.read_text() == "kept"
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("level", ["", "global_step2", ".."])
def test_overwrite_does_not_replace_a_checkpoint(level: str, zero3: Path, tmp_path: Path) -> None:
    other = save(small_model(), Run(), tmp_path / "runs" / "checkpoint-2")
    before = sorted(other.rglob("*"))
    with pytest.raises(OutputError, match="holds a checkpoint"):
        zexport.consolidate(zero3, other / level, ExportOptions(overwrite=True))
    assert sorted(other.rglob("*")) == before


def test_a_mount_point_is_refused_before_the_work(
    zero3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out := tmp_path / "out").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == out)
    with pytest.raises(OutputError, match="mount point"):
        zexport.consolidate(zero3, out)


# --- a traceback ---


def test_a_name_tied_to_itself_is_no_alias(zero2: Path, tmp_path: Path) -> None:
    rewrite(
        _files(zero2, "model_states.pt")[0],
        lambda state: state["shared_params"].update({"lin.weight": "lin.weight"}),
    )
    zexport.consolidate(zero2, tmp_path / "out")
    assert "lin.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_chat_templates_in_a_folder_of_their_own_are_exported(zero3: Path, tmp_path: Path) -> None:
    (zero3 / "tokenizer.json").write_text("{}")
    (templates := zero3 / "additional_chat_templates").mkdir()
    (templates / "tools.jinja").write_text("{{ tools }}")
    zexport.consolidate(zero3, tmp_path / "out")
    copied = tmp_path / "out" / "additional_chat_templates" / "tools.jinja"
    assert copied.read_text() == "{{ tools }}"
    assert zexport.verify_export(tmp_path / "out").ok
    copied.write_text("{{ other }}")
    assert not zexport.verify_export(tmp_path / "out").ok
