"""Node-local checkpoints: each node has only its ranks' files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import zexport
from tests.support.checkpoints import Run, edit, save, small_model
from tests.support.exports import export, invoke, verify
from tests.support.forked import typed
from zexport import DamagedCheckpointError, ExportOptions, NameLayout, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
MEMORY = ExportOptions(layout=NameLayout.MEMORY)
TAG = "global_step2"
MODEL_FILE = "mp_rank_00_model_states.pt"
REAL = ["z3_w4_bf16_odd", "z2_w3_bf16_odd", "z3_w2_bf16_frozen", "tp2_z2_w4_bf16", "moe_z2_w4_ep2"]


def nodes(root: Path, run: Run) -> list[Path]:
    """A node for each of two ranks; each saves the model states file of ZeRO-2."""
    found = [save(small_model(), run, root / f"node{rank}") for rank in range(2)]
    for rank, node in enumerate(found):
        for path in (node / TAG).glob(f"*pp_rank_{1 - rank}_*"):
            path.unlink()
    return found


def distributed(name: str, root: Path) -> list[Path]:
    """A real checkpoint on two nodes: even and odd ranks."""
    folders = [root / "node0", root / "node1"]
    source = FIXTURES / name / "ckpt"
    for folder in folders:
        (folder / TAG).mkdir(parents=True)
        shutil.copy(source / "latest", folder / "latest")
    for path in (source / TAG).iterdir():
        rank = path.name.partition("pp_rank_")[2].partition("_")[0]
        shutil.copy(path, folders[int(rank or 0) % 2] / TAG / path.name)
    return folders


def exported(checkpoint: Path | list[Path], out: Path) -> dict[str, bytes]:
    zexport.consolidate(checkpoint, out, MEMORY)
    return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


@pytest.mark.parametrize("name", REAL)
def test_export_equals_that_of_one_folder(name: str, tmp_path: Path) -> None:
    parts = distributed(name, tmp_path)
    whole = exported(FIXTURES / name / "ckpt", tmp_path / "whole")
    assert exported(parts, tmp_path / "out") == whole
    assert exported(parts[::-1], tmp_path / "reversed") == whole
    moved = [parts[0], parts[1].rename(tmp_path / "whole" / "elsewhere")]
    assert zexport.verify_export(tmp_path / "out", against=moved).ok


def test_model_states_next_to_rank_0_are_read_for_tied_weights(tmp_path: Path) -> None:
    parts = nodes(tmp_path, Run(stage=2))
    edit(parts[1] / TAG / MODEL_FILE, lambda state: state.update(shared_params={"x.y": "z"}))
    for order in (parts, parts[::-1]):
        opened = zexport.open_checkpoint(order)
        assert opened.problems == ()
        files = opened.files
        assert [f.path.parent.parent for f in files if f.path.name == MODEL_FILE] == [parts[0]]


@pytest.mark.parametrize("stage", [2, 3])
def test_different_files_of_one_name_are_rejected(stage: int, tmp_path: Path) -> None:
    parts = nodes(tmp_path, Run(stage=stage))
    if stage == 2:
        edit(parts[1] / TAG / MODEL_FILE, lambda state: state.update(global_steps=7))
    else:
        path = next((parts[0] / TAG).glob("*optim*"))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        (parts[1] / TAG / path.name).write_bytes(content)
    with pytest.raises(DamagedCheckpointError) as caught:
        zexport.open_checkpoint(parts)
    assert caught.value.path.parent.parent == parts[1]  # type: ignore[union-attr]


def test_folders_of_different_checkpoints_are_rejected(tmp_path: Path) -> None:
    parts = [save(small_model(), Run(), tmp_path / tag, tag) for tag in ("step1", "step2")]
    for tag in (None, "newest"):
        with pytest.raises(UsageError):
            zexport.open_checkpoint(parts, tag=tag)


def test_commands_take_several_folders(tmp_path: Path) -> None:
    parts, out = distributed("z3_w4_bf16_odd", tmp_path), tmp_path / "out"
    one = typed("consolidate", parts[0], out)
    assert (one.returncode, one.stdout) == (3, "")
    assert "ranks 1, 3" in one.stderr
    export(parts[0], parts[1], out, "--layout", "memory")
    verify(out, "--against", parts[0], "--against", parts[1])


def test_files_that_only_one_node_has_are_used(tmp_path: Path) -> None:
    parts = nodes(tmp_path, Run(stage=3))
    content = {"model_type": "mine", "rms_norm_eps": 1e-5}
    (parts[1] / "config.json").write_text(json.dumps(content))
    (parts[1] / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    for given in (parts, parts[::-1]):
        out = tmp_path / f"out {given[0].name}"
        zexport.consolidate(given, out, MEMORY)
        assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 1e-5
        assert json.loads((out / "generation_config.json").read_text()) == {"top_k": 7}
        missing = invoke("inspect", *given)["checkpoint"]["missing"]
        assert "config.json" not in str(missing)
