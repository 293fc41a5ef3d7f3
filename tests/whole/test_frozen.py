"""Folders that earlier versions wrote: verified, continued, and exported again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fixtures.make_frozen import SOURCE, SOURCE_MTIME_NS
from tests.support.exports import invoke
from tests.support.real_cases import FIXTURES
from tests.support.stopping import files

VERSIONS = sorted((FIXTURES / "frozen").iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda folder: str(folder.name))
def frozen(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder: Path = request.param
    return shutil.copytree(folder, tmp_path / "frozen")


def test_export_and_resharding_verify(frozen: Path) -> None:
    for name in ("export", "resharded"):
        invoke("verify", frozen / name)
        invoke("verify", frozen / name, "--against", SOURCE)


def test_pruned_checkpoint_exports_the_same_weights(frozen: Path) -> None:
    pruned = frozen / "run" / "checkpoint-2"
    assert invoke("inspect", pruned)["checkpoint"]["notes"]
    invoke("verify", frozen / "export", "--against", pruned)
    invoke("consolidate", pruned, frozen / "again", "--dtype", "bf16")
    weights = "model.safetensors"
    assert (frozen / "again" / weights).read_bytes() == (frozen / "export" / weights).read_bytes()


def test_other_part_completes_an_unfinished_folder(frozen: Path) -> None:
    source = shutil.copytree(SOURCE, frozen / "source" / "checkpoint-2")
    for path in (source, *source.rglob("*")):
        os.utime(path, ns=(SOURCE_MTIME_NS, SOURCE_MTIME_NS))
    kept = next((frozen / "unfinished.partial").glob("global_step*/*rank_0_*")).stat().st_ino
    invoke("reshard", source, frozen / "unfinished", "-n", "3", "--part", "2/2")
    assert next((frozen / "unfinished").glob("global_step*/*rank_0_*")).stat().st_ino == kept
    written, expected = (files(frozen / name) for name in ("unfinished", "resharded"))
    del written["zexport_manifest.json"], expected["zexport_manifest.json"]
    assert written == expected
