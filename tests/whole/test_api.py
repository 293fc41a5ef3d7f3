"""Public functions of the package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zexport
from tests.support.checkpoints import Run, save, small_model
from zexport import CheckpointError, DamagedCheckpointError

_FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_every_public_name_exists() -> None:
    for name in zexport.__all__:
        assert getattr(zexport, name) is not None
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = zexport.nothing_such


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import sys, zexport; zexport.open_checkpoint; zexport.plan_export;"
        "print(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_consolidate_equals_its_steps(zero2: Path, tmp_path: Path) -> None:
    report = zexport.consolidate(zero2, tmp_path / "whole")
    plan = zexport.plan_export(zexport.open_checkpoint(zero2), tmp_path / "steps")
    zexport.run_export(plan)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("whole", "steps")
    )
    assert one == two
    assert (
        set(one)
        == set(report.files)
        == {
            "README.md",
            "model.safetensors",
            "zexport_manifest.json",
        }
    )


def test_verify_uses_the_tag_of_the_manifest(tmp_path: Path) -> None:
    for step in (2, 4):
        root = save(small_model(), Run(steps=step), tmp_path / "ckpt", f"global_step{step}")
    zexport.consolidate(root, tmp_path / "out", tag="global_step2")
    (root / "latest").unlink()
    assert zexport.verify_export(tmp_path / "out", against=root).ok


def test_verify_against_a_checkpoint_without_the_tag_is_refused(tmp_path: Path) -> None:
    for step in (2, 4):
        save(small_model(), Run(steps=step), tmp_path / f"run{step}", f"global_step{step}")
    zexport.consolidate(tmp_path / "run2", tmp_path / "out")
    for other in (tmp_path / "run4", tmp_path / "run4" / "global_step4"):
        with pytest.raises(
            CheckpointError,
            match=r"is not the checkpoint that the export .*expected the tag global_step2",
        ):
            zexport.verify_export(tmp_path / "out", against=other)


def test_checkpoint_changed_after_planning_is_refused(zero3: Path, tmp_path: Path) -> None:
    plan = zexport.plan_export(zexport.open_checkpoint(zero3), tmp_path / "out")
    path = next(zero3.glob("*/*_optim_states.pt"))
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DamagedCheckpointError, match="file changed"):
        zexport.run_export(plan)
    assert not (tmp_path / "out").exists()


def test_model_file_changed_after_planning_is_refused(tmp_path: Path) -> None:
    """Otherwise the old config could end up with the new tokenizer."""
    root = tmp_path / "ckpt"
    shutil.copytree(_FIXTURES / "z3_w2_bf16" / "ckpt", root)
    opened = zexport.open_checkpoint(root)
    to_reshard = zexport.ReshardOptions(world_size=3)
    plans = [
        zexport.plan_export(opened, tmp_path / "out"),
        zexport.plan_reshard(opened, tmp_path / "out", to_reshard),
    ]
    for name in ("config.json", "tokenizer_config.json"):
        (root / name).write_text((root / name).read_text() + "\n")
    for plan in plans:
        with pytest.raises(CheckpointError, match="file changed after planning"):
            zexport.run_export(plan)
        assert not (tmp_path / "out").exists()
